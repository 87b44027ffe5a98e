from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_robustness._arguments import check_option
from lightning_robustness.functional._class_statistics import Normalization
from lightning_robustness.functional.roby import ROBYComponents, _pair_matrix, _roby_compute
from lightning_robustness.metrics._base import ClassStatisticsMetric, Storage


class ROBY(ClassStatisticsMetric):
    r"""Compute ROBY, a robustness metric from the overlap of pairs of classes, lower is more robust.

    .. math::
        \text{ROBY} = \operatorname{mean}_{i < j} \operatorname{norm}(\text{FSA}_i + \text{FSA}_j - \text{FSD}_{ij})

    Where :math:`\text{FSA}_k` is the mean distance of the samples that are predicted as class :math:`k` to their
    centre, :math:`\text{FSD}_{ij}` the distance of two centres, and norm maps the values of all pairs to [0, 1] by
    their minimum and maximum, or to 0 if they are all equal, as with two classes. Classes without samples predicted as
    them do not count; with fewer than two others, ROBY is 1. See :func:`~lightning_robustness.functional.roby`.

    As input to ``forward`` and ``update`` the metric accepts the following input:

    - ``features`` (:class:`~torch.Tensor`): A floating point tensor of shape ``(N, D)``, the input of the classifier
      head; logits work too. Dimensions after the first are flattened.
    - ``preds`` (:class:`~torch.Tensor`): An integer tensor of shape ``(N,)`` with the predicted labels, never the true
      ones.

    As output of ``forward`` and ``compute`` the metric returns the following output:

    - ``roby`` (:class:`~torch.Tensor`): A scalar, in [0, 1] unless ``normalization="none"``.

    ``compute_components`` returns it in a dictionary with ``fsa`` and ``fsd`` (both higher when more robust), ``pairs``
    (the symmetric K x K matrix of the averaged values, NaN on the diagonal and for classes without samples),
    ``distances`` (:math:`\text{FSA}_k` for each class, NaN for those without samples) and ``counts``.

    Args:
        num_classes: Number of classes.
        p: Order of the Minkowski distance, at least 1; ``float("inf")`` is allowed.
        normalization: ``"pairs"`` normalises the values of the pairs, as Algorithm 1 of the ROBY paper does; ``"all"``
            first normalises FSD and the sums of distances in FSA, as the RDI paper does; ``"none"`` normalises nothing.
        storage: ``"exact"`` keeps all features until ``compute`` (with ``compute_on_cpu=True``, on the CPU);
            ``"streaming"`` bounds its memory and is within 5e-3 of that, unless features drift by far more than the
            spread of a class; ``"auto"`` is exact up to 1 GiB of features and streaming beyond, with a warning.
        kwargs: Further arguments of ``torchmetrics.Metric``.

    Raises:
        ValueError: If ``num_classes`` is not an integer of at least 2, ``p`` below 1, or an option is unknown.

    Example:
        >>> import torch
        >>> from lightning_robustness.metrics import ROBY
        >>> metric = ROBY(num_classes=3)
        >>> metric.update(torch.tensor([[0.0, 0.0], [0.0, 2.0], [8.0, 0.0]]), preds=torch.tensor([0, 0, 1]))
        >>> metric.update(torch.tensor([[8.0, 2.0], [4.0, 0.0], [4.0, 6.0]]), preds=torch.tensor([1, 2, 2]))
        >>> metric.compute()
        tensor(0.6667)
        >>> metric.compute_components()["fsa"]
        tensor(0.6667)

    """

    is_differentiable: bool = True
    higher_is_better: bool = False
    full_state_update: bool = False

    def __init__(
        self,
        num_classes: int,
        *,
        p: float = 2.0,
        normalization: Normalization = "pairs",
        storage: Storage = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(num_classes, p=p, storage=storage, **kwargs)
        check_option("normalization", normalization, Normalization)
        self.normalization: Normalization = normalization

    @property
    def plot_lower_bound(self) -> float | None:  # type: ignore[override]
        """Lower end of the axis of ``plot``: 0, or open without normalization."""
        return None if self.normalization == "none" else 0.0

    @property
    def plot_upper_bound(self) -> float | None:  # type: ignore[override]
        """Upper end of the axis of ``plot``: 1, or open without normalization."""
        return None if self.normalization == "none" else 1.0

    def compute(self) -> Tensor:
        """Compute ROBY over all batches."""
        statistics = self._statistics()
        return self._publish(_roby_compute(statistics, self.p, self.normalization), statistics, ROBYComponents)

    @override
    def compute_components(self) -> dict[str, Tensor]:
        components = super().compute_components()
        return components | {"pairs": _pair_matrix(components["pairs"], components["counts"], self.normalization)}
