import numpy as np
import pytest
import torch
from scipy.stats import beta, norm

from lightning_robustness.functional import num_rayleigh_directions, smoothing_radius


def test_radius_and_its_change_equal_scipy():
    probs, trace, sigma = np.array([[0.05, 0.85, 0.1], [0.4, 0.25, 0.35]]), np.array([0.3, 2.0]), 0.25
    result = smoothing_radius(torch.tensor(probs), sigma, torch.tensor(trace))
    a, b = norm.ppf([0.85, 0.4]), norm.ppf([0.1, 0.35])
    np.testing.assert_allclose(result.radius, sigma / 2 * (a - b), rtol=1e-10)
    change = sigma / 2 * (1 / norm.pdf(a) + 1 / norm.pdf(b)) * sigma / 2 * np.sqrt(trace)
    np.testing.assert_allclose(result.change, change, rtol=1e-10)


def test_mean_change_of_probabilities_is_within_the_bound():
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3).double()
    x, sigma = torch.rand(1, 5, dtype=torch.double), 0.05
    p, weight = model(x).softmax(1)[0], model.weight
    trace = torch.trace(weight.T @ (p.diag() - p.outer(p)) @ weight)
    noisy = model(x + sigma * torch.randn(20_000, 5, dtype=torch.double)).softmax(1)
    assert (noisy - p).abs().max(dim=1).values.mean() <= sigma / 2 * trace.sqrt()


@pytest.mark.parametrize("num_classes", [2, 3, 10])
@pytest.mark.parametrize("accuracy", [0.05, 0.3])
def test_number_of_directions_equals_scipy(num_classes, accuracy):
    chance = beta.sf(1 - accuracy, 0.5, (num_classes - 1) / 2)
    expected = np.ceil(np.log(0.1) / np.log1p(-chance))
    assert num_rayleigh_directions(num_classes, accuracy, 0.9) == pytest.approx(expected, rel=1e-4, abs=1)


@pytest.mark.parametrize("name", ["accuracy", "confidence"])
def test_shares_are_checked(name):
    with pytest.raises(ValueError, match=f"`{name}`.*1.5"):
        num_rayleigh_directions(3, **{"accuracy": 0.1, "confidence": 0.9, name: 1.5})


@pytest.mark.parametrize("num_classes", [20, 1000])  # the chance of a single vector is tiny, or underflows
def test_more_directions_than_anyone_draws_are_refused(num_classes):
    assert np.log(0.05) / np.log1p(-beta.sf(0.9, 0.5, (num_classes - 1) / 2) - 1e-300) > 1e9
    with pytest.raises(ValueError, match=f"`num_classes`.*{num_classes}.*lanczos"):
        num_rayleigh_directions(num_classes, 0.1)


@pytest.mark.parametrize("probs", [[2.0, -1.0], [torch.nan, 0.5], [1.0]])
def test_probabilities_are_checked(probs):
    with pytest.raises(ValueError, match="softmax"):
        smoothing_radius(torch.tensor([probs]), 0.1)


@pytest.mark.parametrize("trace", [[-1.0], [torch.nan], [1.0, 1.0]])
def test_traces_are_checked(trace):
    with pytest.raises(ValueError, match=r"`trace`.* 1 non-negative"):
        smoothing_radius(torch.tensor([[0.6, 0.4]]), 0.1, torch.tensor(trace))


def test_half_precision_is_computed_in_single():
    probs, trace = torch.tensor([[0.75, 0.25]]), torch.tensor([0.5])
    for found, expected in zip(
        smoothing_radius(probs.half(), 0.25, trace.half()), smoothing_radius(probs, 0.25, trace), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_noise_changes_nothing_where_nothing_depends_on_it():
    assert smoothing_radius(torch.tensor([[1.0, 0.0]]), 0.1, torch.zeros(1)).change == 0  # and not NaN
