"""Agreement of series and of rankings, on tensors; tied values share the mean of their ranks."""

import torch
from torch import Tensor


def rank(values: Tensor) -> Tensor:
    """Rank values along the last dimension, 1 for the smallest; equal values get the mean of their ranks."""
    smaller = (values.unsqueeze(-2) < values.unsqueeze(-1)).sum(dim=-1)
    equal = (values.unsqueeze(-2) == values.unsqueeze(-1)).sum(dim=-1)
    return smaller + (equal + 1) / 2


def pearson(x: Tensor, y: Tensor) -> float:
    r"""Compute Pearson's correlation coefficient of two series.

    .. math:: \frac{\sum_i (x_i - \bar x)(y_i - \bar y)}{\sqrt{\sum_i (x_i - \bar x)^2 \sum_i (y_i - \bar y)^2}}

    Args:
        x: Tensor of shape ``(N,)``.
        y: Tensor of shape ``(N,)``.

    Returns:
        A number in [-1, 1], NaN where a series is constant or has fewer than two values.

    Example:
        >>> import torch
        >>> from lightning_robustness.evaluation.correlation import pearson
        >>> pearson(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 3.0, 2.0, 4.0]))
        0.8

    """
    if len(x) < 2 or (x == x[0]).all() or (y == y[0]).all():
        return torch.nan
    x, y = x.double() - x.double().mean(), y.double() - y.double().mean()
    # Divided one by one: the product of two small sums of squares would underflow
    correlation = (x / torch.linalg.vector_norm(x)) @ (y / torch.linalg.vector_norm(y))
    return correlation.clamp(-1.0, 1.0).item()


def spearman(x: Tensor, y: Tensor) -> float:
    """Compute Spearman's rank correlation, which is Pearson's of the ranks.

    Args:
        x: Tensor of shape ``(N,)``.
        y: Tensor of shape ``(N,)``.

    Returns:
        A number in [-1, 1], NaN where a series is constant or has fewer than two values.

    Example:
        >>> import torch
        >>> from lightning_robustness.evaluation.correlation import spearman
        >>> spearman(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 9.0, 3.0, 27.0]))
        0.8

    """
    return pearson(rank(x), rank(y))


def kendall(x: Tensor, y: Tensor) -> float:
    r"""Compute Kendall's rank correlation, in its form for ties, tau-b.

    .. math:: \frac{C - D}{\sqrt{(C + D + T_x)(C + D + T_y)}}

    Where :math:`C` pairs of values are ordered alike in both series, :math:`D` the other way round, and :math:`T_x` and
    :math:`T_y` are tied in one series only.

    Args:
        x: Tensor of shape ``(N,)``.
        y: Tensor of shape ``(N,)``.

    Returns:
        A number in [-1, 1], NaN where a series is constant or has fewer than two values.

    Example:
        >>> import torch
        >>> from lightning_robustness.evaluation.correlation import kendall
        >>> round(kendall(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 9.0, 3.0, 27.0])), 4)
        0.6667

    """
    signs_x, signs_y = ((v.unsqueeze(0) - v.unsqueeze(1)).sign().double().flatten() for v in (x, y))
    untied_x, untied_y = signs_x.abs().sum(), signs_y.abs().sum()
    return (signs_x @ signs_y / (untied_x.sqrt() * untied_y.sqrt())).item()


def kendall_w(ratings: Tensor) -> float:
    r"""Compute Kendall's coefficient of concordance W: how far several judges agree in their rankings.

    .. math:: W = \frac{12 S}{k^2 (n^3 - n) - k \sum_j T_j}

    Where :math:`S` is the sum of the squared deviations of the items' rank sums from their mean, :math:`k` the number
    of judges, :math:`n` the number of items, and :math:`T_j` the sum of :math:`t^3 - t` over the groups of :math:`t`
    items that judge :math:`j` ties.

    Args:
        ratings: Tensor of shape ``(k, n)``, a row for each judge.

    Returns:
        A number in [0, 1], 1 where all judges agree; NaN where all of them tie everything, or for fewer than two items.

    Example:
        >>> import torch
        >>> from lightning_robustness.evaluation.correlation import kendall_w
        >>> kendall_w(torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [1.0, 3.0, 2.0]]))
        0.7777...

    """
    num_judges, num_items = ratings.shape
    sums = rank(ratings).double().sum(dim=0)
    deviations = (sums - sums.mean()).square().sum()
    # Each of t tied items counts t, so that the sum over items of t ** 2 - 1 is that over groups of t ** 3 - t
    tied = (ratings.unsqueeze(-2) == ratings.unsqueeze(-1)).sum(dim=-1).double()
    ties = (tied.square() - 1).sum()
    return (12 * deviations / (num_judges**2 * (num_items**3 - num_items) - num_judges * ties)).item()
