import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from typing_extensions import Self, override

from lightning_robustness._display import report_figures as figures
from lightning_robustness._display.table import Cell, Table
from lightning_robustness._measurement.assisted import Assisted, Estimate
from lightning_robustness._measurement.threat_model import ThreatModel
from lightning_robustness._numbers import write_budget, write_share
from lightning_robustness.evaluation.reports.report import Report, Share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Metrics of the CMMR paper, and whether higher is more robust
SWEEP_METRICS = {"accuracy": True, "ssim": True, "psnr": True, "mse": False, "ald2": False}

_ASSISTED = (
    "Accuracy is estimated for all samples, assisted by their margins. Image quality, and the accuracy in CMMR, are "
    "plain means over the attacked samples."
)


@dataclass(repr=False, kw_only=True)
class SweepReport(Report):
    """Accuracy and image quality for every attack and budget.

    Args:
        attacks: Names of the attacks.
        budgets: Budgets, increasing, in un-normalised units.
        values: ``"accuracy"``, ``"ssim"``, ``"psnr"``, ``"mse"`` and ``"ald2"``, each with one list per attack, of
            one value per budget; NaN where a metric is undefined.
        worst: Accuracy at each budget when a sample counts as wrong as soon as any of the attacks breaks it.
        clean_accuracy: Accuracy without an attack.
        samples: Number of attacked samples.
        seconds: Time that each attack took, over all budgets.
        settings: Settings, as text.
        interrupted: Whether the sweep was interrupted, so that some samples are missing.
        breaking_eps: On request, for each attack and sample, the smallest budget that breaks it: 0 if it is
            misclassified without an attack, infinity if no budget does.
        index: On request, the position of each of these samples in the loader.
        shares: For each attack, and for their worst case ``"worst"``, accuracy at each budget with its 95 % interval
            and the plain share. Where a pass over all samples was made, as in ``evaluate`` and ``compare``, these,
            ``worst`` and ``clean_accuracy`` are estimates for all of them, assisted by their margins; ``values``, by
            which CMMR goes, are always plain.
        outcomes: For each budget, positions of the attacked samples, which of them withstand all attacks, and what is
            needed to compare models by pairs.
        threat_model: Norm and settings of the attacks, at the smallest budget.
        provenance: Where the report comes from: time, versions, machine.

    """

    attacks: list[str]
    budgets: list[float]
    values: dict[str, list[list[float]]]
    worst: list[float]
    clean_accuracy: float
    samples: int
    seconds: dict[str, float]
    settings: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False
    breaking_eps: dict[str, list[float]] | None = None
    index: list[int] | None = None
    shares: dict[str, list[Estimate]] = field(default_factory=dict)
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    threat_model: ThreatModel = field(default_factory=ThreatModel)
    provenance: dict[str, str] = field(default_factory=dict)

    title = "Robustness curves"

    def __post_init__(self) -> None:
        if self.breaking_eps is not None:  # JSON has no infinity, and gives it back as NaN
            rows = self.breaking_eps.items()
            self.breaking_eps = {name: [math.inf if math.isnan(eps) else eps for eps in row] for name, row in rows}

    @property
    @override
    def verdict(self) -> str:
        interrupted = "; interrupted before all samples were attacked" if self.interrupted else ""
        return f"{self._robustness}{interrupted}."

    @property
    def _robustness(self) -> str:
        """Robust accuracy at the middle budget."""
        share, clean = self.robust_accuracy(), write_share(self.clean_accuracy)
        budget = write_budget(self._middle, self._norm)
        return f"{write_share(share.value)} robust accuracy at {budget} {share}, {clean} clean"

    @property
    @override
    def facts(self) -> dict[str, str]:
        ends = f"{write_budget(self.budgets[0])} to {write_budget(self.budgets[-1])}"
        return self.threat_model.describe(f"{ends}, {len(self.budgets)} budgets")

    @property
    def _middle(self) -> float:
        """The middle budget, which stands for the sweep where a single one is needed."""
        return self.budgets[len(self.budgets) // 2]

    @property
    def _scale(self) -> figures.Scale:
        """How budgets are written: for images, in steps of 8-bit pixels."""
        is_in_steps = self._norm == "linf" and write_budget(self._middle).endswith("/255")
        return figures.Scale(self.threat_model.has_pixels and is_in_steps, self._norm)

    @property
    def _curves(self) -> dict[str, list[float]]:
        """Accuracy under each attack and under the worst of several, over no budget and all budgets."""
        return {name: [self.clean_accuracy, *values] for name, values in self._accuracies.items()}

    @property
    def _accuracies(self) -> dict[str, list[float]]:
        """Accuracy under each attack and under the worst of several at all budgets, as estimated for all samples."""
        found = dict(zip(self.attacks, self.values["accuracy"], strict=True))
        found |= {name: [share.value for share in own] for name, own in self.shares.items() if name in found}
        return found | ({figures.WORST: self.worst} if len(self.attacks) > 1 else {})

    @property
    def _norm(self) -> str | None:
        """Norm of the budgets; None if it is unknown or differs between attacks."""
        norms = {norm for facts in self.threat_model.attacks.values() for norm in facts.budgets}
        return norms.pop() if len(norms) == 1 else None

    def robust_accuracy(self, eps: float | None = None) -> Share:
        """Return the accuracy under the worst of the attacks at a budget, by default the middle one; 0 for none.

        Raises:
            ValueError: If the budget is not one of the sweep.

        """
        eps = self._middle if eps is None else eps
        if eps not in (0, *self.budgets):
            listed = ", ".join(map(write_budget, self.budgets))
            raise ValueError(f"Expected argument `eps` to be one of the sweep, {listed}, or 0 but got {eps!r}.")
        if eps in self.budgets and "worst" in self.shares:
            return Share(*self.shares["worst"][self.budgets.index(eps)][:3], self.samples)
        if eps == 0:  # where margins assist, of all samples
            return Share.of(self.clean_accuracy, self.outcomes[0]["total"] if self.outcomes else self.samples)
        return Share.of(self.worst[self.budgets.index(eps)], self.samples)

    def _outcome(self, column: int) -> Assisted | None:
        """Return what the worst of the attacks did to each sample at a budget; None where it was not kept."""
        return Assisted.from_plain(self.outcomes[column]) if self.outcomes else None

    @override
    def tables(self) -> list[Table]:
        header = ["eps", "attack", "accuracy", "SSIM", "PSNR (dB)", "MSE", "ALD2"]
        quality = [name for name in SWEEP_METRICS if name != "accuracy"]
        rows: list[list[Cell]] = [
            [
                *(write_budget(eps), name, accuracies[column]),
                *(self.values[metric][row][column] if row < len(self.attacks) else math.nan for metric in quality),
            ]
            for row, (name, accuracies) in enumerate(self._accuracies.items())
            for column, eps in enumerate(self.budgets)
        ]
        is_assisted = any(share.is_assisted for own in self.shares.values() for share in own)
        note = _ASSISTED if is_assisted else ""
        settings = [[name, value] for name, value in self.settings.items()]
        return [
            Table("Accuracy and image quality", header, rows, note=note, folded=True),
            *([Table("Settings of the sweep", ["setting", "value"], settings, folded=True)] if settings else []),
        ]

    @override
    def figures(self) -> dict[str, "Figure"]:
        return {"Accuracy against the budget, for every attack": self.plot()}

    @property
    @override
    def notes(self) -> list[str]:
        return [f"The sweep was interrupted: it covers {self.samples} samples."] if self.interrupted else []

    def _without_samples(self) -> Self:
        """Return the report without per-sample values."""
        return replace(self, breaking_eps=None, index=None)

    def plot(self, metric: str = "accuracy") -> "Figure":
        """Draw a metric against the budget, one curve per attack.

        Args:
            metric: ``"accuracy"``, ``"ssim"``, ``"psnr"``, ``"mse"`` or ``"ald2"``.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed; the extra ``plot`` brings it.
            ValueError: If the metric is unknown.

        """
        if metric not in self.values:
            raise ValueError(f"Expected `metric` to be one of {', '.join(self.values)} but got {metric!r}.")
        if metric != "accuracy":
            lines = dict(zip(self.attacks, self.values[metric], strict=True))
            return figures.curves(self.budgets, lines, metric, self._scale, limits=None)
        return figures.curves([0.0, *self.budgets], self._curves, "accuracy under attack", self._scale)

    @override
    def _records(self) -> list[dict[str, Any]]:
        return [
            {"attack": attack, "eps": eps, **{name: self.values[name][row][column] for name in SWEEP_METRICS}}
            for row, attack in enumerate(self.attacks)
            for column, eps in enumerate(self.budgets)
        ]
