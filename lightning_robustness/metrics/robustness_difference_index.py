from typing import Any

from torch import Tensor

from lightning_robustness.functional.robustness_difference_index import (
    RDIComponents,
    _robustness_difference_index_compute,
)
from lightning_robustness.metrics._base import ClassStatisticsMetric, Storage


class RobustnessDifferenceIndex(ClassStatisticsMetric):
    r"""Compute the robustness difference index (RDI), higher is more robust.

    .. math::
        \text{RDI} = \frac{\text{InterD} - \text{IntraD}}{\max(\text{InterD}, \text{IntraD})}

    Where IntraD is the distance of a sample to the centre of the class that it is predicted as, averaged over the
    samples of each class and then over the classes, and InterD the distance of a class centre to the mean of the
    centres, averaged over the classes. Classes without samples predicted as them do not count; with fewer than two
    others, RDI is -1. See :func:`~lightning_robustness.functional.robustness_difference_index`.

    As input to ``forward`` and ``update`` the metric accepts the following input:

    - ``features`` (:class:`~torch.Tensor`): A floating point tensor of shape ``(N, D)``: the logits, for the value that
      this package reports as ``rdi``, or the input of the classifier head. Dimensions after the first are flattened.
    - ``preds`` (:class:`~torch.Tensor`): An integer tensor of shape ``(N,)`` with the predicted labels, never the true
      ones.

    As output of ``forward`` and ``compute`` the metric returns the following output:

    - ``rdi`` (:class:`~torch.Tensor`): A scalar in [-1, 1].

    ``compute_components`` returns it in a dictionary with ``intra``, ``inter``, ``distances`` (the mean distance to the
    centre for each of the K classes, NaN for those without samples) and ``counts`` (the samples of each).

    Args:
        num_classes: Number of classes.
        storage: ``"exact"`` keeps all features until ``compute`` (with ``compute_on_cpu=True``, on the CPU);
            ``"streaming"`` bounds its memory and is within 1e-3 of that, unless features drift by far more than the
            spread of a class; ``"auto"`` is exact up to 1 GiB of features and streaming beyond, with a warning.
        kwargs: Further arguments of ``torchmetrics.Metric``.

    Raises:
        ValueError: If ``num_classes`` is not an integer of at least 2 or ``storage`` is unknown.

    Example:
        >>> import torch
        >>> from lightning_robustness.metrics import RobustnessDifferenceIndex
        >>> metric = RobustnessDifferenceIndex(num_classes=2)
        >>> metric.update(torch.tensor([[0.0, 0.0], [0.0, 2.0]]), preds=torch.tensor([0, 0]))
        >>> metric.update(torch.tensor([[8.0, 0.0], [8.0, 2.0]]), preds=torch.tensor([1, 1]))
        >>> metric.compute()
        tensor(0.7500)
        >>> metric.compute_components()["distances"]
        tensor([1., 1.])

    """

    is_differentiable: bool = True
    higher_is_better: bool = True
    full_state_update: bool = False
    plot_lower_bound: float = -1.0
    plot_upper_bound: float = 1.0

    def __init__(self, num_classes: int, *, storage: Storage = "auto", **kwargs: Any) -> None:
        super().__init__(num_classes, p=2.0, storage=storage, **kwargs)

    def compute(self) -> Tensor:
        """Compute RDI over all batches."""
        statistics = self._statistics()
        return self._publish(_robustness_difference_index_compute(statistics), statistics, RDIComponents)
