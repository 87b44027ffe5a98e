"""Robust accuracy of a whole set from a few attacked samples, assisted by the margins of all of them.

Prediction-powered inference (arXiv 2301.09633) with margins as predictors (arXiv 2406.18451): margins predict which
samples an attack breaks. The prediction is fitted on one half of the attacked samples and corrected on the other, both
ways, so that the estimate is unbiased whatever the prediction is worth.
"""

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_robustness._isolation.draws import hash_positions
from lightning_robustness._measurement.rows import Rows
from lightning_robustness._measurement.statistics import accuracy_interval

# Below these numbers of attacked samples, and of robust ones in a half, the assisted variance may be the larger one
_MIN_SAMPLES, _MIN_ROBUST = 64, 5
# Folds depend on other bits than the choice of the sample
_FOLD_SEED = 0x5EED
# Points of a curve over budgets, and its largest budget, relative to the one that attacks have
_NUM_POINTS = 33
_REACH = 4


class Estimate(NamedTuple):
    """A share of all samples with its 95 % confidence interval, and the plain share of the attacked ones."""

    value: float
    low: float
    high: float
    plain: float
    is_assisted: bool


class Assisted(NamedTuple):
    """Outcome of an attack for each attacked sample, and what follows for all others.

    ``robust`` tells whether a sample is right under the attack, ``folds`` which half it belongs to, ``residuals`` are
    robust less its prediction by the other half. ``means`` has the mean prediction for samples that were not attacked
    by the first and the second half; None where the plain share is the better estimate.
    """

    positions: Tensor
    robust: Tensor
    folds: Tensor
    residuals: Tensor
    means: tuple[float, float] | None
    accuracy: float
    total: int

    def to_plain(self) -> dict[str, Any]:
        """Return everything as lists and numbers, for JSON."""
        plain = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in self._asdict().items()}
        return plain | {"robust": [int(value) for value in plain["robust"]]}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Assisted":
        """Make it from the result of ``to_plain``."""
        kinds = {"positions": torch.int, "robust": torch.float, "folds": torch.bool, "residuals": torch.float}
        tensors = {name: torch.tensor(plain[name], dtype=kind) for name, kind in kinds.items()}
        means = None if plain["means"] is None else tuple(plain["means"])
        return cls(**tensors, means=means, accuracy=plain["accuracy"], total=plain["total"])

    @property
    def share(self) -> float:
        """Share of the samples that were attacked."""
        return len(self.robust) / self.total

    @property
    def has_halves(self) -> bool:
        """Return whether there are attacked samples in both halves."""
        return bool(self.folds.any()) and not bool(self.folds.all())

    def estimate(self) -> Estimate:
        """Estimate robust accuracy of all samples, with an interval that covers both samplings.

        The attacked samples are drawn from all of them, and all of them from the world.
        """
        plain = self.robust.double().mean().item()
        number = len(self.robust)
        if self.means is None:
            return Estimate(plain, *accuracy_interval(plain, number), plain, False)
        corrections = [self.residuals[self.folds == fold].double().mean().item() for fold in (1, 0)]
        others = sum(mean + correction for mean, correction in zip(self.means, corrections, strict=True)) / 2
        value = min(max(self.share * plain + (1 - self.share) * others, 0.0), self.accuracy)
        smoothed = (number * value + 2) / (number + 4)
        spread = smoothed * (1 - smoothed)
        error = (1 / number - 1 / self.total) * (self.residuals.double().square().sum().item() + 2) / (number + 2)
        effective = min(spread / (error + spread / self.total), self.total)
        low, high = accuracy_interval(value, effective)
        if min(self.robust[self.folds == fold].sum().item() for fold in (0, 1)) < _MIN_ROBUST:
            ends = accuracy_interval(plain, number)
            low, high = min(low, ends[0]), max(high, ends[1])
        return Estimate(value, low, high, plain, True)

    def half(self, fold: int, is_read: bool) -> float:
        """Estimate by the prediction of one half: to choose by that half, or to read the other."""
        rows = self.folds == (1 - fold if is_read else fold)
        plain = self.robust[rows].double().mean().item()
        if self.means is None:
            return plain
        # A fit has no mean residual on its own half
        correction = self.residuals[rows].double().mean().item() if is_read else 0.0
        return self.share * plain + (1 - self.share) * (self.means[fold] + correction)


