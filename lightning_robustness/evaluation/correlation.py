"""Agreement of series and of rankings, on tensors; tied values share the mean of their ranks."""

import torch
from torch import Tensor
from torchmetrics.functional.regression import pearson_corrcoef

from lightning_robustness.measurement.trust import kendall as kendall


def rank(values: Tensor) -> Tensor:
    """Rank values along the last dimension, 1 for the smallest; equal values get the mean of their ranks."""
    smaller = (values.unsqueeze(-2) < values.unsqueeze(-1)).sum(dim=-1)
    equal = (values.unsqueeze(-2) == values.unsqueeze(-1)).sum(dim=-1)
    return smaller + (equal + 1) / 2


def pearson(x: Tensor, y: Tensor) -> float:
    """Compute Pearson's correlation coefficient of two series of shape ``(N,)``.

    Returns:
        A number in [-1, 1], NaN if a series is constant, contains NaN, or has fewer than two values.

    Example:
        >>> import torch
        >>> from lightning_robustness.evaluation.correlation import pearson
        >>> round(pearson(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 3.0, 2.0, 4.0])), 4)
        0.8

    """
    if _is_undefined(x) or _is_undefined(y):
        return torch.nan
    # torchmetrics treats a small variance as zero, and overflows for large values
    x, y = x.double() - x.double().mean(), y.double() - y.double().mean()
    return pearson_corrcoef(x / x.abs().max(), y / y.abs().max()).item()


def spearman(x: Tensor, y: Tensor) -> float:
    """Compute Spearman's rank correlation of two series of shape ``(N,)``: Pearson's correlation of their ranks.

    The one in torchmetrics has an error of 4e-6, from float32, and is 0 rather than NaN for a constant series.

    Returns:
        A number in [-1, 1], NaN if a series is constant, contains NaN, or has fewer than two values.

    Example:
        >>> import torch
        >>> from lightning_robustness.evaluation.correlation import spearman
        >>> round(spearman(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 9.0, 3.0, 27.0])), 4)
        0.8

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

    Args:
        ratings: Tensor of shape ``(k, n)``, one row per judge.

    Returns:
        A number in [0, 1], 1 if all judges agree; NaN if all of them tie everything, or for fewer than two items.

    Example:
        >>> import torch
        >>> from lightning_robustness.evaluation.correlation import kendall_w
        >>> kendall_w(torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [1.0, 3.0, 2.0]]))
        0.7777...

    """
    num_judges, num_items = ratings.shape
    sums = rank(ratings).double().sum(dim=0)
    deviations = (sums - sums.mean()).square().sum()
    # Each of t tied items counts t, so the sum of t ** 2 - 1 over items is that of t ** 3 - t over groups
    tied = (ratings.unsqueeze(-2) == ratings.unsqueeze(-1)).sum(dim=-1).double()
    ties = (tied.square() - 1).sum()
    return (12 * deviations / (num_judges**2 * (num_items**3 - num_items) - num_judges * ties)).item()
