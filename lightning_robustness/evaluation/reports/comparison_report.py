import math
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from lightning_robustness._display import report_figures as figures
from lightning_robustness._display.table import Table
from lightning_robustness._measurement.assisted import Assisted
from lightning_robustness._measurement.feature_pass import LOGITS
from lightning_robustness._measurement.keys import Key, attack_free_metrics, get_key
from lightning_robustness._measurement.statistics import kendall_w, pearson
from lightning_robustness._measurement.verdict import rival, ties_of_models
from lightning_robustness._numbers import write_budget
from lightning_robustness.evaluation.cmmr import CompositeScores, Weighting, composite_scores
from lightning_robustness.evaluation.reports.comparison_checks import (
    check_budget,
    check_prior,
    check_reports,
    differing_settings,
)
from lightning_robustness.evaluation.reports.comparison_tables import (
    comparison_tables,
    comparison_verdict,
    correlate,
    rank_models,
    unweighted,
)
from lightning_robustness.evaluation.reports.report import Report, Share
from lightning_robustness.evaluation.reports.robustness_report import RobustnessReport
from lightning_robustness.evaluation.reports.sweep_report import SWEEP_METRICS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Models are ranked by clean accuracy as well, though it says nothing about robustness
_HEADLINES = (
    Key("robust_accuracy", "attacks", "robust accuracy", "share", True, None, "the sweep's worst case at one budget"),
    Key("mean_robust_accuracy", "attacks", "mean robust accuracy", "share", True, None, "its mean over the budgets"),
    Key("cmmr", "run", "CMMR", "", True, None, "composite score of the sweep"),
    replace(get_key("acc"), label="clean accuracy", higher_is_better=True),
)


