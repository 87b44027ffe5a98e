from typing import NamedTuple

import torch
from torch import Tensor

from lightning_robustness._arguments import check_features_and_preds, check_flag
from lightning_robustness.functional._class_statistics import (
    ClassStatistics,
    class_statistics,
    warn_if_unseparated,
)


class RDIComponents(NamedTuple):
    """RDI, the two distances that it compares, and the mean distance to the centre and the samples of each class."""

    rdi: Tensor
    intra: Tensor
    inter: Tensor
    distances: Tensor
    counts: Tensor


def _robustness_difference_index_compute(statistics: ClassStatistics) -> tuple[Tensor, Tensor, Tensor]:
    """Return RDI and the distances within and between classes."""
    centers, distances = statistics.centers, statistics.distances
    if warn_if_unseparated(statistics, "RDI is -1"):
        zero = 0.0 * centers.sum()  # keeps the graph, so that a training loss still has a backward pass
        return zero - 1, zero + distances.sum(), zero
    intra = distances.mean()
    inter = torch.linalg.vector_norm(centers - centers.mean(dim=0), dim=1).mean()
    larger = torch.maximum(inter, intra)
    # All features equal: nothing is separated, as with a single class
    rdi = torch.where(larger > 0, (inter - intra) / torch.where(larger > 0, larger, 1.0), -1.0)
    return rdi, intra, inter


def robustness_difference_index(
    features: Tensor, preds: Tensor, *, return_components: bool = False
) -> Tensor | RDIComponents:
    r"""Compute the robustness difference index (RDI), higher is more robust.

    .. math::
        \text{RDI} = \frac{\text{InterD} - \text{IntraD}}{\max(\text{InterD}, \text{IntraD})}
        \quad
        \text{IntraD} = \frac{1}{P} \sum_k \frac{1}{|N_k|} \sum_{f \in N_k} \|f - c_k\|_2
        \quad
        \text{InterD} = \frac{1}{P} \sum_k \|c_k - c_0\|_2

    Where :math:`N_k` are the features of the samples that are predicted as class :math:`k`, :math:`c_k` is their mean,
    :math:`c_0` the unweighted mean of the :math:`c_k`, and the sums run over the :math:`P` classes that at least one
    sample is predicted as. RDI lies in [-1, 1] and does not change when the features are shifted, rotated or scaled.
    With fewer than two such classes it is -1. It is differentiable in the features.

    Args:
        features: Floating point tensor of shape ``(N, D)``, the logits of the samples or another layer's output;
            dimensions after the first are flattened. Half precision is accumulated in float64.
        preds: Integer tensor of shape ``(N,)`` with the predicted labels, never the true ones.
        return_components: Whether to also return IntraD, InterD, and the mean distances and counts of the classes.

    Returns:
        Scalar tensor, float64 for float64 features and float32 otherwise; or ``RDIComponents`` of such tensors.

    Raises:
        TypeError: If the features are not floating point or the labels not integers.
        ValueError: If shapes do not fit, labels are negative or features are not finite.

    Example:
        >>> import torch
        >>> from lightning_robustness.functional import robustness_difference_index
        >>> features = torch.tensor([[0.0, 0.0], [0.0, 2.0], [8.0, 0.0], [8.0, 2.0]])
        >>> robustness_difference_index(features, preds=torch.tensor([0, 0, 1, 1]))
        tensor(0.7500)
        >>> robustness_difference_index(features, torch.tensor([0, 0, 1, 1]), return_components=True).inter
        tensor(4.)

    """
    check_flag("return_components", return_components)
    features = check_features_and_preds(features, preds)
    statistics = class_statistics(features, preds, p=2.0)
    rdi, intra, inter = (part.to(statistics.dtype) for part in _robustness_difference_index_compute(statistics))
    return RDIComponents(rdi, intra, inter, *statistics.by_class()) if return_components else rdi
