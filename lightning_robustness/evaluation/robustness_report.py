import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from typing_extensions import Self, override

from lightning_robustness.attacks import MaskingSign
from lightning_robustness.evaluation import figures
from lightning_robustness.evaluation.adversarial_example import AdversarialExample
from lightning_robustness.evaluation.class_accuracy import ClassAccuracy, class_table
from lightning_robustness.evaluation.decision_space import DecisionSpace
from lightning_robustness.evaluation.report import Report, to_floats
from lightning_robustness.evaluation.report_fields import check_fields
from lightning_robustness.evaluation.sweep_report import SweepReport
from lightning_robustness.evaluation.verdict import Share, model_verdict
from lightning_robustness.measurement.boundary_curve import BoundaryCurve
from lightning_robustness.measurement.keys import attack_free_metrics, get_key
from lightning_robustness.measurement.threat_model import ThreatModel
from lightning_robustness.utilities.number_text import write_budget, write_distance
from lightning_robustness.utilities.page import Picture
from lightning_robustness.utilities.table import Cell, NumberText, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(repr=False)
class RobustnessReport(Report):
    """Results of ``evaluate`` for one model; prints as a few tables.

    Args:
        model: Name of the model's class.
        num_classes: Number of classes.
        metrics: Values by the keys of ``RobustnessMonitor``, without prefix.
        rates: For each attack, and for their worst case ``"worst"``: ``asr`` with its 95 % confidence interval
            ``asr_low`` and ``asr_high``, ``error_rate``, ``adv_acc``, median l2 ``distortion`` with failures as
            infinite, and counts of samples.
        signs: Signs of gradient masking.
        settings: Settings, as text.
        interrupted: The part that was being measured when the run was interrupted, or None.
        per_sample: On request, lists with one entry per sample: ``fim_index``, its position in the loader, and ``fim``
            for the samples of the Fisher information; ``boundary_index`` and ``boundary``, their distance to the
            decision boundary; ``index``, ``y``, ``preds`` and, by attack,
            ``adv_preds/<attack>``, ``l2/<attack>`` and ``linf/<attack>`` for the attacked ones. Where an attack
            without a budget succeeds beyond the sizes that count, the prediction is the clean one, and the sizes are
            those of what it found.
        sweep: On request, curves over perturbation budgets.
        decision_space: On request, embeddings in two dimensions.
        boundary: Robust accuracy to first order over budgets, if there are labels.
        threat_model: Norm, budget and settings of the attacks; None in reports of earlier versions.
        classes: Clean and robust accuracy of each class, over the attacked samples, if all attacks ran.
        adversarial_examples: A few pictures, if the inputs are images and an attack succeeded.
        provenance: Where the report comes from: time, versions, machine, seed; from the command also the checkpoint
            and the command line.

    """

    model: str
    num_classes: int
    metrics: dict[str, float]
    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    signs: list[MaskingSign] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    interrupted: str | None = None
    per_sample: dict[str, list[Any]] | None = None
    sweep: SweepReport | None = None
    decision_space: DecisionSpace | None = None
    boundary: BoundaryCurve | None = None
    threat_model: ThreatModel | None = None
    classes: list[ClassAccuracy] = field(default_factory=list)
    adversarial_examples: list[AdversarialExample] = field(default_factory=list)
    provenance: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:  # type: ignore[override]
        """Headline of the text and of the page."""
        return f"Robustness of {self.model}"

    @property
    @override
    def verdict(self) -> str:
        return model_verdict(self)

    @property
    @override
    def facts(self) -> dict[str, str]:
        sweep = {} if self.sweep is None else self.sweep.facts
        if self.threat_model is None:
            return dict.fromkeys(("norm", "budget", "attacks", "samples"), "unknown") if self.rates else sweep
        if sweep and not self.threat_model.attacks:
            return sweep
        return self.threat_model.describe() | ({"sweep": f"{sweep['attacks']}; {sweep['budget']}"} if sweep else {})

    @property
    def boundary_budget(self) -> str:
        """Budget of robust accuracy to first order as text; empty if it is unknown."""
        if self.boundary is None:
            return ""
        return write_budget(self.boundary.budget, self.boundary.norm)

    def cell(self, name: str) -> Cell:
        """Return a value for a table: the distance to the boundary of images in steps of 8-bit pixels."""
        value = self.metrics.get(name, math.nan)
        has_pixels = self.threat_model is not None and self.threat_model.has_pixels
        in_linf = self.boundary is not None and self.boundary.norm == "linf"
        is_written = name == "boundary" and has_pixels and in_linf and math.isfinite(value)
        return NumberText(write_distance(value)) if is_written else value

    @override
    def tables(self) -> list[Table]:
        tables = [self._summary(), self._attacks(), class_table(self.classes), self._signs(), self._seconds()]
        settings = Table("Settings", ["setting", "value"], list(self.settings.items()), folded=True)
        tables += [settings] if self.sweep is None else [*self.sweep.tables(), settings]
        return [tables[0], *(table for table in tables[1:] if table.rows)]

    @override
    def figures(self, columns: int = 3) -> dict[str, "Figure"]:
        drawn = {"Accuracy without and with attacks": self._plot_accuracies()} if self.rates else {}
        if self.sweep is not None:
            drawn |= self.sweep.figures(columns)
        if self.boundary is not None:
            has_pixels = self.threat_model is not None and self.threat_model.has_pixels
            curve = figures.boundary_curve(self.boundary, has_pixels and self.boundary.norm == "linf")
            drawn["Robust accuracy to first order, without attacks"] = curve
        if self.decision_space is not None:
            space = figures.decision_space_figure(self.decision_space, columns)
            drawn["Decision space: inputs of the classifier head"] = space
        return drawn

    @override
    def examples(self) -> list[Picture]:
        return [Picture(f"{example.attack}: {example.caption}", example.png) for example in self.adversarial_examples]

    @override
    def terms(self) -> list[str]:
        return list(self.metrics)

    @property
    @override
    def notes(self) -> list[str]:
        notes = []
        if self.interrupted is not None:
            notes.append(f"The run was interrupted while it measured {self.interrupted}: this report is incomplete.")
        if self.signs:
            names = ", ".join(sign.name for sign in self.signs)
            notes.append(f"Gradients seem to be masked ({names}), so success rates are too low and distances too high.")
        if "worst" in self.rates and any(rate["asr"] > self.rates["worst"]["asr"] for rate in self.rates.values()):
            notes.append("'worst' counts an attack without a budget only where it stays within the others' budget.")
        return notes + ([] if self.sweep is None else self.sweep.notes)

    def plot(self) -> "Figure":
        """Draw the curves of the sweep or, without one, accuracy under each attack with its confidence interval.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed; the extra ``plot`` brings it.
            ValueError: If there is neither.

        """
        if not self.rates and self.sweep is None:
            raise ValueError("Expected results of attacks or a sweep to plot but the report has none.")
        return self._plot_accuracies() if self.sweep is None else self.sweep.plot()

    @override
    def records(self) -> list[dict[str, Any]]:
        return [{"model": self.model, **self.metrics}]

    @override
    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": type(self).__name__,
            **{name: getattr(self, name) for name in ("model", "num_classes", "metrics", "rates")},
            "signs": [sign._asdict() for sign in self.signs],
            **{name: getattr(self, name) for name in ("settings", "interrupted", "per_sample")},
            "sweep": None if self.sweep is None else self.sweep.to_dict(),
            "decision_space": None if self.decision_space is None else self.decision_space.to_dict(),
            "boundary": None if self.boundary is None else self.boundary._asdict(),
            "threat_model": None if self.threat_model is None else self.threat_model.to_dict(),
            "classes": [accuracy._asdict() for accuracy in self.classes],
            "adversarial_examples": [example._asdict() for example in self.adversarial_examples],
            "provenance": self.provenance,
        }

    @classmethod
    @override
    def _from_fields(cls, fields: Mapping[str, Any]) -> Self:
        own = {name: value for name, value in fields.items() if name != "kind"}
        own |= {name: to_floats(own[name]) for name in ("metrics", "rates")}
        own["signs"] = [MaskingSign(**sign) for sign in own["signs"]]
        own["sweep"] = None if own["sweep"] is None else SweepReport._from_fields(own["sweep"])
        space = own["decision_space"]
        own["decision_space"] = None if space is None else DecisionSpace.from_dict(space)
        # Reports of earlier versions do not have the following
        boundary, threat = own.get("boundary"), own.get("threat_model")
        own["boundary"] = None if boundary is None else BoundaryCurve(**boundary)
        own["threat_model"] = None if threat is None else ThreatModel.from_dict(threat)
        own["classes"] = [ClassAccuracy(**entry) for entry in own.get("classes", [])]
        examples = own.get("adversarial_examples", [])
        own["adversarial_examples"] = [AdversarialExample(**entry) for entry in examples]
        return check_fields(cls(**own))

    def _summary(self) -> Table:
        worst = {"adv_acc/worst": self.rates["worst"]["adv_acc"]} if "worst" in self.rates else {}
        values = {name: self.cell(name) for name in ("acc", *attack_free_metrics()) if name in self.metrics} | worst
        rows: list[list[Any]] = [
            [get_key(name).label, value, get_key(name).direction] for name, value in values.items()
        ]
        return Table("Robustness", ["metric", "value", "more robust"], rows)

    def _attacks(self) -> Table:
        header = ["attack", "success rate", "95 % from", "to", "accuracy", "l2 distortion", "attacked", "of"]
        names = ("asr", "asr_low", "asr_high", "adv_acc", "distortion")
        rows: list[list[Any]] = [
            [name, *(rate[part] for part in names), int(rate["correct"]), int(rate["count"])]
            for name, rate in self.rates.items()
        ]
        return Table("Attacks", header, rows)

    def _signs(self) -> Table:
        return Table(
            "Signs of masked gradients", ["sign", "evidence", "meaning", "remedy"], [list(s) for s in self.signs]
        )

    def _seconds(self) -> Table:
        parts: list[list[Any]] = [
            [key.removeprefix("seconds/"), value] for key, value in self.metrics.items() if key.startswith("seconds/")
        ]
        return Table("Time", ["part", "seconds"], parts, folded=True)

    def _plot_accuracies(self) -> "Figure":
        clean, samples = self.metrics.get("acc", math.nan), self.metrics.get("samples", 0)
        shares = {} if math.isnan(clean) else {"clean": Share.of(clean, samples)}
        shares |= {name: Share.of(rate["adv_acc"], rate["count"]) for name, rate in self.rates.items()}
        facts = {} if self.threat_model is None else self.threat_model.attacks
        unbounded = {name: fact.limit for name, fact in facts.items() if not fact.budgets}
        budget = "" if self.threat_model is None else self.threat_model.budget
        return figures.accuracies(shares, unbounded, budget)
