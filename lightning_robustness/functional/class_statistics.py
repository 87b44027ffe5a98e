"""Statistics of features by predicted class, shared by RDI and ROBY."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_robustness.utilities.precision import accumulation_dtype, at_least_float32, full_precision
from lightning_robustness.utilities.rank_zero import rank_zero_warn

Normalization = Literal["pairs", "all", "none"]

# Rows that are widened to float64 at a time: they stay in the cache, and the features need no second copy
_CHUNK = 1024


class ClassStatistics(NamedTuple):
    """Statistics of the P populated classes, from which RDI and ROBY are computed.

    Args:
        classes: Labels of the populated classes, increasing, shape ``(P,)``.
        counts: Samples in each, shape ``(P,)``.
        centers: Mean feature vectors, shape ``(P, D)``.
        distances: Mean distance of the samples of a class to its centre, shape ``(P,)``.
        dtype: Type that results should have: the features', but never narrower than float32.

    """

    classes: Tensor
    counts: Tensor
    centers: Tensor
    distances: Tensor
    dtype: torch.dtype


def class_statistics(features: Tensor, preds: Tensor, p: float) -> ClassStatistics:
    """Compute centres and mean distances in one pass each, in float64 regardless of the dtype of the features."""
    classes, index, counts = preds.unique(return_inverse=True, return_counts=True)
    centers = sum_by_class(features, index, len(classes)) / counts.unsqueeze(1)
    distances = sum_distances_by_class(features, index, centers, p) / counts
    return ClassStatistics(classes, counts, centers, distances, at_least_float32(features.dtype))


def sum_by_class(features: Tensor, index: Tensor, num_classes: int) -> Tensor:
    """Sum the features of each class, shape ``(num_classes, D)``."""
    sums = features.new_zeros(num_classes, features.shape[1], dtype=accumulation_dtype(features.device))
    for rows, labels in zip(features.split(_CHUNK), index.split(_CHUNK), strict=True):
        sums.index_add_(0, labels, rows.to(sums.dtype))
    return sums


def sum_distances_by_class(features: Tensor, index: Tensor, centers: Tensor, p: float) -> Tensor:
    """Sum the distances of the samples of each class to its centre, shape ``(num_classes,)``."""
    sums = centers.new_zeros(len(centers))
    for rows, labels in zip(features.split(_CHUNK), index.split(_CHUNK), strict=True):
        distances = torch.linalg.vector_norm(rows.to(centers.dtype) - centers[labels], ord=p, dim=1)
        sums.index_add_(0, labels, distances)
    return sums


def expand_distances_by_class(features: Tensor, index: Tensor, centers: Tensor, p: float) -> tuple[Tensor, Tensor]:
    r"""Expand the summed distance of each class to first order in its centre.

    With r the distance of a sample to the centre c and u the gradient of the norm there, the distance to another
    centre c' is r + u.c - u.c' to first order, a lower bound since a norm is convex.

    Args:
        features: Floating point tensor of shape ``(N, D)``.
        index: Class of each sample.
        centers: Where to expand, shape ``(K, D)``.
        p: Order of the norm.

    Returns:
        Sum of r + u.c, shape ``(K,)``, and sum of u, shape ``(K, D)``, over the samples of each class.

    """
    offsets, slopes = centers.new_zeros(len(centers)), torch.zeros_like(centers)
    for rows, labels in zip(features.split(_CHUNK), index.split(_CHUNK), strict=True):
        c = centers[labels]
        difference = rows.to(centers.dtype) - c
        r = torch.linalg.vector_norm(difference, ord=p, dim=1)
        u = _norm_gradient(difference, r, p)
        offsets.index_add_(0, labels, r + (u * c).sum(dim=1))
        slopes.index_add_(0, labels, u)
    return offsets, slopes


def _norm_gradient(difference: Tensor, r: Tensor, p: float) -> Tensor:
    """Gradient of the p-norm; zero at zero, one of the sub-gradients where there are several."""
    if p == torch.inf:
        largest = difference.abs().argmax(dim=1, keepdim=True)
        return torch.zeros_like(difference).scatter(1, largest, difference.gather(1, largest).sign())
    share = difference / r.clamp(min=torch.finfo(r.dtype).tiny).unsqueeze(1)
    return share if p == 2 else share.sign() * share.abs().pow(p - 1)


def pairwise_distances(statistics: ClassStatistics, p: float) -> Tensor:
    """Distance of each pair of centres, in the order of ``torch.triu_indices``."""
    centers = statistics.centers
    if p != 2 or len(centers) <= 256:
        return torch.pdist(centers, p=p)
    with full_precision():
        return _distances_by_products((centers - centers.mean(dim=0)).to(statistics.dtype))


def _distances_by_products(centers: Tensor) -> Tensor:
    """Compute Euclidean distances by matrix products of the upper triangle, for many centres several times faster.

    In the precision of the features; products are not precise for pairs that nearly coincide.
    """
    near = torch.finfo(centers.dtype).eps ** 0.2 * torch.linalg.vector_norm(centers.detach(), dim=1).max()
    pieces = []
    for start in range(0, len(centers), 256):
        rows, columns = centers[start : start + 256], centers[start:]
        i, j = torch.triu_indices(len(rows), len(columns), offset=1, device=centers.device)
        above_diagonal = i * len(columns) + j
        distances = torch.cdist(rows, columns).take(above_diagonal)
        if distances.numel() and distances.min() < near:
            distances = torch.cdist(rows, columns, compute_mode="donot_use_mm_for_euclid_dist").take(above_diagonal)
        pieces.append(distances)
    return torch.cat(pieces)


def min_max(values: Tensor) -> Tensor:
    """Map values to [0, 1]; to 0 where they are all equal, since then there is no scale."""
    if values.numel() == 0:
        return values
    low, scale = _low_and_scale(values)
    return (values - low) * scale


def min_max_mean(values: Tensor) -> Tensor:
    """Mean of ``min_max(values)``, without storing them."""
    low, scale = _low_and_scale(values)
    return (values.mean(dtype=accumulation_dtype(values.device)) - low) * scale


def _low_and_scale(values: Tensor) -> tuple[Tensor, Tensor]:
    low, high = values.amin(), values.amax()
    constant = high - low <= 1e-12 * torch.maximum(high.abs(), low.abs())
    return low, torch.where(constant, 0.0, 1 / torch.where(constant, 1.0, high - low))


def warn_if_unseparated(statistics: ClassStatistics, consequence: str) -> bool:
    """Warn where fewer than two classes are populated, and say whether that is so."""
    populated = len(statistics.classes)
    if populated < 2:
        rank_zero_warn(
            f"The samples were predicted as {populated} class(es) in all: with fewer than two, {consequence}. "
            "Is the network trained, and does the data hold several classes?",
            stacklevel=4,
        )
    return populated < 2


def check_p(p: float) -> None:
    """Check the order of a Minkowski distance."""
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not p >= 1:
        raise ValueError(f"Expected argument `p` to be a number of at least 1, or infinity, but got {p}.")
