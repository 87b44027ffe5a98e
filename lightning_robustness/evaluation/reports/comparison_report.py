import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import Self, override

from lightning_robustness._display import report_figures as figures
from lightning_robustness._display.table import Table
from lightning_robustness._measurement.keys import Key, attack_free_metrics, get_key
from lightning_robustness._measurement.statistics import kendall, kendall_w, pearson, spearman
from lightning_robustness._numbers import write_budget, write_share
from lightning_robustness.evaluation.cmmr import CompositeScores, composite_scores
from lightning_robustness.evaluation.reports.comparison_checks import (
    check_budget,
    check_prior,
    check_reports,
    differing_settings,
)
from lightning_robustness.evaluation.reports.comparison_tables import (
    METRIC_LABELS,
    agreement_table,
    checkpoint_table,
    correlation_table,
    explain_weights,
    settings_table,
    value_table,
    weight_table,
)
from lightning_robustness.evaluation.reports.report import Report, check_fields
from lightning_robustness.evaluation.reports.robustness_report import RobustnessReport
from lightning_robustness.evaluation.reports.sweep_report import SWEEP_METRICS
from lightning_robustness.evaluation.reports.verdict import Share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Models are ranked by clean accuracy as well, though it says nothing about robustness
_HEADLINES = (
    Key("robust_acc", "attacks", "robust accuracy", "share", True, None, "the sweep's worst case at one budget"),
    Key("adv_acc", "attacks", "adversarial accuracy", "share", True, None, "mean of the sweep's worst case"),
    Key("cmmr", "run", "CMMR", "", True, None, "composite score of the sweep"),
    replace(get_key("acc"), label="clean accuracy", higher_is_better=True),
)
# Attributes that are written beside the arguments
_COMPUTED = (
    *("budget", "robust_accuracy", "scores", "curves", "composite", "entropy_weights", "weights"),
    *("adversarial_accuracy", "ranks", "correlations", "metric_pearson", "attack_pearson", "concordance"),
)
# Values with a smaller relative difference are equal
_ROUNDING = 1e-12


