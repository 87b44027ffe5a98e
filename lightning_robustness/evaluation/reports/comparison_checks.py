"""Checks of a comparison: what must be the same for all models, and what should be."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_robustness._arguments import check_option, is_number
from lightning_robustness._measurement.feature_pass import LOGITS
from lightning_robustness._measurement.meters.fisher import FisherMeter
from lightning_robustness._numbers import write_budget
from lightning_robustness.evaluation.cmmr import Weighting, check_weights
from lightning_robustness.evaluation.reports.robustness_report import RobustnessReport
from lightning_robustness.evaluation.reports.sweep_report import SWEEP_METRICS, SweepReport

UNCLASSIFIED = (
    "Expected models that classify some samples correctly but got no correct prediction from {}. Does the order of the "
    "classes match the labels?"
)
# Budgets are in un-normalised units, so models may normalise differently
_NOT_COMPARED = "normalisation"


def check_names(models: Iterable[Any]) -> None:
    """Check the names of models, which tables, figures and folders are labelled with."""
    for name in models:
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"Expected names of models to be strings that are not empty but got {name!r}.")


def check_prior(prior: Mapping[str, float], balance: float, weighting: Weighting) -> None:
    """Check the weights of a comparison."""
    check_option("weighting", weighting, Weighting)
    if not isinstance(prior, Mapping):
        raise TypeError(f"Expected `prior` to be a mapping of metrics to weights but got {prior!r}.")
    unknown = [name for name in prior if name not in SWEEP_METRICS]
    if unknown:
        raise ValueError(
            f"Expected weights in `prior` for {', '.join(SWEEP_METRICS)} but got {', '.join(map(repr, unknown))}."
        )
    check_weights([prior.get(metric, 1.0) for metric in SWEEP_METRICS], balance)


def check_budget(budget: float | None, budgets: Sequence[float]) -> float:
    """Return the budget of a sweep that models are sorted by, by default the middle one."""
    budget = budgets[len(budgets) // 2] if budget is None else budget
    found = [own for own in budgets if is_number(budget) and math.isclose(own, budget, rel_tol=1e-6)]
    if not found:
        listed = ", ".join(map(write_budget, budgets))
        raise ValueError(f"Expected argument `rank_budget` to be one of the sweep, {listed}, but got {budget!r}.")
    return found[0]


def check_reports(
    reports: Mapping[str, RobustnessReport],
    attacks: Sequence[str] | None = None,
    budgets: Sequence[float] | None = None,
    num_classes: int | None = None,
) -> dict[str, SweepReport]:
    """Check that reports can be compared, and return their sweeps."""
    if not reports:
        raise ValueError("Expected at least one model to compare but got none.")
    check_names(reports)
    sweeps = {name: report.sweep for name, report in reports.items() if report.sweep is not None}
    missing = [name for name in reports if name not in sweeps]
    if missing:
        listed = f"{', '.join(map(repr, missing))} {'have' if missing[1:] else 'has'} none"
        raise ValueError(
            f"Expected reports with a sweep but {listed}. Make them with `evaluate(..., sweep_budgets=...)`."
        )
    described = {
        "number of classes": {name: str(report.num_classes) for name, report in reports.items()},
        "attacks": {name: ", ".join(sweep.attacks) for name, sweep in sweeps.items()},
        "budgets": {name: _list(sweep.budgets) for name, sweep in sweeps.items()},
        "number of samples": {name: str(sweep.samples) for name, sweep in sweeps.items()},
    }
    described["attacks"] |= {} if attacks is None else {"this comparison": ", ".join(attacks)}
    described["budgets"] |= {} if budgets is None else {"this comparison": _list(budgets)}
    described["number of classes"] |= {} if num_classes is None else {"`num_classes`": str(num_classes)}
    for what, values in described.items():
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{value} ({name})" for name, value in values.items())
            raise ValueError(f"Expected models with the same {what} but got {listed}.")
    unclassified = [name for name, sweep in sweeps.items() if not sweep.clean_accuracy > 0]
    if unclassified:
        raise ValueError(UNCLASSIFIED.format(", ".join(map(repr, unclassified))))
    return sweeps


def compared_settings(sweeps: Mapping[str, SweepReport]) -> dict[str, dict[str, str]]:
    """Return the settings that should be equal for all models, each with its value per model."""
    names = dict.fromkeys(name for sweep in sweeps.values() for name in sweep.settings if name != _NOT_COMPARED)
    return {what: {name: sweep.settings.get(what, "unknown") for name, sweep in sweeps.items()} for what in names}


def differing_settings(reports: Mapping[str, RobustnessReport], sweeps: Mapping[str, SweepReport]) -> list[str]:
    """Describe the settings that differ between models, a sentence each."""
    compared = {
        f"Models were attacked with different settings, so ranks mean little. {what}": values
        for what, values in compared_settings(sweeps).items()
    }
    fisher = FisherMeter.title
    compared |= {
        text: {name: report.settings.get(what, otherwise) for name, report in reports.items()}
        for what, otherwise, text in (
            (fisher, "unknown", f"{fisher} and distance to the boundary were measured with different settings"),
            ("outputs", LOGITS, "RDI is not compared, since the outputs of the models are of different kinds"),
        )
    }
    return [
        f"{text}: {'; '.join(f'{value} ({name})' for name, value in values.items())}."
        for text, values in compared.items()
        if len(set(values.values())) > 1
    ]


def _list(budgets: Sequence[float]) -> str:
    return ", ".join(f"{budget:g}" for budget in budgets)
