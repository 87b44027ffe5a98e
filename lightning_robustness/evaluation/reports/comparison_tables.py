"""Tables of a comparison of models, and its result in one sentence."""

import math
from collections.abc import Collection, Mapping, Sequence

import torch

from lightning_robustness._display.table import Cell, Table
from lightning_robustness._measurement.keys import get_key
from lightning_robustness._measurement.statistics import kendall, pearson, spearman
from lightning_robustness._measurement.verdict import list_names
from lightning_robustness._numbers import write_budget, write_share
from lightning_robustness.evaluation.reports.comparison_checks import compared_settings
from lightning_robustness.evaluation.reports.report import Share
from lightning_robustness.evaluation.reports.robustness_report import RobustnessReport
from lightning_robustness.evaluation.reports.sweep_report import SweepReport

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


def comparison_verdict(shares: Mapping[str, Share], ties: Sequence[str], budget: str, clean: float) -> str:
    """Say which of several models is the most robust, or that the best ones cannot be told apart."""
    first, *others = shares
    share = shares[first]
    number = f"{write_share(share.value)} robust accuracy {share}, {write_share(clean)} clean"
    if ties:
        return (
            f"{first} and {list_names(ties)} are not distinguishable at n = {share.samples}, of {len(shares)} models "
            f"at {budget}: {first} has {number}, {ties[0]} {write_share(shares[ties[0]].value)} {shares[ties[0]]}"
        )
    place = f"the most robust of {len(shares)} models" if others else "the only model"
    text = f"{first} is {place} at {budget}: {number}"
    if others:
        second = shares[others[0]]
        text += f"; {others[0]} is next with {write_share(second.value)} {second}"
    return text


def model_table(
    shares: Mapping[str, Share],
    budget: str,
    differences: Mapping[str, Sequence[float]],
    ties: Collection[str],
    columns: Mapping[str, Mapping[str, float]],
    note: str,
) -> Table:
    """Make the table of models, the most robust first, with the difference of each to the best."""
    header = ["model", f"robust at {budget}", "95 % from", "to", "less the best", "from", "to", "", *columns]
    rows: list[list[Cell]] = [
        [
            *(name, *share[:3], *differences.get(name, [math.nan] * 3), "tied" if name in ties else ""),
            *(column[name] for column in columns.values()),
        ]
        for name, share in shares.items()
    ]
    pairs = "Differences to the best have the 95 % interval of the paired test; tied: not distinguishable from it."
    return Table("Models, the most robust first", header, rows, note=f"{note} {pairs}")


def value_table(names: Sequence[str], reports: Mapping[str, RobustnessReport]) -> Table:
    """Make a table of attack-free metrics, a column per model."""
    rows = [[*_describe(name), *(report._cell(name) for report in reports.values())] for name in names]
    return Table("Attack-free metrics", ["metric", "more robust", *reports], rows)


def correlation_table(correlations: Mapping[str, Mapping[str, float]], num_models: int) -> Table:
    """Make a table of how well attack-free metrics predict adversarial accuracy."""
    return Table(
        "Correlation of attack-free metrics with adversarial accuracy",
        ["metric", "more robust", "Pearson", "Spearman", "Kendall", "models"],
        [[*_describe(name), *row.values(), num_models] for name, row in correlations.items()],
    )


def weight_table(entropy: Mapping[str, float], prior: Mapping[str, float], weights: Mapping[str, float]) -> Table:
    """Make a table of the weights in CMMR; metrics without a prior weight have 1."""
    return Table(
        "Weights of the metrics in CMMR",
        ["metric", "entropy weight", "prior", "weight"],
        [[label, entropy[name], prior.get(name, 1.0), weights[name]] for name, label in METRIC_LABELS.items()],
        folded=True,
    )


def explain_weights(weights: Mapping[str, float], weighting: str) -> str:
    """List the weights in CMMR in a sentence, the largest first."""
    ordered = sorted(weights.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{METRIC_LABELS[metric]} {weight:.2f}" for metric, weight in ordered)
    return f"CMMR weighs metrics {_WEIGHTINGS[weighting]}, not by how much they matter: {listed}."


def agreement_table(
    metric_pearson: Mapping[str, Mapping[str, float]], attack_pearson: Mapping[str, float], concordance: float
) -> Table:
    """Make a table of how well metrics and attacks agree with the composite scores."""
    return Table(
        f"Pearson's correlation of M with each metric, and of CMMR with M (Kendall's W {concordance:.4f})",
        ["attack", *METRIC_LABELS.values(), "CMMR"],
        [[attack, *row.values(), attack_pearson[attack]] for attack, row in metric_pearson.items()],
        folded=True,
    )


def checkpoint_table(reports: Mapping[str, RobustnessReport]) -> Table:
    """Make a table of the checkpoints that models were loaded from, where known."""
    origins = {name: report.provenance for name, report in reports.items() if "checkpoint" in report.provenance}
    rows = [[name, row["checkpoint"], row.get("checkpoint SHA-256", "unknown")] for name, row in origins.items()]
    return Table("Checkpoints", ["model", "checkpoint", "SHA-256"], rows)


def settings_table(sweeps: Mapping[str, SweepReport], balance: float) -> Table:
    """Make a table of the settings of the sweeps, and of the balancing weight of CMMR."""
    first = next(iter(sweeps.values()))
    budgets = ", ".join(map(write_budget, first.budgets))
    rows = {"attacks": ", ".join(first.attacks), "budgets": budgets, "attacked samples": str(first.samples)}
    rows["balancing weight"] = f"{balance:g}"
    for what, values in compared_settings(sweeps).items():
        rows[what] = "; ".join(dict.fromkeys(values.values()))
    return Table("Settings", ["setting", "value"], list(rows.items()), folded=True)


def _describe(name: str) -> tuple[str, str]:
    key = get_key(name)
    return key.label, key.direction
