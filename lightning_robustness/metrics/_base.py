import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors
from torchmetrics.utilities.plot import _AX_TYPE, _PLOT_OUT_TYPE
from typing_extensions import override

from lightning_robustness._arguments import check_features_and_preds, check_integer, check_option
from lightning_robustness._numbers import accumulation_dtype, at_least_float32
from lightning_robustness._processes import rank_zero_warn
from lightning_robustness.functional._class_statistics import (
    ClassSketch,
    ClassStatistics,
    add_samples,
    check_p,
    class_centers,
    empty_sketch,
    merge_sketches,
    sum_by_class,
    sum_distances_by_class,
    sum_sketched_distances,
)


class RobustnessMetric(Metric):
    """Base of the metrics: ``compute`` returns a headline value and stores its parts in ``_components``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._components: dict[str, Tensor] = {}

    def _add_states(self, *settings: Any) -> None:
        """Add the states, first what the others depend on: a MetricCollection shares states equal after a batch.

        Older releases of torchmetrics compare the first one alone.
        """
        checksum = torch.tensor(zlib.crc32(repr(settings).encode()))
        self.add_state("checksum", default=checksum, dist_reduce_fx="max")

    @override
    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        self._computed = None  # else `compute` would return the value from before
        super().merge_state(incoming_state)

    @override
    def _apply(self, fn: Callable, exclude_state: Sequence[str] = "") -> nn.Module:
        moved = super()._apply(fn, exclude_state)
        self._components = {name: part.to(self.device) for name, part in self._components.items()}
        return moved

    def compute_components(self) -> dict[str, Tensor]:
        """Compute the metric and return it with its parts, by name."""
        self.compute()
        return dict(self._components)

    def plot(self, val: Tensor | Sequence[Tensor] | None = None, ax: _AX_TYPE | None = None) -> _PLOT_OUT_TYPE:
        """Plot one value or several, for instance one per epoch.

        Args:
            val: A result of ``forward`` or ``compute``, or a list of them; by default what ``compute`` returns.
            ax: A matplotlib axis to draw on; by default a new figure.

        Returns:
            Figure and axis.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed; the extra ``plot`` brings it.

        Example:
            >>> import torch
            >>> from lightning_robustness.metrics import ROBY
            >>> metric = ROBY(num_classes=3)
            >>> metric.update(torch.randn(20, 5), preds=torch.arange(20) % 3)
            >>> figure, axis = metric.plot()

        """
        return self._plot(val, ax)


class SampleMetric(RobustnessMetric):
    """Base of the metrics that measure each sample by itself: a row of values of each, which ``compute`` summarizes."""

    num_columns = 1
    rows: Any  # a list of tensors; after a sync, one tensor

    @override
    def _add_states(self, *settings: Any) -> None:
        super()._add_states(type(self).__name__, *settings)
        self.add_state("rows", default=[], dist_reduce_fx="cat")

    def compute(self) -> Tensor:
        """Compute the metric over all batches."""
        rows = self._all_rows()
        parts = self._summarize(*rows.unbind(dim=1))
        self._components = {name: part.float() if part.is_floating_point() else part for name, part in parts.items()}
        self._components["count"] = torch.tensor(len(rows), device=self.device)
        return next(iter(self._components.values()))

    @abstractmethod
    def _summarize(self, *columns: Tensor) -> dict[str, Tensor]:
        """Compute the parts of the metric, the headline first, also without samples."""

    def _add(self, *columns: Tensor) -> None:
        """Add samples, in the widest precision of the metric's device."""
        dtype = accumulation_dtype(self.device)
        self.rows.append(torch.stack([column.to(self.device, dtype) for column in columns], dim=1))

    def _all_rows(self) -> Tensor:
        nothing = torch.zeros(0, self.num_columns, dtype=accumulation_dtype(self.device), device=self.device)
        return dim_zero_cat([nothing, *([self.rows] if isinstance(self.rows, Tensor) else self.rows)])

    @override
    def _sync_dist(self, dist_sync_fn: Callable = gather_all_tensors, process_group: Any | None = None) -> None:
        # A process without samples has to gather a tensor of the same dtype as the others
        self.rows = [self._all_rows()]
        super()._sync_dist(dist_sync_fn, process_group)


def mean(values: Tensor) -> Tensor:
    """Return the mean, 0 without values."""
    return values.sum() / max(len(values), 1)


Storage = Literal["auto", "exact", "streaming"]

# Features that a metric may keep until the storage "auto" turns to streaming and "exact" warns
EXACT_BYTES = 2**30


