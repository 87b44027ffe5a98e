import pytest
import torch
from scipy.spatial.distance import pdist

from lightning_robustness.functional._class_statistics import (
    class_statistics,
    expand_distances_by_class,
    min_max,
    min_max_mean,
    pairwise_distances,
    sum_distances_by_class,
)


def distances_of(centers, p):
    """Distances of the pairs of centres, classes of one sample each, in scipy's order."""
    return pairwise_distances(class_statistics(centers, torch.arange(len(centers)), p), p).double()


@pytest.mark.parametrize(("p", "num_centers"), [(1.0, 257), (2.0, 2), (2.0, 257), (2.0, 600), (3.0, 2), (torch.inf, 2)])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
def test_pairwise_distances_equal_scipy(p, num_centers, dtype, atol):
    centers = torch.randn(num_centers, 8, dtype=dtype) + 100
    metric = {1.0: "cityblock", torch.inf: "chebyshev"}.get(p, "minkowski")
    expected = pdist(centers.numpy(), metric, **({"p": p} if metric == "minkowski" else {}))
    torch.testing.assert_close(distances_of(centers, p), torch.from_numpy(expected), atol=atol, rtol=0)


@pytest.mark.parametrize(("dtype", "distance", "atol"), [(torch.float64, 1e-9, 1e-14), (torch.float32, 1e-3, 1e-6)])
def test_pairwise_distances_of_many_centers_that_nearly_coincide(dtype, distance, atol):
    centers = torch.randn(300, 8, dtype=dtype)
    centers[1], centers[2] = centers[0], centers[0] + distance
    expected = torch.from_numpy(pdist(centers.double().numpy()))
    assert expected[1] == pytest.approx(distance * 8**0.5, rel=1e-3)
    torch.testing.assert_close(distances_of(centers, 2.0), expected, atol=atol, rtol=1e-6)


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


def test_min_max():
    assert min_max_mean(torch.tensor([3.0, 5.0, 4.0])) == 0.5
    assert min_max(torch.tensor([3.0, 5.0, 4.0])).tolist() == [0.0, 1.0, 0.5]
    assert min_max(torch.tensor([0.3, 0.1 + 0.2], dtype=torch.float64)).tolist() == [0.0, 0.0]
    assert min_max(torch.tensor([])).tolist() == []
