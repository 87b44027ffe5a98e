"""State of the metrics that are computed from class statistics: everything, or a fixed-size sketch."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics.utilities.data import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors
from typing_extensions import override

from lightning_robustness.functional.class_statistics import (
    ClassStatistics,
    check_p,
    class_statistics,
    expand_distances_by_class,
    sum_by_class,
    sum_distances_by_class,
)
from lightning_robustness.metrics.robustness_metric import RobustnessMetric
from lightning_robustness.utilities.checks import check_features_and_preds, check_integer, check_option
from lightning_robustness.utilities.precision import accumulation_dtype, at_least_float32

Mode = Literal["exact", "streaming"]


class ClassStatisticsMetric(RobustnessMetric):
    """Base of the metrics that need centres of classes and mean distances to them.

    A mean distance to a centre is known only when the centre is, after the last sample. The exact mode therefore keeps
    all features. The streaming mode keeps a buffer of ``max(2048, 16 * num_classes)`` samples; when it is full, their
    distances are replaced by their first-order expansion around the centres so far, which is summed. At compute, the
    expansions are evaluated at the final centres, and the samples that are still in the buffer count exactly.

    Args:
        num_classes: Number of classes.
        p: Order of the Minkowski distance.
        mode: ``"exact"`` or ``"streaming"``.
        kwargs: Further arguments of ``torchmetrics.Metric``.

    """

    # exact
    features: list[Tensor]
    preds: list[Tensor]
    # streaming
    counts: Tensor
    sums: Tensor
    offsets: Tensor
    slopes: Tensor
    buffer: Tensor
    buffer_preds: Tensor
    buffer_count: Tensor

    def __init__(self, num_classes: int, p: float, mode: Mode, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        num_classes = check_integer("num_classes", num_classes, minimum=2)
        check_option("mode", mode, Mode)
        check_p(p)
        self.num_classes = num_classes
        self.p = float(p)
        self.mode = mode
        if mode == "exact":
            self.add_state("features", default=[], dist_reduce_fx="cat")
            self.add_state("preds", default=[], dist_reduce_fx="cat")
            return
        # The number of features is known at the first update: a width of 0 says that there was none yet
        capacity = max(2048, 16 * num_classes)
        self.add_state("counts", default=torch.zeros(num_classes, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("sums", default=torch.zeros(num_classes, 0), dist_reduce_fx="sum")
        self.add_state("offsets", default=torch.zeros(num_classes), dist_reduce_fx="sum")
        self.add_state("slopes", default=torch.zeros(num_classes, 0), dist_reduce_fx="sum")
        self.add_state("buffer", default=torch.zeros(capacity, 0), dist_reduce_fx="sum")
        self.add_state("buffer_preds", default=torch.zeros(capacity, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("buffer_count", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, features: Tensor, preds: Tensor) -> None:
        """Add the features of a batch and the labels that the model predicts for it."""
        features = check_features_and_preds(features, preds, self.num_classes)
        width = self._width()
        if width and features.shape[1] != width:
            raise ValueError(
                f"Expected `features` of width {width}, as in the batches before, but got {features.shape[1]}. "
                "Call `reset` before features of another layer or network."
            )
        if self.mode == "exact":
            self.features.append(features.contiguous())  # a slice would keep the whole of what it was cut from
            self.preds.append(preds.long())
        else:
            self._fill(features, preds.long())

    def _publish(self, components: dict[str, Tensor], statistics: ClassStatistics) -> Tensor:
        """Keep the parts for ``compute_components`` and return the first, the headline."""
        distances = statistics.distances.new_full((self.num_classes,), torch.nan)
        distances[statistics.classes] = statistics.distances.detach()
        counts = statistics.counts.new_zeros(self.num_classes).index_copy(0, statistics.classes, statistics.counts)
        parts = {name: value.to(statistics.dtype) for name, value in components.items()}
        headline = next(iter(parts.values()))
        parts["distances"] = distances.to(statistics.dtype)
        self._components = {name: value.detach() for name, value in parts.items()} | {"counts": counts}
        return headline

    def _statistics(self) -> ClassStatistics:
        if self.mode == "exact":
            return class_statistics(*self._stored(), self.p)
        features, preds = self._buffered()
        counts, sums = self._totals()
        centers = sums / counts.clamp(min=1).unsqueeze(1)
        distances = self.offsets - (self.slopes * centers).sum(dim=1)
        distances = distances.clamp(min=0) + sum_distances_by_class(features, preds, centers, self.p)
        classes = counts.nonzero().squeeze(1)
        counts, centers, distances = counts[classes], centers[classes], distances[classes]
        return ClassStatistics(classes, counts, centers, distances / counts, self.buffer.dtype)

    def _width(self) -> int:
        """Number of features, or 0 before the first update."""
        if self.mode == "streaming":
            return self.buffer.shape[1]
        return self.features[0].shape[1] if len(self.features) else 0

    def _stored(self) -> tuple[Tensor, Tensor]:
        """All features and labels of the exact mode."""
        if len(self.features):
            return dim_zero_cat(self.features), dim_zero_cat(self.preds)
        return torch.zeros(0, 0, device=self.device), torch.zeros(0, dtype=torch.long, device=self.device)

    def _allocate(self, width: int, dtype: torch.dtype) -> None:
        wide = accumulation_dtype(self.counts.device)
        self.sums = self.sums.new_zeros(self.num_classes, width, dtype=wide)
        self.slopes = torch.zeros_like(self.sums)
        self.offsets = self.offsets.to(wide)
        self.buffer = self.buffer.new_zeros(len(self.buffer), width, dtype=dtype)

    def _buffered(self) -> tuple[Tensor, Tensor]:
        count = int(self.buffer_count)
        return self.buffer[:count], self.buffer_preds[:count]

    def _fill(self, features: Tensor, preds: Tensor) -> None:
        """Put samples into the buffer, and expand what is in it where it would overflow."""
        if not self._width():
            self._allocate(features.shape[1], at_least_float32(features.dtype))
        capacity = len(self.buffer)
        for rows, labels in zip(features.split(capacity), preds.split(capacity), strict=True):
            if int(self.buffer_count) + len(rows) > capacity:
                self._expand()
            start = int(self.buffer_count)
            self.buffer[start : start + len(rows)] = rows
            self.buffer_preds[start : start + len(rows)] = labels
            self.buffer_count = self.buffer_count + len(rows)

    def _totals(self) -> tuple[Tensor, Tensor]:
        """Counts and feature sums of each class, buffer included."""
        features, preds = self._buffered()
        counts = self.counts + torch.bincount(preds, minlength=self.num_classes)
        return counts, self.sums + sum_by_class(features, preds, self.num_classes)

    def _expand(self) -> None:
        features, preds = self._buffered()
        self.counts, self.sums = self._totals()
        centers = self.sums / self.counts.clamp(min=1).unsqueeze(1)
        offsets, slopes = expand_distances_by_class(features, preds, centers, self.p)
        self.offsets, self.slopes = self.offsets + offsets, self.slopes + slopes
        self.buffer_count = torch.zeros_like(self.buffer_count)

    @override
    def _sync_dist(self, dist_sync_fn: Callable = gather_all_tensors, process_group: Any | None = None) -> None:
        group = process_group or self.process_group
        # A process without data does not know the width and type of the others', and a gather of unlike tensors hangs
        dtype = self.buffer.dtype if self.mode == "streaming" else self._stored()[0].dtype
        mine = torch.tensor([self._width(), dtype.itemsize], device=self.device)
        shapes = torch.stack(dist_sync_fn(mine, group=group))
        width, itemsize = shapes.amax(dim=0).tolist()
        if any(other not in (0, width) for other in shapes[:, 0].tolist()):
            raise ValueError(
                f"Expected `features` of one width in all processes but got {shapes[:, 0].tolist()}. "
                "Do all of them evaluate the same layer?"
            )
        dtype = torch.float64 if itemsize == 8 else torch.float32
        if self.mode == "exact":
            features, preds = self._stored()
            self.features = [features.reshape(-1, width).to(self.device, dtype)] if width else []
            self.preds = [preds.to(self.device)] if width else []
            if width:
                super()._sync_dist(dist_sync_fn, process_group)
            return

        if not self._width():
            self._allocate(width, dtype)

        def total(value: Tensor) -> Tensor:
            return torch.stack(dist_sync_fn(value, group=group)).sum(dim=0)

        # With the centres of all processes known first, the samples in the buffers count exactly
        features, preds = self._buffered()
        self.counts, self.sums = (total(value) for value in self._totals())
        centers = self.sums / self.counts.clamp(min=1).unsqueeze(1)
        self.offsets = total(self.offsets + sum_distances_by_class(features, preds, centers, self.p))
        self.slopes = total(self.slopes)
        self.buffer_count = torch.zeros_like(self.buffer_count)

    @override
    def _reduce_states(self, incoming_state: dict[str, Any]) -> None:
        # `forward` hands over the running state while this one holds the batch, with its graph
        self._computed = None  # `merge_state` would go on to return the value from before
        if self.mode == "exact":
            super()._reduce_states(incoming_state)
            self.features = [features.detach() for features in self.features]
            return
        features, preds = (value.detach().clone() for value in self._buffered())
        mine = {name: getattr(self, name) for name in ("counts", "sums", "offsets", "slopes")}
        for name in self._defaults:
            setattr(self, name, incoming_state[name].clone())
        if not features.shape[1]:
            return
        if not self._width():
            self._allocate(features.shape[1], features.dtype)
        for name, value in mine.items():
            setattr(self, name, getattr(self, name) + value.detach())
        self._fill(features, preds)