class ClassStatisticsMetric(RobustnessMetric):
    """Base of the metrics that need centres of classes and mean distances to them.

    A mean distance to a centre is known only when the centre is, after the last sample. Exact storage therefore keeps
    all features. Streaming storage collects features until there are enough for a block, then adds the block to a
    :class:`ClassSketch`. "auto" is exact until the features take 1 GiB, then streaming.

    Several processes reduce the counts and sums of classes first. Each then sums the distances of its own samples to
    the common centres, and these sums are reduced: no features are gathered, and each process may be in another state.
    """

    # Collected, and not in the sketch
    features: list[Tensor]
    preds: list[Tensor]
    # The fields of the sketch that are used by name
    sketch_samples: Tensor
    sketch_preds: Tensor

    def __init__(self, num_classes: int, p: float, storage: Storage, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        num_classes = check_integer("num_classes", num_classes, minimum=2)
        check_option("storage", storage, Storage)
        check_p(p)
        self.num_classes = num_classes
        self.p = float(p)
        self.storage = storage
        self._warned = False
        self._add_states(self.p, storage)
        self.add_state("features", default=[], dist_reduce_fx="cat")
        self.add_state("preds", default=[], dist_reduce_fx="cat")
        # A width of 0 says that there is no sketch yet
        for name, value in empty_sketch(num_classes, 0, torch.float32, torch.device("cpu"))._asdict().items():
            default = value.float() if value.is_floating_point() else value  # Apple's GPUs have no float64
            self.add_state(f"sketch_{name}", default=default, dist_reduce_fx=None)

    def update(self, features: Tensor, preds: Tensor) -> None:
        """Add the features of a batch and the labels that the model predicts for it."""
        features = check_features_and_preds(features, preds, self.num_classes)
        self._check_width(features.shape[1])
        self.features.append(features.contiguous())  # a slice would keep the whole of what it was cut from
        self.preds.append(preds.long())
        self._bound_memory()

    def _publish(self, values: Sequence[Tensor], statistics: ClassStatistics, kind: type[NamedTuple]) -> Tensor:
        """Keep the parts for ``compute_components`` and return the first, the headline."""
        values = [value.to(statistics.dtype) for value in values]
        parts = dict(zip(kind._fields, (*values, *statistics.by_class(self.num_classes)), strict=True))
        self._components = {name: part.detach() for name, part in parts.items()}
        return values[0]

    def _statistics(self) -> ClassStatistics:
        sketch, features, preds = self._sketch(), *self._collected()
        counts, sums = self._totals(sketch, features, preds)
        centers = class_centers(sums, counts)
        distances = self._distances(sketch, features, preds, centers)
        classes = counts.nonzero().squeeze(1)
        dtype = at_least_float32(torch.promote_types(features.dtype, sketch.samples.dtype))
        counts, centers, distances = counts[classes], centers[classes], distances[classes]
        return ClassStatistics(classes, counts, centers, distances / counts, dtype)

    def _totals(self, sketch: ClassSketch, features: Tensor, preds: Tensor) -> tuple[Tensor, Tensor]:
        """Count the samples of each class and sum their features."""
        counts = preds.bincount(minlength=self.num_classes)
        sums = sum_by_class(features, preds, self.num_classes)
        return sketch.counts + counts.to(self.device), sketch.sums + sums.to(self.device)

    def _distances(self, sketch: ClassSketch, features: Tensor, preds: Tensor, centers: Tensor) -> Tensor:
        """Sum the distances of the samples of each class to its centre."""
        collected = sum_distances_by_class(features, preds, centers.to(features.device), self.p)
        return sum_sketched_distances(sketch, centers, self.p) + collected.to(self.device)

    def _layout(self) -> tuple[int, torch.dtype]:
        """Width and type of the features; a width of 0 before the first."""
        first = self.features[0] if len(self.features) else self.sketch_samples
        return first.shape[1], first.dtype

    def _check_width(self, width: int) -> None:
        expected = self._layout()[0]
        if expected and width and width != expected:
            raise ValueError(
                f"Expected `features` of width {expected}, as in the batches before, but got {width}. "
                "Call `reset` before features of another layer or network."
            )

    def _collected(self) -> tuple[Tensor, Tensor]:
        """Features and labels that are not in the sketch."""
        if not len(self.features):
            return self.sketch_samples[:0], self.sketch_preds[:0]
        self.features, self.preds = [dim_zero_cat(self.features)], [dim_zero_cat(self.preds)]
        return self.features[0], self.preds[0]

    def _has_sketch(self) -> bool:
        return self.sketch_samples.shape[1] > 0

    def _sketch(self) -> ClassSketch:
        """Return the sketch, an empty one where there is none yet."""
        if self._has_sketch():
            return ClassSketch(*(getattr(self, f"sketch_{name}") for name in ClassSketch._fields))
        return empty_sketch(self.num_classes, *self._layout(), self.device)

    def _set_sketch(self, sketch: ClassSketch) -> None:
        for name, value in sketch._asdict().items():
            setattr(self, f"sketch_{name}", value)

    def _capacity(self) -> int:
        """Number of samples that the sketch may keep: 64 of each class, fewer where these take too much memory."""
        width, dtype = self._layout()
        affordable = EXACT_BYTES // max(width * dtype.itemsize, 1)
        return min(max(32768, 64 * self.num_classes), max(affordable, 16 * self.num_classes))

    def _bound_memory(self) -> None:
        """Move what was collected into the sketch, if the storage says so and it is enough for a block."""
        count, capacity = sum(map(len, self.features)), self._capacity()
        width, dtype = self._layout()
        is_streaming = self.storage == "streaming" or self._has_sketch()
        is_large = count * width * dtype.itemsize > EXACT_BYTES
        if is_large and not is_streaming:
            self._warn_once(count, width * dtype.itemsize)
            is_streaming = self.storage == "auto"
        if is_streaming and count > capacity // 4:
            sketch = self._sketch()
            for features, preds in self._take_blocks(capacity // 4):
                sketch = add_samples(sketch, features, preds, self.p, capacity)
            self._set_sketch(sketch)

    def _warn_once(self, count: int, row_bytes: int) -> None:
        if self._warned:
            return
        self._warned = True
        size = f"{type(self).__name__} has collected {count * row_bytes / 1e9:.2g} GB of features"
        remedies = {
            "auto": ', more than storage="auto" keeps. Switching to streaming: approximate, with bounded memory. '
            'For the exact value, pass storage="exact".',
            "exact": f", and each 10,000 samples to come take another {row_bytes / 1e5:.2g} GB. "
            'Pass storage="auto" to bound the memory, or compute_on_cpu=True to keep features off the device.',
        }
        rank_zero_warn(size + remedies[self.storage], stacklevel=5)

    def _take_blocks(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what was collected in blocks, and remove it."""
        while self.features:
            rows, end = 0, 0
            while end < len(self.features) and rows < size:
                rows, end = rows + len(self.features[end]), end + 1
            # With `compute_on_cpu`, all but the last batch are on the CPU
            features = torch.cat([batch.to(self.device) for batch in self.features[:end]])
            preds = torch.cat([batch.to(self.device) for batch in self.preds[:end]])
            del self.features[:end], self.preds[:end]
            yield from zip(features.split(size), preds.split(size), strict=True)

    @override
    def _copy_state_dict(self) -> dict[str, Tensor | list[Any]]:
        # No tensor of the state is changed in place, so that `forward` and `sync` need not copy gigabytes
        states = {name: getattr(self, name) for name in self._defaults}
        return {
            name: value.detach() if isinstance(value, Tensor) else [batch.detach() for batch in value]
            for name, value in states.items()
        }

    @override
    def _sync_dist(self, dist_sync_fn: Callable = gather_all_tensors, process_group: Any | None = None) -> None:
        group = process_group or self.process_group

        def gather(value: Tensor) -> Tensor:
            return torch.stack(dist_sync_fn(value, group=group))

        # A process without data does not know the width and type of the others', and a gather of unlike tensors hangs
        width, dtype = self._layout()
        layouts = gather(torch.tensor([width, dtype.itemsize], device=self.device))
        width, itemsize = layouts.amax(dim=0).tolist()
        if any(other not in (0, width) for other in layouts[:, 0].tolist()):
            raise ValueError(
                f"Expected `features` of one width in all processes but got {layouts[:, 0].tolist()}. "
                "Do all of them evaluate the same layer?"
            )
        empty = empty_sketch(self.num_classes, width, torch.float64 if itemsize == 8 else torch.float32, self.device)
        sketch, features, preds = self._sketch(), *self._collected()
        if not sketch.samples.shape[1]:
            sketch = empty
            features = empty.samples
        counts, sums = (gather(value).sum(dim=0) for value in self._totals(sketch, features, preds))
        distances = gather(self._distances(sketch, features, preds, class_centers(sums, counts))).sum(dim=0)
        # Distances to the final centres need no expansion
        self._set_sketch(empty._replace(counts=counts, sums=sums, offsets=distances))
        self.features, self.preds = [], []

    @override
    def _reduce_states(self, incoming_state: dict[str, Any]) -> None:
        # `forward` hands over the running state while this one holds the batch, with its graph
        width, sketch = self._layout()[0], self._sketch() if self._has_sketch() else None
        features, preds = self.features, self.preds
        for name in self._defaults:
            value = incoming_state[name]
            setattr(self, name, list(value) if isinstance(value, list) else value)
        self._check_width(width)
        self.features = self.features + [batch.detach() for batch in features]
        self.preds = self.preds + preds
        if sketch is not None:
            sketch = ClassSketch(*(value.detach() for value in sketch))
            if self._has_sketch():
                sketch = merge_sketches(self._sketch(), sketch, self.p, self._capacity())
            self._set_sketch(sketch)
        self._bound_memory()