@dataclass(repr=False)
class ComparisonReport(Report):
    """Several models side by side: robust accuracy, CMMR, ranks, and how well attack-free metrics predict them.

    Args:
        reports: One report per model, with sweeps over the same attacks and budgets.
        prior: Prior weights of the metrics of the sweep; 1 for those that are not given.
        balance: Share of the weight that no metric gets.
        weighting: How CMMR weighs its metrics, an option of ``composite_scores``.
        missing: Models that an interrupted run did not reach.
        left_out: Models that classify no sample correctly, so that there is nothing to attack.
        failed: Errors of models that could not be measured.
        rank_budget: The budget of the sweep that models are sorted by; by default the middle one.
        provenance: Where the report comes from: time, versions, machine; from the command also the command line.

    Raises:
        ValueError: If there is no model, a report has no sweep, the reports cannot be compared, a prior weight
            belongs to no metric, or the budget is not one of the sweep.

    """

    reports: dict[str, RobustnessReport]
    _: KW_ONLY
    prior: dict[str, float] = field(default_factory=dict)
    balance: float = 0.0
    weighting: str = "entropy"
    missing: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    rank_budget: float | None = None
    provenance: dict[str, str] = field(default_factory=dict)

    title = "Robustness of several models"

    def __post_init__(self) -> None:
        check_prior(self.prior, self.balance, cast(Weighting, self.weighting))
        # Numbers of NumPy could not be written as JSON
        self.prior, self.balance = {name: float(weight) for name, weight in self.prior.items()}, float(self.balance)
        self._sweeps = check_reports(self.reports)
        self._first = next(iter(self._sweeps.values()))
        self.attacks, self.budgets = self._first.attacks, self._first.budgets
        self.rank_budget = check_budget(self.rank_budget, self.budgets)
        self._column = self.budgets.index(self.rank_budget)  # budgets of models may differ by rounding
        self._result = self._score()

    @cached_property
    def robust_accuracy(self) -> dict[str, float]:
        """Accuracy of each model under the worst of the attacks at ``rank_budget``."""
        return {name: share.value for name, share in self._shares.items()}

    @cached_property
    def scores(self) -> dict[str, float]:
        """CMMR of each model, higher is more robust."""
        return dict(zip(self.reports, self._result.scores.tolist(), strict=True))

    @cached_property
    def curves(self) -> dict[str, list[float]]:
        """CMMR of each model at each budget."""
        return dict(zip(self.reports, self._result.curves.tolist(), strict=True))

    @cached_property
    def composite(self) -> dict[str, dict[str, list[float]]]:
        """M of each model, attack and budget."""
        rows = (dict(zip(self.attacks, own, strict=True)) for own in self._result.composite.tolist())
        return dict(zip(self.reports, rows, strict=True))

    @cached_property
    def entropy_weights(self) -> dict[str, float]:
        """Entropy weight of each metric of the sweep."""
        return dict(zip(SWEEP_METRICS, self._result.entropy_weights.tolist(), strict=True))

    @cached_property
    def weights(self) -> dict[str, float]:
        """Final weight of each metric of the sweep."""
        return dict(zip(SWEEP_METRICS, self._result.weights.tolist(), strict=True))

    @cached_property
    def mean_robust_accuracy(self) -> dict[str, float]:
        """Accuracy of each model under the worst of the attacks, averaged over the budgets."""
        return {name: math.fsum(sweep.worst) / len(sweep.budgets) for name, sweep in self._sweeps.items()}

    @cached_property
    def ranks(self) -> dict[str, dict[str, int]]:
        """For each metric with a direction, the rank of each model, 1 for the most robust; ties share a rank."""
        directions = {name: key.higher_is_better for name, key in self._metrics().items()}
        return {name: rank_models(self._values(name), up) for name, up in directions.items() if up is not None}

    @cached_property
    def correlations(self) -> dict[str, dict[str, float]]:
        """Pearson, Spearman and Kendall correlation of attack-free metrics with mean robust accuracy, over models."""
        return {
            name: correlate(self._values(name), self.mean_robust_accuracy)
            for name in self._metrics()
            if name in attack_free_metrics()
        }

    @cached_property
    def metric_pearson(self) -> dict[str, dict[str, float]]:
        """Pearson's correlation of M with each normalised metric, by attack, over models and budgets."""
        normalized = self._result.normalized
        return {
            attack: {
                metric: pearson(own, normalized[:, row, :, column].flatten())
                for column, metric in enumerate(SWEEP_METRICS)
            }
            for row, (attack, own) in enumerate(self._by_attack().items())
        }

    @cached_property
    def attack_pearson(self) -> dict[str, float]:
        """Pearson's correlation of CMMR with M of each attack, over models and budgets."""
        return {attack: pearson(self._result.curves.flatten(), own) for attack, own in self._by_attack().items()}

    @cached_property
    def concordance(self) -> float:
        """Kendall's W, the agreement of the attacks on the order of models and budgets."""
        return kendall_w(torch.stack(list(self._by_attack().values())))

    @property
    @override
    def verdict(self) -> str:
        text = comparison_verdict(self)
        return f"{text}; interrupted, without {', '.join(self.missing)}." if self.missing else f"{text}."

    @cached_property
    def differences(self) -> dict[str, list[float]]:
        """Robust accuracy at ``rank_budget`` less the best model's, with its 95 % interval; by pairs if possible."""
        outcomes, (best, *others) = self._outcomes(), self._order()
        return {name: list(rival(outcomes[best], outcomes[name])[:3]) for name in others if outcomes}

    @cached_property
    def ties(self) -> list[str]:
        """Models that cannot be told from the most robust one: none if it is better than the next (p < 0.05)."""
        outcomes = self._outcomes()
        return ties_of_models(outcomes, self._order()) if outcomes else []

    def _outcomes(self) -> dict[str, Assisted]:
        """Return what the worst case did to each sample, by model; empty if one is not known."""
        found = ((name, sweep._outcome(self._column)) for name, sweep in self._sweeps.items())
        known = {name: own for name, own in found if own is not None}
        return known if len(known) == len(self.reports) else {}

    @property
    @override
    def facts(self) -> dict[str, str]:
        return self._first.facts | {
            "models sorted by": f"robust accuracy at {self._budget_text}, under the worst attack"
        }

    @property
    def _budget_text(self) -> str:
        return write_budget(self.budgets[self._column], self._first._norm)

    @cached_property
    def _shares(self) -> dict[str, Share]:
        """Accuracy of each model under the worst of the attacks at ``rank_budget``, with its interval."""
        return {name: sweep.robust_accuracy(sweep.budgets[self._column]) for name, sweep in self._sweeps.items()}

    def _order(self) -> list[str]:
        """Return the names of the models, the most robust first."""
        return sorted(self.reports, key=lambda name: (self.ranks["robust_accuracy"][name], name))

    @property
    @override
    def notes(self) -> list[str]:
        notes = [f"The run was interrupted: no results for {', '.join(self.missing)}."] if self.missing else []
        notes += [f"{name} is left out: it classifies no sample correctly." for name in self.left_out]
        notes += [f"{name} is left out: it could not be measured. {error}" for name, error in self.failed.items()]
        notes += differing_settings(self.reports, self._sweeps)
        notes += [f"{name}: {note}" for name, report in self.reports.items() for note in report.notes]
        notes += unweighted(self.entropy_weights, self._sweeps.values())
        if len(self.reports) < 3:
            notes.append("Correlations over fewer than three models mean nothing: two points always lie on a line.")
        return notes

    @override
    def tables(self) -> list[Table]:
        return comparison_tables(self)

    @override
    def figures(self) -> dict[str, "Figure"]:
        label, scale = "CMMR (higher is more robust)", self._first._scale
        panels = {
            attack: {name: sweep._curves[attack] for name, sweep in self._sweeps.items()}
            for attack in self._first._curves
        }
        accuracies = figures.panels_of_curves([0.0, *self.budgets], panels, "accuracy under attack", scale)
        drawn = {
            "Robust accuracy under the worst of all attacks": self.plot(),
            "CMMR against the budget": figures.curves(self.budgets, self.curves, label, scale, limits=None),
            "Accuracy against the budget, for every attack": accuracies,
            "Composite metric M, for every attack and budget": figures.composite_map(self.budgets, self.composite),
        }
        if self.correlations and len(self.reports) > 1:
            drawn["Attack-free metrics against mean robust accuracy"] = self._plot_correlations()
        for name, report in self.reports.items():
            if report.decision_space is not None:
                drawn[f"Decision space of {name}: embeddings of the samples"] = report.decision_space.plot()
        return drawn

    @override
    def _terms(self) -> list[str]:
        return ["acc", *self.correlations]

    def plot(self) -> "Figure":
        """Draw robust accuracy of all models against the budget, with confidence intervals.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed; the extra ``plot`` brings it.

        """
        budgets = [0.0, *self.budgets]
        sweeps = self._sweeps.items()
        shares = {name: [sweep.robust_accuracy(size) for size in (0.0, *sweep.budgets)] for name, sweep in sweeps}
        lines = {name: [share.value for share in own] for name, own in shares.items()}
        bands = {name: ([share.low for share in own], [share.high for share in own]) for name, own in shares.items()}
        return figures.curves(budgets, lines, "robust accuracy", self._first._scale, bands, mark=self.rank_budget)

    def _plot_correlations(self) -> "Figure":
        series = {
            get_key(name).axis_label: (self._values(name), row["pearson"]) for name, row in self.correlations.items()
        }
        return figures.scatter(series, self.mean_robust_accuracy)

    @override
    def _records(self) -> list[dict[str, Any]]:
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
        own = super().to_dict()
        reports = own.pop("reports")
        return own | {name: getattr(self, name) for name in self._derived} | {"reports": reports}

    def _score(self) -> CompositeScores:
        # Shape: models, attacks, budgets, metrics
        values = torch.tensor(
            [[sweep.values[metric] for metric in SWEEP_METRICS] for sweep in self._sweeps.values()], dtype=torch.float64
        ).permute(0, 2, 3, 1)
        prior = [self.prior.get(metric, 1.0) for metric in SWEEP_METRICS]
        return composite_scores(
            values, list(SWEEP_METRICS.values()), prior, self.balance, cast(Weighting, self.weighting)
        )

    def _by_attack(self) -> dict[str, Tensor]:
        """Return M of all models and budgets in a row, for each attack."""
        return {attack: self._result.composite[:, row].flatten() for row, attack in enumerate(self.attacks)}

    def _metrics(self) -> dict[str, Key]:
        """Return the metrics that all reports have, by name."""
        known = {key.name: key for key in (*_HEADLINES, *attack_free_metrics().values())}
        if len({report.settings.get("outputs", LOGITS) for report in self.reports.values()}) > 1:
            del known["rdi"]  # distances between log-probabilities are not those between logits
        return {name: key for name, key in known.items() if not any(map(math.isnan, self._values(name).values()))}

    def _values(self, key: str) -> dict[str, float]:
        if key in ("robust_accuracy", "mean_robust_accuracy", "cmmr"):
            return cast(dict[str, float], getattr(self, {"cmmr": "scores"}.get(key, key)))
        return {name: report.metrics.get(key, math.nan) for name, report in self.reports.items()}

    _derived = tuple(
        name for name, value in vars().items() if isinstance(value, cached_property) and not name.startswith("_")
    )
