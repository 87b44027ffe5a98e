from collections.abc import Iterator
from numbers import Real
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_robustness._numbers import accumulation_dtype, at_least_float32
from lightning_robustness._processes import rank_zero_warn

Normalization = Literal["pairs", "all", "none"]

# Rows that are widened to float64 at a time: they stay in the cache, and the features need no second copy
_CHUNK = 1024


class ClassStatistics(NamedTuple):
    """Statistics of the P populated classes, from which RDI and ROBY are computed."""

    classes: Tensor
    counts: Tensor
    centers: Tensor
    distances: Tensor
    dtype: torch.dtype

    def by_class(self, num_classes: int | None = None) -> tuple[Tensor, Tensor]:
        """Return mean distances and counts of all classes, by default up to the highest; NaN and 0 without samples."""
        if num_classes is None:
            num_classes = int(self.classes.amax()) + 1 if len(self.classes) else 0
        distances = self.distances.new_full((num_classes,), torch.nan).index_copy(0, self.classes, self.distances)
        counts = self.counts.new_zeros(num_classes).index_copy(0, self.classes, self.counts)
        return distances.to(self.dtype), counts


def class_statistics(features: Tensor, preds: Tensor, p: float) -> ClassStatistics:
    """Compute centres and mean distances in one pass each, in float64 regardless of the dtype of the features."""
    classes, index, counts = preds.long().unique(return_inverse=True, return_counts=True)
    centers = sum_by_class(features, index, len(classes)) / counts.unsqueeze(1)
    distances = sum_distances_by_class(features, index, centers, p) / counts
    return ClassStatistics(classes, counts, centers, distances, at_least_float32(features.dtype))


