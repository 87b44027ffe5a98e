from typing import NamedTuple

import torch
from torch import Tensor

from lightning_robustness._arguments import check_features_and_preds, check_option
from lightning_robustness.functional._class_statistics import (
    ClassStatistics,
    Normalization,
    check_p,
    class_statistics,
    min_max,
    min_max_mean,
    pairwise_distances,
    warn_if_unseparated,
)


class ROBYComponents(NamedTuple):
    """ROBY, FSA, FSD, and the unnormalised values of the pairs of populated classes, as in ``torch.triu_indices``."""

    roby: Tensor
    fsa: Tensor
    fsd: Tensor
    pairs: Tensor


def _roby_compute(statistics: ClassStatistics, p: float, normalization: Normalization) -> ROBYComponents:
    aggregation, distances = statistics.distances, pairwise_distances(statistics, p)
    fsa = 1 - min_max(aggregation).sum() / max(len(aggregation), 1)
    if warn_if_unseparated(statistics, "FSD is 0 and ROBY is 1 (without normalization, twice the mean distance)"):
        zero = 0 * aggregation.sum()
        worst = 2 * aggregation.sum() if normalization == "none" else zero + 1
        return ROBYComponents(worst, fsa, zero, distances)
    fsd = min_max_mean(distances)
    if normalization == "all":
        # As the RDI paper prints it: the sum over a class is normalised, then divided by the size of the class
        counts = statistics.counts
        aggregation, distances = min_max(aggregation * counts) / counts, min_max(distances)
    aggregation = aggregation.to(distances.dtype)
    i, j = torch.triu_indices(len(aggregation), len(aggregation), offset=1, device=aggregation.device)
    pairs = aggregation.take(i) + aggregation.take(j) - distances
    return ROBYComponents(pairs.mean() if normalization == "none" else min_max_mean(pairs), fsa, fsd, pairs)


def _components(features: Tensor, preds: Tensor, p: float, normalization: Normalization) -> ROBYComponents:
    check_p(p)
    check_option("normalization", normalization, Normalization)
    features = check_features_and_preds(features, preds)
    statistics = class_statistics(features, preds, p)
    return ROBYComponents(*(value.to(statistics.dtype) for value in _roby_compute(statistics, p, normalization)))


def roby(features: Tensor, preds: Tensor, p: float = 2.0, normalization: Normalization = "pairs") -> Tensor:
    r"""Compute ROBY, a robustness metric from the overlap of pairs of classes, lower is more robust.

    .. math::
        \text{ROBY} = \operatorname{mean}_{i < j} \operatorname{norm}(\text{ROBY}_{ij})
        \quad
        \text{ROBY}_{ij} = \text{FSA}_i + \text{FSA}_j - \text{FSD}_{ij}
        \quad
        \text{FSA}_k = \frac{1}{|N_k|} \sum_{f \in N_k} \|f - c_k\|_p
        \quad
        \text{FSD}_{ij} = \|c_i - c_j\|_p

    Where :math:`N_k` are the features of the samples that are predicted as class :math:`k`, :math:`c_k` is their mean,
    and norm maps the values of all pairs to [0, 1] by their minimum and maximum, or to 0 if they are all equal. That is
    always so with two classes, for which only ``normalization="none"`` is informative. Classes without samples
    predicted as them do not count. With fewer than two populated classes, ROBY is 1, its worst value.

    Args:
        features: Floating point tensor of shape ``(N, D)``, the input of the classifier head; dimensions after the
            first are flattened. Half precision is accumulated in float64.
        preds: Integer tensor of shape ``(N,)`` with the predicted labels, never the true ones.
        p: Order of the Minkowski distance, at least 1; ``float("inf")`` is allowed.
        normalization: ``"pairs"`` normalises :math:`\text{ROBY}_{ij}`, as Algorithm 1 of the ROBY paper does;
            ``"all"`` first normalises the sum of distances of which :math:`\text{FSA}_k` is the mean, before it is
            divided by :math:`|N_k|`, and :math:`\text{FSD}_{ij}`, as the RDI paper does;
            ``"none"`` normalises nothing, so values of different networks have different scales.

    Returns:
        Scalar tensor, float64 for float64 features and float32 otherwise.

    Raises:
        TypeError: If the features are not floating point or the labels not integers.
        ValueError: If shapes do not fit, labels are negative, features are not finite, or an option is unknown.

    Example:
        >>> import torch
        >>> from lightning_robustness.functional import roby
        >>> features = torch.tensor([[0.0, 0.0], [0.0, 2.0], [8.0, 0.0], [8.0, 2.0], [4.0, 0.0], [4.0, 6.0]])
        >>> roby(features, preds=torch.tensor([0, 0, 1, 1, 2, 2]))
        tensor(0.6667)

    """
    return _components(features, preds, p, normalization).roby


def feature_subspace_aggregation(features: Tensor, preds: Tensor, p: float = 2.0) -> Tensor:
    r"""Compute the feature subspace aggregation (FSA) of ROBY, higher is more robust.

    .. math:: \text{FSA} = 1 - \operatorname{mean}_k \operatorname{norm}(\text{FSA}_k)

    Where :math:`\text{FSA}_k` is the mean distance of the samples predicted as class :math:`k` to their centre, and
    norm maps the values of all classes to [0, 1] by their minimum and maximum, to 0 where they are equal.

    Args:
        features: Floating point tensor of shape ``(N, D)``; dimensions after the first are flattened.
        preds: Integer tensor of shape ``(N,)`` with the predicted labels.
        p: Order of the Minkowski distance, at least 1; ``float("inf")`` is allowed.

    Returns:
        Scalar tensor, float64 for float64 features and float32 otherwise.

    Example:
        >>> import torch
        >>> from lightning_robustness.functional import feature_subspace_aggregation
        >>> features = torch.tensor([[0.0, 0.0], [0.0, 2.0], [8.0, 0.0], [8.0, 2.0], [4.0, 0.0], [4.0, 6.0]])
        >>> feature_subspace_aggregation(features, preds=torch.tensor([0, 0, 1, 1, 2, 2]))
        tensor(0.6667)

    """
    return _components(features, preds, p, "pairs").fsa


def feature_subspace_distance(features: Tensor, preds: Tensor, p: float = 2.0) -> Tensor:
    r"""Compute the feature subspace distance (FSD) of ROBY, higher is more robust.

    .. math:: \text{FSD} = \operatorname{mean}_{i < j} \operatorname{norm}(\|c_i - c_j\|_p)

    Where :math:`c_k` is the mean of the features of the samples predicted as class :math:`k`, and norm maps the values
    of all pairs to [0, 1] by their minimum and maximum, to 0 where they are equal.

    Args:
        features: Floating point tensor of shape ``(N, D)``; dimensions after the first are flattened.
        preds: Integer tensor of shape ``(N,)`` with the predicted labels.
        p: Order of the Minkowski distance, at least 1; ``float("inf")`` is allowed.

    Returns:
        Scalar tensor, float64 for float64 features and float32 otherwise.

    Example:
        >>> import torch
        >>> from lightning_robustness.functional import feature_subspace_distance
        >>> features = torch.tensor([[0.0, 0.0], [8.0, 0.0], [4.0, 0.0]])
        >>> feature_subspace_distance(features, preds=torch.tensor([0, 1, 2]))
        tensor(0.3333)

    """
    return _components(features, preds, p, "pairs").fsd
