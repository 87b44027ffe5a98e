from typing import NamedTuple

import torch
from torch import Tensor

from lightning_robustness._arguments import check_features_and_preds, check_flag, check_option
from lightning_robustness.functional._class_statistics import (
    ClassStatistics,
    Normalization,
    check_p,
    class_statistics,
    min_max,
    min_max_mean,
    warn_if_unseparated,
)


class ROBYComponents(NamedTuple):
    """ROBY, FSA and FSD, the values of pairs of classes, and the mean distance to the centre and samples of each."""

    roby: Tensor
    fsa: Tensor
    fsd: Tensor
    pairs: Tensor
    distances: Tensor
    counts: Tensor


def _roby_compute(
    statistics: ClassStatistics, p: float, normalization: Normalization
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ROBY, FSA, FSD, and the unnormalised values of the pairs of populated classes."""
    aggregation, distances = statistics.distances, torch.pdist(statistics.centers, p=p)
    fsa = 1 - min_max(aggregation).sum() / max(len(aggregation), 1)
    if warn_if_unseparated(statistics, "FSD is 0 and ROBY is 1 (without normalization, twice the mean distance)"):
        zero = 0 * aggregation.sum()
        worst = 2 * aggregation.sum() if normalization == "none" else zero + 1
        return worst, fsa, zero, distances
    fsd = min_max_mean(distances)
    if normalization == "all":
        # As the RDI paper prints it: the sum over a class is normalised, then divided by the size of the class
        counts = statistics.counts
        aggregation, distances = min_max(aggregation * counts) / counts, min_max(distances)
    i, j = torch.triu_indices(len(aggregation), len(aggregation), offset=1, device=aggregation.device)
    pairs = aggregation.take(i) + aggregation.take(j) - distances
    return pairs.mean() if normalization == "none" else min_max_mean(pairs), fsa, fsd, pairs


def _pair_matrix(pairs: Tensor, counts: Tensor, normalization: Normalization) -> Tensor:
    """Return the values that ROBY averages as a symmetric matrix, NaN where there is no pair of populated classes."""
    classes = counts.nonzero().squeeze(1)
    i, j = classes[torch.triu_indices(len(classes), len(classes), offset=1, device=classes.device)]
    matrix = pairs.new_full((len(counts), len(counts)), torch.nan)
    matrix[i, j] = matrix[j, i] = pairs if normalization == "none" else min_max(pairs)
    return matrix


def roby(
    features: Tensor,
    preds: Tensor,
    *,
    p: float = 2.0,
    normalization: Normalization = "pairs",
    return_components: bool = False,
) -> Tensor | ROBYComponents:
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
        return_components: Whether to also return the feature subspace aggregation and distance, the matrix of the
            values of pairs, and the mean distances (:math:`\text{FSA}_k`) and counts of the classes. FSA is 1 less the
            mean of the :math:`\text{FSA}_k` and FSD the mean of the :math:`\text{FSD}_{ij}`, each after such a
            normalisation: both are higher when more robust.

    Returns:
        Scalar tensor, float64 for float64 features and float32 otherwise; or ``ROBYComponents`` of such tensors.

    Raises:
        TypeError: If the features are not floating point or the labels not integers.
        ValueError: If shapes do not fit, labels are negative, features are not finite, or an option is unknown.

    Example:
        >>> import torch
        >>> from lightning_robustness.functional import roby
        >>> features = torch.tensor([[0.0, 0.0], [0.0, 2.0], [8.0, 0.0], [8.0, 2.0], [4.0, 0.0], [4.0, 6.0]])
        >>> roby(features, preds=torch.tensor([0, 0, 1, 1, 2, 2]))
        tensor(0.6667)
        >>> roby(features, preds=torch.tensor([0, 0, 1, 1, 2, 2]), return_components=True).fsd
        tensor(0.3333)

    """
    check_flag("return_components", return_components)
    check_p(p)
    check_option("normalization", normalization, Normalization)
    features = check_features_and_preds(features, preds)
    statistics = class_statistics(features, preds, p)
    value, fsa, fsd, pairs = (part.to(statistics.dtype) for part in _roby_compute(statistics, p, normalization))
    if not return_components:
        return value
    distances, counts = statistics.by_class()
    return ROBYComponents(value, fsa, fsd, _pair_matrix(pairs, counts, normalization), distances, counts)
