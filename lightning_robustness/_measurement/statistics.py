import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torchmetrics.functional.regression import pearson_corrcoef

from lightning_robustness._measurement.keys import attack_free_metrics
from lightning_robustness.functional.attack_success_rate import wilson_interval

_FAMILY = "adv_acc/"


def accuracy_interval(accuracy: float, number: float) -> tuple[float, float]:
    """Return the 95 % Wilson interval of an accuracy over a number of samples."""
    successes, trials = torch.tensor([accuracy * number, number], dtype=torch.float64)
    low, high = wilson_interval(successes, trials)
    return low.item(), high.item()


def rank(values: Tensor) -> Tensor:
    """Rank values along the last dimension, 1 for the smallest; equal values get the mean of their ranks."""
    smaller = (values.unsqueeze(-2) < values.unsqueeze(-1)).sum(dim=-1)
    equal = (values.unsqueeze(-2) == values.unsqueeze(-1)).sum(dim=-1)
    return smaller + (equal + 1) / 2


def pearson(x: Tensor, y: Tensor) -> float:
    """Compute Pearson's correlation coefficient of two series of shape ``(N,)``."""
    if _is_undefined(x) or _is_undefined(y):
        return torch.nan
    # torchmetrics treats a small variance as zero, and overflows for large values
    x, y = x.double() - x.double().mean(), y.double() - y.double().mean()
    return pearson_corrcoef(x / x.abs().max(), y / y.abs().max()).item()


def spearman(x: Tensor, y: Tensor) -> float:
    """Compute Spearman's rank correlation of two series of shape ``(N,)``: Pearson's correlation of their ranks.

    The one in torchmetrics has an error of 4e-6, from float32, and is 0 rather than NaN for a constant series.
    """
    return torch.nan if _is_undefined(x) or _is_undefined(y) else pearson(rank(x), rank(y))


def _is_undefined(values: Tensor) -> bool:
    return len(values) < 2 or bool(values.isnan().any() or (values == values[0]).all())


def kendall_w(ratings: Tensor) -> float:
    r"""Compute Kendall's coefficient of concordance W, the agreement of several judges in their rankings.

    .. math:: W = \frac{12 S}{k^2 (n^3 - n) - k \sum_j T_j}

    Where :math:`S` is the sum of the squared deviations of the items' rank sums from their mean, :math:`k` the number
    of judges, :math:`n` the number of items, and :math:`T_j` the sum of :math:`t^3 - t` over the groups of :math:`t`
    items that judge :math:`j` ties.
    """
    num_judges, num_items = ratings.shape
    sums = rank(ratings).double().sum(dim=0)
    deviations = (sums - sums.mean()).square().sum()
    # Each of t tied items counts t, so summing t ** 2 - 1 over items equals summing t ** 3 - t over groups
    tied = (ratings.unsqueeze(-2) == ratings.unsqueeze(-1)).sum(dim=-1).double()
    ties = (tied.square() - 1).sum()
    return (12 * deviations / (num_judges**2 * (num_items**3 - num_items) - num_judges * ties)).item()


Evaluation = Mapping[str, float]
# Evaluations below which the coefficient says nothing
MIN_EVALUATIONS = 5
# Distance from the best value within which evaluations are tied, so that clean accuracy decides
TIE_MARGIN = 0.005


class Trust(NamedTuple):
    """Agreement of a value with accuracy under attack over the evaluations of a run."""

    tau: float
    num_evaluations: int
    reference: str


def kendall(x: Tensor, y: Tensor) -> float:
    """Compute Kendall's rank correlation of two series of shape ``(N,)``, in its form for ties, tau-b."""
    if x.isnan().any() or y.isnan().any():
        return math.nan
    s, t = (_compare(values) for values in (x, y))
    scale = math.sqrt(int(s.square().sum()) * int(t.square().sum()))
    return int((s * t).sum()) / scale if scale else math.nan


def _compare(values: Tensor) -> Tensor:
    """Compare all pairs; comparisons, unlike a difference, are right for infinity."""
    first, second = values.unsqueeze(1), values.unsqueeze(0)
    return (first > second).long() - (first < second).long()