@dataclass(repr=False)
class ComparisonReport(Report):
    """Several models side by side: robust accuracy, CMMR, ranks, and how well attack-free metrics predict them.

    Args:
        reports: One report per model, with sweeps over the same attacks and budgets.
        prior: Prior weights of the metrics of the sweep; 1 for those that are not given.
        balance: Share of the weight that no metric gets.
        missing: Models that an interrupted run did not reach.
        left_out: Models that classify no sample correctly, so that there is nothing to attack.
        failed: Errors of models that could not be measured.
        budget: The budget of the sweep that models are sorted by; by default the middle one.
        provenance: Where the report comes from: time, versions, machine; from the command also the command line.

    Attributes:
        robust_accuracy: Accuracy of each model under the worst of the attacks at ``budget``.
        scores: CMMR of each model, higher is more robust.
        curves: CMMR of each model at each budget.
        composite: M of each model, attack and budget.
        entropy_weights: Entropy weight of each metric of the sweep.
        weights: Final weight of each metric of the sweep.
        adversarial_accuracy: Accuracy of each model under the worst of the attacks, averaged over the budgets.
        ranks: For each metric with a direction, the rank of each model, 1 for the most robust; ties share a rank.
        correlations: For each attack-free metric, ``pearson``, ``spearman`` and ``kendall`` with the adversarial
            accuracy, over the models.
        metric_pearson: Pearson's correlation of M with each normalised metric, by attack, over models and budgets.
        attack_pearson: Pearson's correlation of CMMR with M of each attack, over models and budgets.
        concordance: Kendall's W, the agreement of the attacks on the order of models and budgets.

    Raises:
        ValueError: If there is no model, a report has no sweep, the reports cannot be compared, a prior weight
            belongs to no metric, or the budget is not one of the sweep.

    """

    reports: dict[str, RobustnessReport]
    prior: dict[str, float] = field(default_factory=dict)
    balance: float = 0.0
    missing: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    budget: float | None = None
    provenance: dict[str, str] = field(default_factory=dict)

    title = "Robustness of several models"

    def __post_init__(self) -> None:
        check_prior(self.prior, self.balance)
        self._sweeps = check_reports(self.reports)
        first = next(iter(self._sweeps.values()))
        self.attacks, self.eps = first.attacks, first.eps
        self.budget = check_budget(self.budget, self.eps)
        self.robust_accuracy = {name: self._robust(name).value for name in self.reports}
        result = self._score()
        self.scores = dict(zip(self.reports, result.scores.tolist(), strict=True))
        self.curves = dict(zip(self.reports, result.curves.tolist(), strict=True))
        self.composite = {
            name: dict(zip(self.attacks, rows, strict=True))
            for name, rows in zip(self.reports, result.composite.tolist(), strict=True)
        }
        self.entropy_weights = dict(zip(SWEEP_METRICS, result.entropy_weights.tolist(), strict=True))
        self.weights = dict(zip(SWEEP_METRICS, result.weights.tolist(), strict=True))
        self.adversarial_accuracy = {name: math.fsum(s.worst) / len(s.eps) for name, s in self._sweeps.items()}
        self.ranks = {
            name: _rank(self._values(name), key.higher_is_better)
            for name, key in self._metrics().items()
            if key.higher_is_better is not None
        }
        self.correlations = {name: self._correlate(name) for name in self._metrics() if name in attack_free_metrics()}
        self._validate(result)

    @property
    @override
    def verdict(self) -> str:
        first, *others = self._order()
        share, clean = self._robust(first), write_share(self._sweeps[first].clean_accuracy)
        place = f"the most robust of {len(self.reports)} models" if others else "the only model"
        text = f"{first} is {place} at {self._budget_text}: {write_share(share.value)} robust accuracy {share}"
        text += f", {clean} clean"
        if others:
            second = self._robust(others[0])
            text += f"; {others[0]} is next with {write_share(second.value)} {second}"
        if self.missing:
            text += f"; interrupted, without {', '.join(self.missing)}"
        return f"{text}."

    @property
    @override
    def facts(self) -> dict[str, str]:
        first = next(iter(self._sweeps.values()))
        return first.facts | {"models sorted by": f"robust accuracy at {self._budget_text}, under the worst attack"}

    @property
    def _budget_text(self) -> str:
        first = next(iter(self._sweeps.values()))
        return write_budget(self.budget or 0.0, first.norm)

    def _robust(self, name: str) -> Share:
        return self._sweeps[name].robust_accuracy(self.budget)

    def _order(self) -> list[str]:
        """Return the names of the models, the most robust first."""
        return sorted(self.reports, key=lambda name: (self.ranks["robust_acc"][name], name))

    @property
    @override
    def notes(self) -> list[str]:
        notes = [f"The run was interrupted: no results for {', '.join(self.missing)}."] if self.missing else []
        notes += [f"{name} is left out: it classifies no sample correctly." for name in self.left_out]
        notes += [f"{name} is left out: it could not be measured. {error}" for name, error in self.failed.items()]
        notes += differing_settings(self.reports, self._sweeps)
        notes += [f"{name}: {note}" for name, report in self.reports.items() for note in report.notes]
        for metric, weight in self.entropy_weights.items():
            if weight == 0:
                values = torch.tensor([sweep.values[metric] for sweep in self._sweeps.values()])
                reason = "is not defined for these inputs" if values.isnan().any() else "is constant"
                notes.append(f"{METRIC_LABELS[metric]} {reason}: it carries no information and has weight 0 in CMMR.")
        if len(self.reports) < 3:
            notes.append("Correlations over fewer than three models mean nothing: two points always lie on a line.")
        return notes

    @override
    def tables(self) -> list[Table]:
        models, metrics = self._order(), self._metrics()
        tables = [
            Table(
                "Models, the most robust first",
                ["model", f"robust at {self._budget_text}", "95 % from", "to", "mean over budgets", "clean", "CMMR"],
                [
                    [
                        *(model, *self._robust(model)[:3], self.adversarial_accuracy[model]),
                        *(self._sweeps[model].clean_accuracy, self.scores[model]),
                    ]
                    for model in models
                ],
                note=explain_weights(self.weights),
            ),
            value_table(list(self.correlations), {model: self.reports[model] for model in models}),
            Table(
                "Ranks, 1 is most robust",
                ["metric", *models],
                [[metrics[name].label, *(rank[model] for model in models)] for name, rank in self.ranks.items()],
            ),
            weight_table(self.entropy_weights, self.prior, self.weights),
            correlation_table(self.correlations, len(models)),
            agreement_table(self.metric_pearson, self.attack_pearson, self.concordance),
            checkpoint_table(self.reports),
            settings_table(self._sweeps, self.balance),
        ]
        return [table for table in tables if table.rows or table.title != "Checkpoints"]

    @override
    def figures(self) -> dict[str, "Figure"]:
        first = next(iter(self._sweeps.values()))
        label, scale = "CMMR (higher is more robust)", first._scale
        panels = {
            attack: {name: sweep._curves[attack] for name, sweep in self._sweeps.items()} for attack in first._curves
        }
        accuracies = figures.panels_of_curves([0.0, *self.eps], panels, "accuracy under attack", scale)
        drawn = {
            "Robust accuracy under the worst of all attacks": self.plot(),
            "CMMR against the budget": figures.curves(self.eps, self.curves, label, scale, limits=None),
            "Accuracy against the budget, for every attack": accuracies,
            "Composite metric M, for every attack and budget": figures.composite_map(self.eps, self.composite),
        }
        if self.correlations and len(self.reports) > 1:
            drawn["Attack-free metrics against adversarial accuracy"] = self._plot_correlations()
        for name, report in self.reports.items():
            if report.decision_space is not None:
                drawn[f"Decision space of {name}: inputs of the classifier head"] = report.decision_space.plot()
        return drawn

    @override
    def terms(self) -> list[str]:
        return ["acc", *self.correlations]

    def plot(self) -> "Figure":
        """Draw robust accuracy of all models against the budget, with confidence intervals.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed; the extra ``plot`` brings it.

        """
        eps = [0.0, *self.eps]
        shares = {name: [sweep.robust_accuracy(size) for size in eps] for name, sweep in self._sweeps.items()}
        lines = {name: [share.value for share in own] for name, own in shares.items()}
        bands = {name: ([share.low for share in own], [share.high for share in own]) for name, own in shares.items()}
        scale = next(iter(self._sweeps.values()))._scale
        return figures.curves(eps, lines, "robust accuracy", scale, bands, mark=self.budget)

    def _plot_correlations(self) -> "Figure":
        series = [
            figures.Series(get_key(name).axis_label, list(self._values(name).values()), row["pearson"])
            for name, row in self.correlations.items()
        ]
        return figures.scatter(series, self.adversarial_accuracy)

    @override
    def records(self) -> list[dict[str, Any]]:
        return [
            {
                "model": name,
                **{key: self._values(key)[name] for key in self._metrics()},
                **{f"rank/{key}": rank[name] for key, rank in self.ranks.items()},
            }
            for name in self.reports
        ]

    @override
    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": type(self).__name__,
            "prior": self.prior,
            "balance": self.balance,
            "missing": self.missing,
            "left_out": self.left_out,
            "failed": self.failed,
            "provenance": self.provenance,
            **{name: getattr(self, name) for name in _COMPUTED},
            "reports": {name: report.to_dict() for name, report in self.reports.items()},
        }

    @classmethod
    @override
    def _from_fields(cls, fields: Mapping[str, Any]) -> Self:
        reports = {name: RobustnessReport._from_fields(report) for name, report in fields["reports"].items()}
        own = {name: fields[name] for name in ("balance", "missing", "left_out")}
        later = ("failed", "budget", "provenance")  # not in reports of earlier versions
        own |= {name: fields[name] for name in later if name in fields}
        return check_fields(cls(reports, dict(fields["prior"]), **own))

    def _score(self) -> CompositeScores:
        # Shape: models, attacks, budgets, metrics
        values = torch.tensor(
            [[sweep.values[metric] for metric in SWEEP_METRICS] for sweep in self._sweeps.values()], dtype=torch.float64
        ).permute(0, 2, 3, 1)
        prior = [self.prior.get(metric, 1.0) for metric in SWEEP_METRICS]
        return composite_scores(values, list(SWEEP_METRICS.values()), prior, self.balance)

    def _validate(self, result: CompositeScores) -> None:
        by_attack = [result.composite[:, number].flatten() for number in range(len(self.attacks))]
        cmmr = result.curves.flatten()
        self.attack_pearson = {name: pearson(cmmr, m) for name, m in zip(self.attacks, by_attack, strict=True)}
        self.metric_pearson = {
            name: {
                metric: pearson(by_attack[row], result.normalized[:, row, :, column].flatten())
                for column, metric in enumerate(SWEEP_METRICS)
            }
            for row, name in enumerate(self.attacks)
        }
        self.concordance = kendall_w(torch.stack(by_attack))

    def _metrics(self) -> dict[str, Key]:
        """Return the metrics that all reports have, by name."""
        known = {key.name: key for key in (*_HEADLINES, *attack_free_metrics().values())}
        return {name: key for name, key in known.items() if not any(map(math.isnan, self._values(name).values()))}

    def _values(self, key: str) -> dict[str, float]:
        computed = {
            "robust_acc": self.robust_accuracy,
            "cmmr": self.scores,
            "adv_acc": self.adversarial_accuracy,
        }
        if key in computed:
            return computed[key]
        return {name: report.metrics.get(key, math.nan) for name, report in self.reports.items()}

    def _correlate(self, key: str) -> dict[str, float]:
        values = torch.tensor(list(self._values(key).values()), dtype=torch.float64)
        accuracy = torch.tensor(list(self.adversarial_accuracy.values()), dtype=torch.float64)
        measures = {"pearson": pearson, "spearman": spearman, "kendall": kendall}
        return {name: measure(values, accuracy) for name, measure in measures.items()}


def _rank(values: Mapping[str, float], higher_is_better: bool) -> dict[str, int]:
    sign = 1 if higher_is_better else -1
    return {
        name: 1 + sum(sign * (other - value) > _ROUNDING * abs(value) for other in values.values())
        for name, value in values.items()
    }
