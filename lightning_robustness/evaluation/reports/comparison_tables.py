"""Tables of a comparison of models, and its result in one sentence."""

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch

from lightning_robustness._display.table import Cell, Table
from lightning_robustness._measurement.statistics import kendall, pearson, spearman
from lightning_robustness._measurement.verdict import list_names
from lightning_robustness._numbers import write_budget, write_share
from lightning_robustness.evaluation.reports.comparison_checks import compared_settings
from lightning_robustness.evaluation.reports.sweep_report import SweepReport

if TYPE_CHECKING:
    from lightning_robustness.evaluation.reports.comparison_report import ComparisonReport

# Values with a smaller relative difference are equal
_ROUNDING = 1e-12
# Metrics of a sweep
METRIC_LABELS = {"accuracy": "accuracy", "ssim": "SSIM (ASS)", "psnr": "PSNR", "mse": "MSE", "ald2": "ALD2"}
_WEIGHTINGS = {
    "entropy": "by how much they vary (entropy method)",
    "printed": "by how much they vary (entropy method, without prior weights, as equation 8 is printed)",
    "correlation": "so that their mean correlation with it is highest",
}


def rank_models(values: Mapping[str, float], higher_is_better: bool) -> dict[str, int]:
    """Rank models, 1 for the most robust; ties share a rank."""
    sign = 1 if higher_is_better else -1
    return {
        name: 1 + sum(sign * (other - value) > _ROUNDING * abs(value) for other in values.values())
        for name, value in values.items()
    }


def correlate(values: Mapping[str, float], accuracies: Mapping[str, float]) -> dict[str, float]:
    """Correlate the values of models with their accuracies."""
    x, y = (torch.tensor(list(own.values()), dtype=torch.float64) for own in (values, accuracies))
    measures = {"pearson": pearson, "spearman": spearman, "kendall": kendall}
    return {name: measure(x, y) for name, measure in measures.items()}


def unweighted(weights: Mapping[str, float], sweeps: Collection[SweepReport]) -> list[str]:
    """Say which metrics have no weight in CMMR, and why."""
    notes = []
    for metric in (name for name, weight in weights.items() if weight == 0):
        values = torch.tensor([sweep.values[metric] for sweep in sweeps])
        reason = "is not defined for these inputs" if values.isnan().any() else "is constant"
        notes.append(f"{METRIC_LABELS[metric]} {reason}: it carries no information and has weight 0 in CMMR.")
    return notes


def comparison_verdict(report: "ComparisonReport") -> str:
    """Say which of several models is the most robust, or that the best ones cannot be told apart."""
    first, *others = report._order()
    shares = {name: f"{write_share(share.value)} {share}" for name, share in report._shares.items()}
    clean = write_share(report._sweeps[first].clean_accuracy)
    number = f"{write_share(report.robust_accuracy[first])} robust accuracy {report._shares[first]}, {clean} clean"
    if report.ties:
        samples, tied = report._shares[first].samples, report.ties[0]
        return (
            f"{first} and {list_names(report.ties)} are not distinguishable at n = {samples}, of {len(shares)} models "
            f"at {report._budget_text}: {first} has {number}, {tied} {shares[tied]}"
        )
    place = f"the most robust of {len(shares)} models" if others else "the only model"
    following = f"; {others[0]} is next with {shares[others[0]]}" if others else ""
    return f"{first} is {place} at {report._budget_text}: {number}{following}"


def comparison_tables(report: "ComparisonReport") -> list[Table]:
    """Make all tables, the models first."""
    reports, metrics = {name: report.reports[name] for name in report._order()}, report._metrics()
    described = {name: (metrics[name].label, metrics[name].direction) for name in report.correlations}
    checkpoints = [
        [name, own.provenance["checkpoint"], own.provenance.get("checkpoint SHA-256", "unknown")]
        for name, own in report.reports.items()
        if "checkpoint" in own.provenance
    ]
    return [
        _models(report),
        Table(
            "Attack-free metrics",
            ["metric", "more robust", *reports],
            [[*texts, *(own._cell(name) for own in reports.values())] for name, texts in described.items()],
        ),
        Table(
            "Ranks, 1 is most robust",
            ["metric", *reports],
            [[metrics[name].label, *(rank[model] for model in reports)] for name, rank in report.ranks.items()],
        ),
        Table(
            "Weights of the metrics in CMMR",
            ["metric", "entropy weight", "prior", "weight"],
            [
                [label, report.entropy_weights[name], report.prior.get(name, 1.0), report.weights[name]]
                for name, label in METRIC_LABELS.items()
            ],
            folded=True,
        ),
        Table(
            "Correlation of attack-free metrics with mean robust accuracy",
            ["metric", "more robust", "Pearson", "Spearman", "Kendall", "models"],
            [[*described[name], *row.values(), len(reports)] for name, row in report.correlations.items()],
        ),
        Table(
            f"Pearson's correlation of M with each metric, and of CMMR with M (Kendall's W {report.concordance:.4f})",
            ["attack", *METRIC_LABELS.values(), "CMMR"],
            [[attack, *row.values(), report.attack_pearson[attack]] for attack, row in report.metric_pearson.items()],
            folded=True,
        ),
        *([Table("Checkpoints", ["model", "checkpoint", "SHA-256"], checkpoints)] if checkpoints else []),
        _settings(report),
    ]


def _models(report: "ComparisonReport") -> Table:
    """Make the table of models, with the difference of each to the best."""
    clean = {name: sweep.clean_accuracy for name, sweep in report._sweeps.items()}
    columns = {"mean robust accuracy": report.mean_robust_accuracy, "clean": clean, "CMMR": report.scores}
    header = ["model", f"robust at {report._budget_text}", "95 % from", "95 % to"]
    header += ["difference to the best", "difference from", "difference to", *columns]
    rows: list[list[Cell]] = [
        [name, *share[:3], *report.differences.get(name, [math.nan] * 3), *(own[name] for own in columns.values())]
        for name, share in ((name, report._shares[name]) for name in report._order())
    ]
    ordered = sorted(report.weights.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{METRIC_LABELS[metric]} {weight:.2f}" for metric, weight in ordered)
    weighted = f"CMMR weighs metrics {_WEIGHTINGS[report.weighting]}, not by how much they matter: {listed}."
    pairs = (
        "The mean is over the budgets. Differences are in robust accuracy: negative where the best model is more "
        "robust, with the 95 % interval of the paired test."
    )
    if report.ties:
        header.append("tied")
        for row in rows:
            row.append("yes" if row[0] in report.ties else "")
        pairs += " Tied models are not distinguishable from the best."
    return Table("Models, the most robust first", header, rows, note=f"{weighted} {pairs}")


def _settings(report: "ComparisonReport") -> Table:
    """Make the table of the settings of the sweeps, and of the balancing weight of CMMR."""
    rows = {"attacks": ", ".join(report.attacks), "budgets": ", ".join(map(write_budget, report.budgets))}
    rows |= {"attacked samples": str(report._first.samples), "balancing weight": f"{report.balance:g}"}
    for what, values in compared_settings(report._sweeps).items():
        rows[what] = "; ".join(dict.fromkeys(values.values()))
    return Table("Settings", ["setting", "value"], list(rows.items()), folded=True)
