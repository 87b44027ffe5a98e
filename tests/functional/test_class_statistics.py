import pytest
import torch

from lightning_robustness.functional import robustness_difference_index, roby
from lightning_robustness.functional._class_statistics import (
    _quota,
    add_samples,
    class_centers,
    class_statistics,
    empty_sketch,
    expand_distances_by_class,
    merge_sketches,
    min_max,
    min_max_mean,
    sum_distances_by_class,
    sum_sketched_distances,
)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, torch.inf])
def test_expansion_is_exact_at_its_centers_and_a_tangent_below_elsewhere(p):
    features = torch.randn(500, 6, dtype=torch.float64)
    index = torch.arange(500) % 4
    centers = class_statistics(features, index, p).centers
    offsets, slopes = expand_distances_by_class(features, index, centers, p)
    at_centers = sum_distances_by_class(features, index, centers, p)
    torch.testing.assert_close(offsets - (slopes * centers).sum(1), at_centers)
    moved = (centers + 1e-3 * torch.randn_like(centers)).requires_grad_()
    expanded, exact = offsets - (slopes * moved).sum(1), sum_distances_by_class(features, index, moved, p)
    assert (expanded <= exact + 1e-9).all()
    torch.testing.assert_close(expanded, exact, atol=5e-3, rtol=0)
    centers.requires_grad_()
    sum_distances_by_class(features, index, centers, p).sum().backward()
    torch.testing.assert_close(centers.grad, -slopes)


def test_many_samples_in_float32_keep_float64_accuracy():
    features = torch.randn(20_000, 3) + 1000
    statistics = class_statistics(features, torch.zeros(len(features), dtype=torch.long), 2.0)
    torch.testing.assert_close(statistics.centers[0], features.double().mean(0), atol=1e-10, rtol=0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_labels_of_any_integers(dtype):
    features, preds = torch.randn(6, 2), torch.tensor([0, 3, 3, 0, 1, 1])
    for function in (robustness_difference_index, roby):
        expected = function(features, preds, return_components=True)
        found = function(features, preds.to(dtype), return_components=True)
        torch.testing.assert_close(tuple(found), tuple(expected), equal_nan=True)


def test_min_max():
    assert min_max_mean(torch.tensor([3.0, 5.0, 4.0])) == 0.5
    assert min_max(torch.tensor([3.0, 5.0, 4.0])).tolist() == [0.0, 1.0, 0.5]
    assert min_max(torch.tensor([0.3, 0.1 + 0.2], dtype=torch.float64)).tolist() == [0.0, 0.0]
    assert min_max(torch.tensor([])).tolist() == []


CAPACITY = 600


def data(counts=(2000, 1500, 30, 1), dtype=torch.float64):
    preds = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    preds = preds[torch.randperm(len(preds))]
    return torch.randn(len(preds), 12, dtype=dtype) * torch.linspace(0.2, 2, 12) + 5 * preds.unsqueeze(1), preds


def sketch_of(features, preds, p=2.0, num_classes=4, capacity=CAPACITY, block=100):
    sketch = empty_sketch(num_classes, features.shape[1], features.dtype, features.device)
    for rows, labels in zip(features.split(block), preds.split(block), strict=True):
        sketch = add_samples(sketch, rows, labels, p, capacity)
        assert len(sketch.samples) <= capacity
    return sketch


def mean_distances(features, preds, centers, p):
    return torch.stack(
        [
            torch.linalg.vector_norm(features[preds == k] - center, ord=p, dim=1).mean()
            for k, center in enumerate(centers)
        ]
    )


def test_sums_and_counts_are_exact():
    features, preds = data()
    sketch = sketch_of(features, preds)
    assert sketch.counts.tolist() == [2000, 1500, 30, 1]
    for k, center in enumerate(class_centers(sketch.sums, sketch.counts)):
        torch.testing.assert_close(center, features[preds == k].mean(0))


def test_small_classes_are_kept_in_full_and_large_ones_evenly():
    features, preds = data()
    time = torch.arange(len(features), dtype=torch.float64)
    features[:, 0] = time  # so that a sample tells its position
    sketch = sketch_of(features, preds)
    kept = sketch.preds.bincount()
    assert kept[2:].tolist() == [30, 1]
    assert abs(kept[0] - kept[1]) <= 3
    for k in (0, 1):
        positions = sketch.samples[sketch.preds == k, 0].sort().values
        order = torch.searchsorted(features[preds == k, 0], positions)
        gaps = order.diff()
        assert gaps.max() <= 3 * (preds == k).sum() / kept[k]
        assert gaps.min() >= 1


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, torch.inf])
def test_distances_of_thinned_classes(p):
    features, preds = data([400] * 20)
    sketch = sketch_of(features, preds, p, num_classes=20, capacity=1000)
    centers = class_centers(sketch.sums, sketch.counts) + 0.1  # samples of another process move them
    expected = mean_distances(features, preds, centers, p)
    error = (sum_sketched_distances(sketch, centers, p) / sketch.counts - expected).abs().mean()
    assert error < 3e-3 * expected.mean()
    # Better than the expansions alone, and much better than the samples that are kept alone
    expansions = (sketch.offsets - (sketch.slopes * centers).sum(1)) / sketch.counts
    assert error < 0.7 * (expansions - expected).abs().mean()
    assert error < 0.1 * (mean_distances(sketch.samples, sketch.preds, centers, p) - expected).abs().mean()


def test_distances_of_complete_classes_are_exact():
    features, preds = data()
    sketch = sketch_of(features, preds)
    centers = class_centers(sketch.sums, sketch.counts) + 0.1
    distances = sum_sketched_distances(sketch, centers, 2.0) / sketch.counts
    torch.testing.assert_close(distances[2:], mean_distances(features, preds, centers, 2.0)[2:])


@pytest.mark.parametrize("p", [2.0, torch.inf])
@pytest.mark.parametrize("start", [100, 1800, 3400])
def test_merged_sketches(p, start):
    features, preds = data()
    features[start:] += 0.2
    merged = merge_sketches(
        sketch_of(features[:start], preds[:start], p), sketch_of(features[start:], preds[start:], p), p, CAPACITY
    )
    assert len(merged.samples) <= CAPACITY
    assert merged.counts.tolist() == [2000, 1500, 30, 1]
    centers = class_centers(merged.sums, merged.counts)
    expected = mean_distances(features, preds, centers, p)
    torch.testing.assert_close(
        sum_sketched_distances(merged, centers, p) / merged.counts, expected, rtol=2e-3, atol=1e-12
    )


def test_classes_without_spread():
    features = torch.ones(3000, 3).cumsum(1)
    sketch = sketch_of(features, torch.arange(3000) % 3)
    distances = sum_sketched_distances(sketch, class_centers(sketch.sums, sketch.counts), 2.0)
    assert distances.tolist() == pytest.approx([0, 0, 0, 0], abs=1e-9)


@pytest.mark.parametrize("total", [1, 5, 12, 100, 149])
def test_quota(total):
    counts = torch.tensor([0, 7, 100, 3, 40])
    quota = _quota(counts, total)
    assert counts.clamp(max=quota).sum() <= total < counts.clamp(max=quota + 1).sum()