def _chunks(features: Tensor, index: Tensor, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a few rows at a time, widened, and their classes; none before there is a width, as no norm has a value."""
    if features.shape[1]:
        for rows, labels in zip(features.split(_CHUNK), index.split(_CHUNK), strict=True):
            yield rows.to(dtype), labels


def sum_by_class(features: Tensor, index: Tensor, num_classes: int) -> Tensor:
    """Sum the features of each class, shape ``(num_classes, D)``."""
    sums = features.new_zeros(num_classes, features.shape[1], dtype=accumulation_dtype(features.device))
    for rows, labels in _chunks(features, index, sums.dtype):
        sums.index_add_(0, labels, rows)
    return sums


def sum_distances_by_class(features: Tensor, index: Tensor, centers: Tensor, p: float) -> Tensor:
    """Sum the distances of the samples of each class to its centre, shape ``(num_classes,)``."""
    sums = centers.new_zeros(len(centers))
    for rows, labels in _chunks(features, index, centers.dtype):
        sums.index_add_(0, labels, torch.linalg.vector_norm(rows - centers[labels], ord=p, dim=1))
    return sums


def expand_distances_by_class(features: Tensor, index: Tensor, centers: Tensor, p: float) -> tuple[Tensor, Tensor]:
    r"""Expand the summed distance of each class to first order in its centre.

    With r the distance of a sample to the centre c and u the gradient of the norm there, the distance to another
    centre c' is r + u.c - u.c' to first order, a lower bound since a norm is convex.
    """
    offsets, slopes = centers.new_zeros(len(centers)), torch.zeros_like(centers)
    for rows, labels in _chunks(features, index, centers.dtype):
        c = centers[labels]
        difference = rows - c
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
            f"{('No class', 'Only one class')[populated]} was predicted, so {consequence}. Is the network trained, and "
            "does the data hold several classes?",
            stacklevel=4,
        )
    return populated < 2


def check_p(p: float, name: str = "p") -> None:
    """Check the order of a Minkowski distance."""
    if isinstance(p, bool) or not isinstance(p, Real) or not p >= 1:
        raise ValueError(f"Expected argument `{name}` to be a number of at least 1, or infinity, but got {p}.")


# The n-th sample of a class has the key n * _GOLDEN modulo _ALL. The quotient of the two is the golden ratio, so that
# the samples whose keys are below a limit are spread evenly over the data.
_ALL = 2**32
_GOLDEN = 2654435769


class ClassSketch(NamedTuple):
    r"""Counts and feature sums of K classes, some samples of each, and linearised distances of all samples.

    A class starts with all of its samples. When all classes together have too many, large ones keep only the samples
    whose keys are below a limit. From then on, the distance of every sample :math:`f` of that class to a centre
    :math:`c` is summed in its first-order expansion around an anchor :math:`a`,
    :math:`\|f - c\| \approx \|f - a\| + u \cdot a - u \cdot c` with :math:`u` the gradient of the norm at
    :math:`f - a`. The samples that are kept tell by how much the expansion is off.
    """

    counts: Tensor
    sums: Tensor
    limits: Tensor
    anchors: Tensor
    offsets: Tensor
    slopes: Tensor
    samples: Tensor
    preds: Tensor
    keys: Tensor


def empty_sketch(num_classes: int, width: int, dtype: torch.dtype, device: torch.device) -> ClassSketch:
    """Return the sketch of no samples, for features of a given width and type."""
    counts = torch.zeros(num_classes, dtype=torch.long, device=device)
    sums = torch.zeros(num_classes, width, dtype=accumulation_dtype(device), device=device)
    return ClassSketch(
        counts=counts,
        sums=sums,
        limits=torch.full_like(counts, _ALL),
        anchors=torch.zeros_like(sums),
        offsets=sums.new_zeros(num_classes),
        slopes=torch.zeros_like(sums),
        samples=torch.zeros(0, width, dtype=dtype, device=device),
        preds=counts.new_zeros(0),
        keys=counts.new_zeros(0),
    )


def add_samples(sketch: ClassSketch, features: Tensor, preds: Tensor, p: float, capacity: int) -> ClassSketch:
    """Add samples to a sketch, and thin it out if it keeps more of them than its capacity."""
    num_classes = len(sketch.counts)
    keys = (sketch.counts[preds] + _positions(preds, num_classes)) * _GOLDEN % _ALL
    kept = keys < sketch.limits[preds]
    thinned = sketch.limits[preds] < _ALL
    offsets, slopes = expand_distances_by_class(features[thinned], preds[thinned], sketch.anchors, p)
    sketch = sketch._replace(
        counts=sketch.counts + preds.bincount(minlength=num_classes),
        sums=sketch.sums + sum_by_class(features, preds, num_classes),
        offsets=sketch.offsets + offsets,
        slopes=sketch.slopes + slopes,
        samples=torch.cat([sketch.samples, features[kept]]),
        preds=torch.cat([sketch.preds, preds[kept]]),
        keys=torch.cat([sketch.keys, keys[kept]]),
    )
    return _thin_out(sketch, p, capacity)


def merge_sketches(first: ClassSketch, second: ClassSketch, p: float, capacity: int) -> ClassSketch:
    """Return a sketch of the samples of both."""
    counts = first.counts + second.counts
    sums = first.sums + second.sums
    limits = torch.minimum(first.limits, second.limits)
    first, second = (_expand(sketch, class_centers(sums, counts), limits, p) for sketch in (first, second))
    merged = first._replace(
        counts=counts,
        sums=sums,
        offsets=first.offsets + second.offsets,
        slopes=first.slopes + second.slopes,
        samples=torch.cat([first.samples, second.samples]),
        preds=torch.cat([first.preds, second.preds]),
        keys=torch.cat([first.keys, second.keys]),
    )
    return _thin_out(merged, p, capacity)


def sum_sketched_distances(sketch: ClassSketch, centers: Tensor, p: float) -> Tensor:
    """Estimate the sum of the distances of the samples of each class to its centre, shape ``(K,)``.

    The expansions of all samples are added up, and the samples that are kept correct them for all (a control variate).
    """
    offsets, slopes = _expand_kept(sketch, sketch.anchors, sketch.limits, p)
    distances = sum_distances_by_class(sketch.samples, sketch.preds, centers, p)
    error = distances - (offsets - (slopes * centers).sum(dim=1))
    return (sketch.offsets - (sketch.slopes * centers).sum(dim=1) + _weights(sketch) * error).clamp(min=0)


def class_centers(sums: Tensor, counts: Tensor) -> Tensor:
    """Return the mean of each class, zero for classes without samples."""
    return sums / counts.clamp(min=1).unsqueeze(1)


def _positions(preds: Tensor, num_classes: int) -> Tensor:
    """Number each sample within its class."""
    counts = preds.bincount(minlength=num_classes)
    order = preds.argsort(stable=True)
    starts = (counts.cumsum(0) - counts)[preds[order]]
    return torch.empty_like(preds).scatter(0, order, torch.arange(len(preds), device=preds.device) - starts)


def _weights(sketch: ClassSketch) -> Tensor:
    """Return how many samples each one that is kept stands for."""
    kept = sketch.preds.bincount(minlength=len(sketch.counts)).clamp(min=1)
    return (sketch.counts / kept).to(sketch.sums.dtype)


def _thin_out(sketch: ClassSketch, p: float, capacity: int) -> ClassSketch:
    """Keep fewer samples of the largest classes, and expand around the present centres, if there are too many."""
    if len(sketch.samples) <= capacity:
        return sketch
    quota = _quota(sketch.counts, 3 * capacity // 4)  # room for more, so that this is rare
    limits = torch.minimum(sketch.limits, _ALL * quota // sketch.counts.clamp(min=1))
    return _expand(sketch, class_centers(sketch.sums, sketch.counts), limits, p)


def _quota(counts: Tensor, total: int) -> int:
    """Return the largest number such that with at most this many samples of each class there are at most ``total``."""
    ordered = counts.sort().values
    larger = torch.arange(len(counts), 0, -1, device=counts.device)  # classes of at least this size
    below = ordered.cumsum(0) - ordered
    quotas = (total - below) // larger
    return int(quotas[quotas < ordered][0])


def _expand(sketch: ClassSketch, anchors: Tensor, limits: Tensor, p: float) -> ClassSketch:
    """Expand around other anchors, as estimated from the samples that are kept, then keep only those below limits."""
    weights = _weights(sketch)
    old_offsets, old_slopes = _expand_kept(sketch, sketch.anchors, sketch.limits, p)
    offsets, slopes = _expand_kept(sketch, anchors, limits, p)
    kept = sketch.keys < limits[sketch.preds]
    return sketch._replace(
        limits=limits,
        anchors=anchors,
        offsets=sketch.offsets + weights * (offsets - old_offsets),
        slopes=sketch.slopes + weights.unsqueeze(1) * (slopes - old_slopes),
        samples=sketch.samples[kept],
        preds=sketch.preds[kept],
        keys=sketch.keys[kept],
    )


def _expand_kept(sketch: ClassSketch, anchors: Tensor, limits: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Expand the distances of the samples that are kept, in classes that are not kept in full."""
    offsets, slopes = expand_distances_by_class(sketch.samples, sketch.preds, anchors, p)
    thinned = limits < _ALL  # masked afterwards, since a selection of the samples would be a copy
    return offsets * thinned, slopes * thinned.unsqueeze(1)
