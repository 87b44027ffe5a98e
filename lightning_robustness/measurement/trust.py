"""Agreement of the attack-free values of a run with its attacks, and the epochs that each of them would pick."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_robustness.measurement.keys import attack_free_metrics

Evaluation = Mapping[str, float]
# Evaluations below which the coefficient says nothing
MIN_EVALUATIONS = 5


class Trust(NamedTuple):
    """Agreement of a value with accuracy under attack over the evaluations of a run.

    Args:
        tau: Kendall's tau-b, signed so that 1 is perfect agreement: the more robust epoch has the better value.
        num_evaluations: Number of evaluations that have both.
        reference: Name of the accuracy under attack that it is compared with.

    """

    tau: float
    num_evaluations: int
    reference: str


def kendall(x: Tensor, y: Tensor) -> float:
    r"""Compute Kendall's rank correlation of two series of shape ``(N,)``, in its form for ties, tau-b.

    .. math:: \tau_b = \frac{\sum_{i<j} s(x_i - x_j) s(y_i - y_j)}
        {\sqrt{\sum_{i<j} s(x_i - x_j)^2 \sum_{i<j} s(y_i - y_j)^2}}

    Where :math:`s` is the sign, 0 for ties.

    Returns:
        A number in [-1, 1], NaN if a series is constant, contains NaN, or has fewer than two values.

    Example:
        >>> import torch
        >>> from lightning_robustness.measurement.trust import kendall
        >>> round(kendall(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 9.0, 3.0, 27.0])), 4)
        0.6667

    """
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

    This is ``adv_acc/worst``, or ``adv_acc/pgd`` where more evaluations have it: by default PGD runs in every epoch,
    all attacks in every fifth.
    """
    counts = dict.fromkeys(("adv_acc/worst", "adv_acc/pgd"), 0)
    for entry in history:
        for name in counts:
            counts[name] += name in entry
    return max(counts, key=lambda name: counts[name])  # the first of equals


def measure_trust(history: Sequence[Evaluation]) -> dict[str, Trust]:
    """Measure how far the attack-free metrics of a run agree with its attacks.

    Args:
        history: The evaluations of a run, as the monitor keeps them.

    Returns:
        Trust by the name of the metric, of those with at least five evaluations in which it does not stay the same.

    Example:
        >>> from lightning_robustness.measurement.trust import measure_trust
        >>> robust = [0.1, 0.3, 0.2, 0.4, 0.5]
        >>> history = [{"fim": 1 - value, "rdi": -value, "adv_acc/worst": value} for value in robust]
        >>> {name: trust.tau for name, trust in measure_trust(history).items()}
        {'rdi': -1.0, 'fim': 1.0}

    """
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


def pick(history: Iterable[Evaluation], name: str, higher_is_better: bool = True) -> Evaluation:
    """Return the evaluation with the best value, the first of equals, of those that all have it."""
    return max(history, key=lambda entry: entry[name] if higher_is_better else -entry[name])