def reference_of(history: Iterable[Evaluation]) -> str:
    """Return the name of the accuracy under attack that the epochs of a run are compared by.

    The attack with the most evaluations counts; of several such, ``adv_acc/worst``.
    """
    counts = {f"{_FAMILY}worst": 0}
    for name in (name for entry in history for name in entry if name.startswith(_FAMILY)):
        counts[name] = counts.get(name, 0) + 1
    counts.pop(f"{_FAMILY}final", None)  # measured once
    return max(counts, key=lambda name: counts[name])  # the first of equals


def measure_trust(history: Sequence[Evaluation]) -> dict[str, Trust]:
    """Measure how far the attack-free metrics of a run agree with its attacks."""
    reference, measured = reference_of(history), dict[str, Trust]()
    for name, key in attack_free_metrics().items():
        pairs = [(entry[name], entry[reference]) for entry in comparable(history, name, reference)]
        if key.higher_is_better is None or len(pairs) < MIN_EVALUATIONS:
            continue
        values, accuracies = torch.tensor(pairs, dtype=torch.float64).unbind(dim=1)
        tau = kendall(values if key.higher_is_better else -values, accuracies)
        if not math.isnan(tau):
            measured[name] = Trust(tau, len(pairs), reference)
    return measured


def comparable(history: Iterable[Evaluation], name: str, reference: str) -> list[Evaluation]:
    """Return the evaluations that have a value and the accuracy under attack, none of them NaN."""
    return [entry for entry in history if not math.isnan(entry.get(name, math.nan) + entry.get(reference, math.nan))]


def candidates(history: Sequence[Evaluation], tolerance: float = 0.02) -> Sequence[Evaluation]:
    """Return the evaluations whose clean accuracy is within a tolerance of the highest; all if none is known."""
    known = [entry["acc"] for entry in history if not math.isnan(entry.get("acc", math.nan))]
    return [entry for entry in history if entry.get("acc", math.nan) >= max(known) - tolerance] if known else history


def preference(value: float, accuracy: float, best: float, margin: float = TIE_MARGIN) -> tuple[bool, float, float]:
    """Return what to sort epochs by, the best last: clean accuracy if the value ties with the best, else the value."""
    is_tied = value >= best - 1.0001 * margin  # values are logged in float32
    accuracy = accuracy if is_tied else -math.inf
    return is_tied, accuracy, value if math.isinf(accuracy) else 0.0


def most_robust(history: Iterable[Evaluation], reference: str) -> Evaluation | None:
    """Return the evaluation that ``RobustModelCheckpoint`` keeps by an accuracy under attack; None if none has it.

    As a run goes, an evaluation replaces the kept one if it comes first in the order of ``preference``, or is equal.

    Example:
        >>> from lightning_robustness._measurement.statistics import most_robust
        >>> pairs = [(0.80, 0.530), (0.81, 0.527), (0.85, 0.48)]
        >>> history = [{"epoch": n, "acc": acc, "adv_acc/pgd": robust} for n, (acc, robust) in enumerate(pairs)]
        >>> most_robust(history, "adv_acc/pgd")
        {'epoch': 1, 'acc': 0.81, 'adv_acc/pgd': 0.527}

    """
    kept, best = None, -math.inf
    for entry in comparable(history, reference, reference):
        best = max(best, entry[reference])
        kept = max(entry, kept or entry, key=lambda one: preference(one[reference], _clean_accuracy(one), best))
    return kept


def _clean_accuracy(entry: Evaluation) -> float:
    accuracy = entry.get("acc", math.nan)
    return -math.inf if math.isnan(accuracy) else accuracy


def attack_of(reference: str) -> str:
    """Name the attack of an accuracy under attack."""
    name = reference.removeprefix(_FAMILY)
    return "all attacks" if name == "worst" else name


def pick(history: Iterable[Evaluation], name: str, higher_is_better: bool = True) -> Evaluation:
    """Return the evaluation with the best value, the first of equals, of those that all have it."""
    return max(history, key=lambda entry: entry[name] if higher_is_better else -entry[name])
