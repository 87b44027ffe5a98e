import math
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_robustness._display import report_figures as figures
from lightning_robustness._display.pictures import AdversarialExample
from lightning_robustness._display.table import Cell, NumberText, Table
from lightning_robustness._measurement.assisted import BoundaryCurve
from lightning_robustness._measurement.feature_pass import OUTPUT_WARNINGS
from lightning_robustness._measurement.findings import ClassAccuracy
from lightning_robustness._measurement.keys import attack_free_metrics, get_key
from lightning_robustness._measurement.threat_model import ThreatModel
from lightning_robustness._numbers import write_budget, write_distance, write_share
from lightning_robustness.attacks import MaskingSign
from lightning_robustness.evaluation.decision_space import DecisionSpace
from lightning_robustness.evaluation.reports.report import Report, Share
from lightning_robustness.evaluation.reports.sweep_report import SweepReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_MAX_CLASSES = 20  # in a table


@dataclass(repr=False)
class RobustnessReport(Report):
    """Results of ``evaluate`` for one model; prints as a few tables.

    Args:
        model: Name of the model's class.
        num_classes: Number of classes.
        metrics: Values by the keys of ``RobustnessMonitor``, without prefix.
        rates: For each attack, and for their worst case ``"worst"``: ``asr`` with its 95 % confidence interval
            ``asr_low`` and ``asr_high``, ``error_rate``, ``adv_acc`` with ``adv_acc_low`` and ``adv_acc_high``, median
            l2 ``distortion`` with failures as infinite, and counts of attacked samples. Accuracy, error and success
            rates are estimates for all samples, assisted by their margins; ``adv_acc_plain`` is the share of the
            attacked ones.
        signs: Signs of gradient masking.
        settings: Settings, as text.
        interrupted: The part that was being measured when the run was interrupted, or None.
        per_sample: On request, lists with one entry per sample: ``fim_index``, its position in the loader, and ``fim``
            for the samples of the Fisher information; ``boundary_index`` and ``boundary``, their distance to the
            decision boundary; ``index``, ``y``, ``preds`` and, by attack,
            ``adv_preds/<attack>``, ``l2/<attack>`` and ``linf/<attack>`` for the attacked ones. Where an attack
            without a budget succeeds beyond the sizes that count, the prediction is the clean one, and the sizes
            belong to what it found. Averages of these lists are plain shares, such as ``adv_acc_plain``.
        sweep: On request, curves over perturbation budgets.
        decision_space: On request, embeddings in two dimensions.
        boundary: Robust accuracy to first order over budgets, if there are labels.
        threat_model: Norm, budget and settings of the attacks.
        classes: Clean and robust accuracy of each class, over the attacked samples, if all attacks ran.
        outcomes: For each attack and their worst case, positions of the attacked samples, which of them withstand, and
            what is needed to compare models by pairs.
        adversarial_examples: A few pictures, if the inputs are images and an attack succeeded.
        provenance: Where the report comes from: time, versions, machine, seed; from the command also the checkpoint
            and the command line.

    """

    model: str
    num_classes: int
    metrics: dict[str, float]
    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    _: KW_ONLY
    signs: list[MaskingSign] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    interrupted: str | None = None
    per_sample: dict[str, list[Any]] | None = None
    sweep: SweepReport | None = None
    decision_space: DecisionSpace | None = None
    boundary: BoundaryCurve | None = None
    threat_model: ThreatModel = field(default_factory=ThreatModel)
    classes: list[ClassAccuracy] = field(default_factory=list)
    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)
    adversarial_examples: list[AdversarialExample] = field(default_factory=list)
    provenance: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:  # type: ignore[override]
        """Headline of the text and of the page."""
        return f"Robustness of {self.model}"

    @property
    @override
    def verdict(self) -> str:
        parts = [self._robustness]
        if self.signs:
            parts.append(f"signs of masked gradients ({self._sign_names}), so the true value may be lower")
        elif self.metrics.get("masking") == 0:
            parts.append("no signs of masked gradients")
        elif self.rates or self.sweep is not None:
            parts.append("masked gradients were not checked")
        if self.interrupted is not None:
            parts.append(f"interrupted while measuring {self.interrupted}")
        return f"{'; '.join(parts)}."

    @property
    def _sign_names(self) -> str:
        """Names of the signs, each once though several attacks may show it."""
        return ", ".join(dict.fromkeys(sign.name for sign in self.signs))

    @property
    def _robustness(self) -> str:
        """Robust accuracy of the model, or what there is instead."""
        clean = self.metrics.get("acc", math.nan)
        if self.rates:
            return self._robustness_under_attack(clean)
        if self.sweep is not None:
            return self.sweep._robustness
        if not self.metrics:
            return "Nothing was measured"
        if math.isnan(clean):
            return "Accuracy is unknown, as there are no labels: only attack-free metrics were measured"
        if self.boundary is None:
            return f"Robust accuracy is unknown, as no attack ran; {write_share(clean)} clean"
        value, low, high = (self.metrics[f"boundary_acc{end}"] for end in ("", "_low", "_high"))
        share = Share(value, low, high, int(self.metrics["samples_fim"]))
        budget = write_budget(self.boundary.budget, self.boundary.norm)
        return (
            f"{write_share(value)} robust accuracy to first order at {budget} {share}, an estimate without attacks, "
            f"{write_share(clean)} clean"
        )

    def _robustness_under_attack(self, clean: float) -> str:
        name = "worst" if "worst" in self.rates else min(self.rates, key=lambda key: self.rates[key]["adv_acc"])
        rate = self.rates[name]
        share = Share.of_rates(rate)
        budget = self.threat_model.budget
        if not budget:
            attacks = ", ".join(other for other in self.rates if other != "worst")
            what = f"accuracy under {attacks}, without a budget"
        elif name == "worst":
            what = f"robust accuracy at {budget}"
        else:
            what = f"accuracy under {name} at {budget}"
        return f"{write_share(share.value)} {what} {share}, {write_share(clean)} clean"

    @property
    @override
    def facts(self) -> dict[str, str]:
        sweep = {} if self.sweep is None else self.sweep.facts
        if sweep and not self.threat_model.attacks:
            return sweep
        return self.threat_model.describe() | ({"sweep": f"{sweep['attacks']}; {sweep['budget']}"} if sweep else {})

    @property
    def _has_pixels(self) -> bool:
        """Return whether distances to the boundary are in steps of 8-bit pixels."""
        return self.threat_model.has_pixels and self.boundary is not None and self.boundary.norm == "linf"

    def _cell(self, name: str) -> Cell:
        """Return a value for a table: the distance to the boundary of images in steps of 8-bit pixels."""
        value = self.metrics.get(name, math.nan)
        is_written = name == "boundary" and self._has_pixels and math.isfinite(value)
        return NumberText(write_distance(value)) if is_written else value

    @override
    def tables(self) -> list[Table]:
        signs = [list(sign) for sign in self.signs]
        times = {name: value for name, value in self.metrics.items() if name.startswith("seconds/")}
        seconds: list[list[Cell]] = [[name.removeprefix("seconds/"), value] for name, value in times.items()]
        tables = [
            self._attacks(),
            self._classes(),
            Table("Signs of masked gradients", ["sign", "evidence", "meaning", "remedy"], signs),
            Table("Time", ["part", "seconds"], seconds, folded=True),
            *([] if self.sweep is None else self.sweep.tables()),
            Table("Settings", ["setting", "value"], list(self.settings.items()), folded=True),
        ]
        return [self._summary(), *(table for table in tables if table.rows)]

    @override
    def figures(self) -> dict[str, "Figure"]:
        drawn = {"Accuracy without and with attacks": self._plot_accuracies()} if self.rates else {}
        if self.sweep is not None:
            drawn |= self.sweep.figures()
        if self.boundary is not None:
            curve = figures.boundary_figure({"": self.boundary}, self._has_pixels)
            drawn["Robust accuracy to first order, without attacks"] = curve
        if self.decision_space is not None:
            drawn["Decision space: embeddings of the samples"] = self.decision_space.plot()
        return drawn

    @override
    def _terms(self) -> list[str]:
        return list(self.metrics)

    @property
    @override
    def notes(self) -> list[str]:
        notes = []
        if self.interrupted is not None:
            notes.append(f"The run was interrupted while it measured {self.interrupted}: this report is incomplete.")
        if self.signs:
            text = f"Gradients seem to be masked ({self._sign_names})"
            notes.append(f"{text}, so success rates may be too low and distances too high.")
        if "worst" in self.rates and any(rate["asr"] > self.rates["worst"]["asr"] for rate in self.rates.values()):
            notes.append("'worst' counts an attack without a budget only where it stays within the others' budget.")
        kind = self.settings.get("outputs", "")
        if kind in OUTPUT_WARNINGS:
            notes.append(f"{OUTPUT_WARNINGS[kind][:1].upper()}{OUTPUT_WARNINGS[kind][1:]}")
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
    def _records(self) -> list[dict[str, Any]]:
        return [{"model": self.model, **self.metrics}]

    def _summary(self) -> Table:
        worst = {"adv_acc/worst": self.rates["worst"]["adv_acc"]} if "worst" in self.rates else {}
        values = {name: self._cell(name) for name in ("acc", *attack_free_metrics()) if name in self.metrics} | worst
        rows: list[list[Any]] = [
            [get_key(name).label, value, get_key(name).direction] for name, value in values.items()
        ]
        return Table("Robustness", ["metric", "value", "more robust"], rows)

    def _attacks(self) -> Table:
        header = ["attack", "success rate", "95 % from", "to", "accuracy", "l2 distortion", "right before", "of"]
        names = ("asr", "asr_low", "asr_high", "adv_acc", "distortion")
        rows: list[list[Any]] = [
            [name, *(rate[part] for part in names), int(rate["correct"]), int(rate["count"])]
            for name, rate in self.rates.items()
        ]
        own = [rate for name, rate in self.rates.items() if name != "worst"]
        budgets = [facts.budgets for facts in self.threat_model.attacks.values()]
        if len(own) > 1 and all(other == budgets[0] for other in budgets):
            asr, adv_acc = (math.fsum(rate[name] for rate in own) / len(own) for name in ("asr", "adv_acc"))
            rows.append(["mean of the attacks", asr, "", "", adv_acc, "", "", ""])
        return Table("Attacks", header, rows, note="Samples that are wrong before an attack count as wrong without it.")

    def _classes(self) -> Table:
        """Make a table of classes, the least robust first, if there are many not of all."""
        ordered = sorted(self.classes, key=lambda accuracy: (accuracy.robust, accuracy.clean, accuracy.label))
        shown = f" ({_MAX_CLASSES} of {len(ordered)})" if len(ordered) > _MAX_CLASSES else ""
        return Table(
            f"Classes, the least robust first{shown}",
            ["class", "clean", "robust", "samples"],
            [[a.label, a.clean, a.robust, a.samples] for a in ordered[:_MAX_CLASSES]],
            note="Plain shares of the attacked samples that are right, without an attack and under the worst of all.",
        )

    def _plot_accuracies(self) -> "Figure":
        clean, samples = self.metrics.get("acc", math.nan), self.metrics.get("samples", 0)
        shares = {} if math.isnan(clean) else {"clean": Share.of(clean, samples)}
        shares |= {name: Share.of_rates(rate) for name, rate in self.rates.items()}
        unbounded = {name: facts.limit for name, facts in self.threat_model.attacks.items() if not facts.budgets}
        ends = {name: share[:3] for name, share in shares.items()}
        return figures.accuracies(ends, unbounded, self.threat_model.budget)
