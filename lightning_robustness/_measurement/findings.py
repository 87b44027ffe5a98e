"""From rows to findings, in one place for all who measure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_robustness._measurement.assisted import Assisted, BoundaryCurve, are_of_same_samples, assist
from lightning_robustness._measurement.feature_pass import CONSTANT, Features
from lightning_robustness._measurement.plan import WORST, Plan
from lightning_robustness._measurement.rows import Rows
from lightning_robustness.attacks import Budget, MaskingSign
from lightning_robustness.attacks.attack import budgets_of
from lightning_robustness.attacks.masking import find_signs, nonfinite_sign
from lightning_robustness.functional.attack_success_rate import success_rates

SHUFFLED = (
    "the validation loader shuffles, so margins of all samples cannot assist: accuracy under attack is the plain share "
    "of the attacked samples, with a wider interval. Pass `shuffle=False`."
)
_ROUNDING = 1.0001
# By these, a constant network would be the most robust one
_COLLAPSING = ("fim", "fim_geometric", "fim_inverse", "lipschitz")


class Findings(NamedTuple):
    """Everything that an evaluation of a model says.

    ``values`` are what is logged, by key; ``rates`` all rates of each attack and of their worst case; ``attacks`` the
    rows of each attack, with its success as it counts; ``worst`` the rows of the worst case, None unless all attacks
    ran; ``rows`` the rows of the other meters; ``estimates`` what attacks say about all samples, attacked or not.
    ``is_shuffled`` if the margins belong to other samples than the attacked ones, so that they do not help.
    """

    values: dict[str, float]
    features: Features | None
    rows: dict[str, Rows]
    attacks: dict[str, Rows]
    worst: Rows | None
    rates: dict[str, dict[str, float]]
    signs: list[MaskingSign]
    curve: BoundaryCurve | None
    histograms: dict[str, Tensor]
    estimates: dict[str, Assisted]
    is_shuffled: bool = False

    @property
    def l2_budget(self) -> float | None:
        """Largest l2 size within which success of a minimum-norm attack counted; None without such an attack."""
        return self.values.get("l2_budget")


class ClassAccuracy(NamedTuple):
    """Clean accuracy of a true class, and accuracy under the worst of all attacks, over the attacked samples."""

    label: int
    samples: int
    clean: float
    robust: float


def conclude(plan: Plan, features: Features | None, rows: Mapping[str, Rows], margins: Rows | None = None) -> Findings:
    """Draw the conclusions from features and rows; what is missing was left out, or is not due.

    Margins assist the robust accuracies; by default, the margins of the features.
    """
    values = {} if features is None else features.values | {"seconds/features": features.seconds}
    margins = features.margins if features is not None and margins is None else margins
    labelled = [own for own in rows.values() if len(own) and "y" in own.columns]
    is_shuffled = (
        margins is not None and len(margins) > 0 and not all(are_of_same_samples(own, margins) for own in labelled)
    )
    estimate = partial(assist, None if is_shuffled else margins, plan.seed)
    distances = {} if features is None else features.distances
    histograms = {f"distances/{name}": distance for name, distance in distances.items()}
    curve: BoundaryCurve | None = None
    measured: dict[str, Rows] = {}
    for meter in plan.meters():
        if meter.name in rows:
            own = measured[meter.name] = rows[meter.name]
            if len(own):
                values |= meter.values(own)
                histograms |= meter.histograms(own)
                curve = curve or meter.curve(own, estimate)
            values[f"seconds/{meter.name}"] = own.seconds
    if curve is not None:
        values |= curve.values
    if features is not None and features.outputs == CONSTANT:
        values = {name: value for name, value in values.items() if name not in _COLLAPSING}
    found = {meter.key: rows[meter.name] for meter in plan.attack_meters() if len(rows.get(meter.name, ()))}
    attacks = {name: counted(own) for name, own in found.items()}
    is_complete = bool(found) and found.keys() == plan.attacks.keys()
    budgets = {name: budgets_of(attack, plan.input_space) for name, attack in plan.attacks.items()}
    worst = worst_case(found, budgets) if is_complete else None
    outcomes = attacks if worst is None else attacks | {WORST: worst}
    estimates = {name: estimate(own, own["adv_preds"] == own["y"]) for name, own in outcomes.items()}
    rates = {
        name: _rates(own, found.get(name, own)) | _assisted_rates(estimates[name]) for name, own in outcomes.items()
    }
    if worst is not None:
        bounded = [name for name in found if None not in budgets[name]] or list(found)
        rates[WORST] |= _lowest(rates[WORST], [rates[name] for name in bounded])
    columns = [own.columns for own in attacks.values()]
    signs = find_signs([plan.attacks[name] for name in attacks], columns, plan.input_space)
    for meter in plan.meters():
        if meter.name in measured and "nonfinite_gradients" in measured[meter.name].columns:
            signs += nonfinite_sign(meter.title, measured[meter.name]["nonfinite_gradients"])
    values |= _attack_values(rates)
    limits = [own["l2_budget"].max().item() for own in found.values()]
    limits = [limit for limit in limits if limit < math.inf]
    if limits:
        values["l2_budget"] = max(limits)
    if signs or is_complete:  # some signs take several attacks, so that no sign of a few says nothing
        values["masking"] = float(bool(signs))
    values |= {f"seconds/{name}": own.seconds for name, own in found.items()}
    return Findings(values, features, measured, attacks, worst, rates, signs, curve, histograms, estimates, is_shuffled)


def counted(rows: Rows) -> Rows:
    """Take back successes that are larger than the l2 budget; what was found keeps its size."""
    counts = rows["l2"] <= _ROUNDING * rows["l2_budget"]
    adv_preds = torch.where(counts, rows["adv_preds"], rows["preds"])
    changed = {"adv_preds": adv_preds, "success": rows["success"] & counts}
    return replace(rows, columns={**rows.columns, **changed})


def worst_case(rows: Mapping[str, Rows], budgets: Mapping[str, Sequence[Budget | None]]) -> Rows:
    """Return, for each sample, the closest success of any attack or, without one, the first failure.

    Attacks without a budget break nearly every sample with perturbations of any size: next to attacks with a budget
    they count where they stay within one of those budgets, otherwise where their success is counted.
    """
    bounded = [name for name in rows if None not in budgets[name]]
    found = list(rows.values()) if bounded else [counted(own) for own in rows.values()]
    stacked = {name: torch.stack([own[name] for own in found]) for name in found[0].columns}
    has_budget = torch.tensor([name in bounded for name in rows]).unsqueeze(1)
    counts = torch.zeros_like(stacked["success"]) | has_budget | (not bounded)
    for norm, size in {budget for name in bounded for budget in budgets[name] if budget is not None}:
        if norm in ("l2", "linf"):
            counts |= stacked[norm] <= _ROUNDING * size
    stacked["adv_preds"] = torch.where(counts, stacked["adv_preds"], stacked["preds"])
    stacked["success"] &= counts
    closest = torch.where(stacked["adv_preds"] != stacked["y"], stacked["l2"], torch.inf).argmin(dim=0)
    columns = {name: column[closest, torch.arange(len(closest))] for name, column in stacked.items()}
    return Rows(found[0].positions, columns)


def class_accuracies(worst: Rows) -> list[ClassAccuracy]:
    """Compute the accuracy of each class from the worst case of all attacks."""
    accuracies = []
    for label in worst["y"].unique().tolist():
        own = worst["y"] == label
        clean, robust = ((worst[name][own] == label).double().mean().item() for name in ("preds", "adv_preds"))
        accuracies.append(ClassAccuracy(label, int(own.sum()), clean, robust))
    return accuracies


def _rates(rows: Rows, found: Rows) -> dict[str, float]:
    """Compute all rates of an attack; the distortion covers all that was found, whether it counts or not."""
    rates = success_rates(rows["preds"], rows["adv_preds"], rows["y"], rows["l2"])
    size = success_rates(found["preds"], found["adv_preds"], found["y"], found["l2"]).distortion
    return {name: value.item() for name, value in rates._replace(distortion=size)._asdict().items()}


def _assisted_rates(assisted: Assisted) -> dict[str, float]:
    """Return robust accuracy of all samples and, where margins assist, the success rate that follows from it."""
    share = assisted.estimate()
    own = {"adv_acc": share.value, "adv_acc_low": share.low, "adv_acc_high": share.high, "adv_acc_plain": share.plain}
    if not share.is_assisted or not assisted.accuracy:
        return own
    rates = [min(max(1 - end / assisted.accuracy, 0.0), 1.0) for end in (share.value, share.high, share.low)]
    names = ("asr", "asr_low", "asr_high")
    return {**own, "error_rate": 1 - share.value, **dict(zip(names, rates, strict=True))}


def _lowest(worst: Mapping[str, float], others: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the rates of the worst case, none of them better than the same rate of an attack that counts in it."""
    rates = [worst, *others]
    lowest = {name: min(own[name] for own in rates) for name in ("adv_acc", "adv_acc_low")}
    highest = {name: max(own[name] for own in rates) for name in ("asr", "asr_high")}
    return {**lowest, **highest, "error_rate": 1 - lowest["adv_acc"]}