def assist(margins: Rows | None, seed: int, rows: Rows, robust: Tensor) -> Assisted:
    """Fit the margins of all samples, where there are some, to the outcomes, ``robust``, of the attacked ones."""
    positions, robust = rows.positions.int(), robust.float()
    if margins is None or not len(margins):
        return Assisted(positions, robust, _folds(rows, 0), robust, None, 1.0, len(robust))
    folds = _folds(rows, seed)
    accuracy = margins["right"].double().mean().item()
    plain = Assisted(positions, robust, folds, robust, None, accuracy, len(margins))
    # A choice by outcomes would bias: where few are broken, the plain share is the higher one
    if len(robust) == len(margins) or len(robust) < _MIN_SAMPLES or not plain.has_halves:
        return plain
    places = torch.searchsorted(margins.positions, rows.positions)
    fits = [_fit(margins, places[folds == fold], robust[folds == fold]) for fold in (0, 1)]
    predicted = torch.stack(fits)[:, places]  # by the first and the second half
    residuals = (robust - torch.where(folds == 0, predicted[1], predicted[0])).float()
    is_other = torch.ones(len(margins), dtype=torch.bool)
    is_other[places] = False
    first, second = (fit[is_other].mean().item() for fit in fits)
    return plain._replace(residuals=residuals, means=(first, second))


def _folds(rows: Rows, seed: int) -> Tensor:
    """Return which half of the samples each belongs to."""
    return (hash_positions(rows.positions, seed ^ _FOLD_SEED) & 1).bool()


def are_of_same_samples(rows: Rows, margins: Rows) -> bool:
    """Return whether samples have the labels that rows have at their positions, as they do unless a loader shuffles."""
    places = torch.searchsorted(margins.positions, rows.positions).clamp(max=len(margins) - 1)
    is_known = bool((margins.positions[places] == rows.positions).all())
    return is_known and bool((margins["y"][places] == rows["y"]).all())


def isotonic(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Fit a rising step function by least squares (pool adjacent violators); return its distinct points and values."""
    points, index, counts = x.unique(return_inverse=True, return_counts=True)
    means = torch.zeros(len(points), dtype=torch.double).index_add_(0, index, y.double()) / counts
    blocks: list[tuple[float, float, int]] = []  # mean, weight, number of points
    for mean, weight in zip(means.tolist(), counts.tolist(), strict=True):
        block = (mean, float(weight), 1)
        while blocks and blocks[-1][0] >= block[0]:
            last = blocks.pop()
            total = last[1] + block[1]
            block = ((last[0] * last[1] + block[0] * block[1]) / total, total, last[2] + block[2])
        blocks.append(block)
    values = torch.tensor([mean for mean, _, number in blocks for _ in range(number)], dtype=torch.double)
    return points, values


def _fit(margins: Rows, places: Tensor, outcome: Tensor) -> Tensor:
    """Predict for all samples whether they are robust, from the outcomes of some; wrong samples are not."""
    right = margins["right"]
    own = right[places]
    if not own.any():
        return torch.zeros(len(margins), dtype=torch.double)
    points, values = isotonic(margins["margin"][places][own].double(), outcome[own])
    predicted = np.interp(margins["margin"].double().numpy(), points.numpy(), values.numpy())
    return torch.where(right, torch.from_numpy(predicted), 0.0)


class BoundaryCurve(NamedTuple):
    """Robust accuracy to first order over perturbation budgets."""

    norm: str
    eps: list[float]
    share: list[float]
    low: list[float]
    high: list[float]

    @property
    def budget(self) -> float:
        """The budget that the curve was made for."""
        return self.eps[-1] / _REACH

    @property
    def values(self) -> dict[str, float]:
        """Robust accuracy to first order at that budget, with its interval."""
        place = (_NUM_POINTS - 1) // _REACH
        names = {"boundary_acc": self.share, "boundary_acc_low": self.low, "boundary_acc_high": self.high}
        return {name: column[place] for name, column in names.items()}

    @classmethod
    def of(cls, distances: Tensor, norm: str, eps: float, estimate: Callable[[Tensor], Assisted]) -> "BoundaryCurve":
        """Make it from distances to the boundary, up to four times a budget; it never rises."""
        budgets = [_REACH * eps * number / (_NUM_POINTS - 1) for number in range(_NUM_POINTS)]
        shares = falling([estimate(distances > budget).estimate() for budget in budgets])
        return cls(norm, budgets, *([getattr(share, end) for share in shares] for end in ("value", "low", "high")))


def falling(shares: list[Estimate]) -> list[Estimate]:
    """Let estimates over increasing budgets never rise: what is robust at one is robust at smaller ones."""
    return list(accumulate(shares, _lower))


def _lower(before: Estimate, own: Estimate) -> Estimate:
    value, low, high = (min(ends) for ends in zip(before[:3], own[:3], strict=True))
    return own._replace(value=value, low=low, high=high)
