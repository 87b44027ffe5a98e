"""Correlations of a metric with robust accuracy over networks, with bootstrap intervals."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

RESAMPLES = 1000


class Agreement(NamedTuple):
    """A correlation coefficient with its 95 % interval, by resampling networks."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.value != self.value:
            return "-"
        return f"{self.value:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


def pearson(x: Tensor, y: Tensor) -> Tensor:
    """Pearson's correlation along the last dimension; NaN for constant series."""
    x, y = x - x.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True)
    spread = (x.square().sum(-1) * y.square().sum(-1)).sqrt()
    return torch.where(spread > 1e-12, (x * y).sum(-1) / spread, torch.nan)


def rank(values: Tensor) -> Tensor:
    """Ranks along the last dimension; equal values get the mean of their ranks. Faster for many series than pairs."""
    in_order = values.sort(dim=-1).values
    first, after = (torch.searchsorted(in_order, values.contiguous(), right=right) for right in (False, True))
    return (first + after + 1).double() / 2


def spearman(x: Tensor, y: Tensor) -> Tensor:
    """Spearman's correlation along the last dimension."""
    return pearson(rank(x), rank(y))


def kendall(x: Tensor, y: Tensor) -> Tensor:
    """Kendall's tau-b along the last dimension."""
    s, t = ((values.unsqueeze(-1) - values.unsqueeze(-2)).sign().float() for values in (x, y))
    spread = (s.square().sum((-1, -2)) * t.square().sum((-1, -2))).sqrt()
    return torch.where(spread > 0, (s * t).sum((-1, -2)) / spread, torch.nan)


def partial_spearman(x: Tensor, y: Tensor, given: Tensor) -> Tensor:
    """Spearman's correlation of what the ranks of a third series do not explain."""
    xy, xz, yz = spearman(x, y), spearman(x, given), spearman(y, given)
    spread = ((1 - xz.square()) * (1 - yz.square())).sqrt()
    return torch.where(spread > 1e-6, (xy - xz * yz) / spread, torch.nan)


def agreement(coefficient: Callable[..., Tensor], *series: Sequence[float]) -> Agreement:
    """A coefficient of some series, with its interval."""
    return _agreement(coefficient, *map(tuple, series))


@cache
def _agreement(coefficient: Callable[..., Tensor], *series: tuple[float, ...]) -> Agreement:
    values = torch.tensor(series, dtype=torch.float64)
    number = values.shape[1]
    chosen = torch.randint(number, (RESAMPLES, number), generator=torch.Generator().manual_seed(0))
    resampled = coefficient(*values[:, chosen]).double()
    resampled = resampled[resampled.isfinite()]
    if not len(resampled):
        return Agreement(float(coefficient(*values)), torch.nan, torch.nan)
    low, high = resampled.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Agreement(float(coefficient(*values)), low, high)