def _attack_values(rates: Mapping[str, dict[str, float]]) -> dict[str, float]:
    """Return the values of attacks that are logged; clear distortions that are not finite, as JSON has none."""
    values: dict[str, float] = {}
    for name, own in rates.items():
        if own["correct"]:  # without a sample that was right, a success rate of 0 would be the best one
            values[f"asr/{name}"] = own["asr"]
        values[f"adv_acc/{name}"] = own["adv_acc"]
        values |= {f"adv_acc_{end}/{name}": own[f"adv_acc_{end}"] for end in ("low", "high", "plain")}
        if math.isfinite(own["distortion"]):
            values[f"distortion/{name}"] = own["distortion"]
        else:  # most samples withstood
            own["distortion"] = math.nan
        values["samples_attacks"] = own["count"]
    return values


def seconds(findings: Findings, extra: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of all parts, attacks last."""
    own = {name: value for name, value in findings.values.items() if name.startswith("seconds/")}
    attacks = {name: own.pop(name) for name in [f"seconds/{key}" for key in findings.attacks]}
    return own | {f"seconds/{name}": value for name, value in extra.items()} | attacks


def per_sample_columns(plan: Plan, findings: Findings) -> dict[str, list[Any]]:
    """List the results of each sample."""
    columns: dict[str, list[Any]] = {}
    for meter in plan.meters():
        rows = findings.rows.get(meter.name)
        for name, column in meter.per_sample.items():
            if rows is not None and column in rows.columns:
                columns |= {f"{name}_index": rows.positions.tolist(), name: rows[column].float().tolist()}
    if findings.attacks:
        first = next(iter(findings.attacks.values()))
        columns |= {"index": first.positions.tolist(), "y": first["y"].tolist(), "preds": first["preds"].tolist()}
    for name, rows in findings.attacks.items():
        columns |= {f"{part}/{name}": rows[part].tolist() for part in ("adv_preds", "l2", "linf")}
    return columns
