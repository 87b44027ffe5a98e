import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import weibull_max
from torch import nn

from lightning_robustness import functional
from lightning_robustness.functional.clever_score import fit_reverse_weibull
from tests.functional.models import UNBOUNDED
from tests.networks import perturb

clever_score = partial(functional.clever_score, input_space=UNBOUNDED)
FEW = {"num_batches": 8, "points_per_batch": 6}
NORMS = {1: "l1", 2: "l2", math.inf: "linf"}
each_norm = pytest.mark.parametrize(("p", "dual"), [(1, math.inf), (2.0, 2), (math.inf, 1)])


def linear(num_inputs=5, num_classes=4):
    return nn.Linear(num_inputs, num_classes).double()


def margins_by_hand(model, x, dual):
    """Margin of the predicted class over each class, divided by the dual norm of the difference of weights."""
    logits, weight = model(x).detach(), model.weight.detach()
    result = torch.zeros_like(logits)
    for i, pred in enumerate(logits.argmax(dim=1).tolist()):
        for j in range(logits.shape[1]):
            if j != pred:
                norm = torch.linalg.vector_norm(weight[pred] - weight[j], ord=dual)
                result[i, j] = (logits[i, pred] - logits[i, j]) / norm
    return result


@each_norm
def test_linear_model_has_a_closed_form(p, dual):
    model, x = linear(), torch.randn(6, 5, dtype=torch.double)
    expected = margins_by_hand(model, x, dual)
    classes = torch.arange(4).expand(6, 4)
    torch.testing.assert_close(
        clever_score(model, x, 1e3, norm=NORMS[p], targets=classes, **FEW), expected, atol=1e-12, rtol=0
    )
    one = torch.tensor([0, 1, 2, 3, 0, 1])
    by_one = clever_score(model, x, 1e3, norm=NORMS[p], targets=one, **FEW)
    torch.testing.assert_close(by_one, expected.gather(1, one.unsqueeze(1)).squeeze(1), atol=1e-12, rtol=0)
    untargeted = clever_score(model, x, 1e3, norm=NORMS[p], **FEW)
    nearest = expected.masked_fill(expected == 0, math.inf).amin(dim=1)
    torch.testing.assert_close(untargeted, nearest, atol=1e-12, rtol=0)
    radius = nearest.median().item()
    torch.testing.assert_close(clever_score(model, x, radius, norm=NORMS[p], **FEW), nearest.clamp(max=radius))


def bowl(x):
    """A margin of (1 - |x|^2) / 2, whose gradient -x grows linearly."""
    return torch.stack([(1 - x.square().sum(dim=1)) / 2, torch.zeros_like(x[:, 0])], dim=1)


@each_norm
def test_largest_gradient_in_the_ball_is_found(p, dual):
    x, radius = torch.tensor([[0.4, -0.2], [0.0, 0.6]]), 0.5
    # The dual norm of x, and how far a step of the radius can increase it
    largest = torch.linalg.vector_norm(x, ord=dual, dim=1) + radius * (2 if p == math.inf else 1)
    expected = (1 - x.square().sum(dim=1)) / 2 / largest
    score = clever_score(bowl, x, radius, norm=NORMS[p], num_batches=50, points_per_batch=100)
    torch.testing.assert_close(score, expected, rtol=0.05, atol=0)


def test_flat_margin_gives_the_radius_and_a_tie_zero():
    def flat(x):
        return 0 * x[:, :1] + torch.tensor([1.0, 3.0, 3.0])

    x = torch.randn(2, 2)
    assert clever_score(flat, x, radius=0.7, targets=torch.tensor([0, 0]), **FEW).tolist() == pytest.approx([0.7, 0.7])
    assert clever_score(flat, x, radius=0.7, **FEW).tolist() == [0, 0]


@pytest.mark.parametrize(("p", "shape"), [(1.0, (3,)), (2.0, (2, 2, 1)), (math.inf, (3,))])
def test_points_are_uniform_in_the_ball(p, shape):
    calls = []

    def model(x):
        calls.append(x.detach())
        return x.flatten(1)

    clever_score(model, torch.zeros(1, *shape), 2.0, norm=NORMS[p], num_batches=1, points_per_batch=20_000)
    points = calls[-1] / 2.0
    assert points.shape == (20_000, *shape)
    num_dims = math.prod(shape)
    lengths = torch.linalg.vector_norm(points.flatten(1), ord=p, dim=1)
    assert lengths.max() <= 1 + 1e-6
    # Volume grows with the power of the number of dimensions: r^n is uniform
    quantiles = (lengths**num_dims).quantile(torch.tensor([0.1, 0.5, 0.9]))
    torch.testing.assert_close(quantiles, torch.tensor([0.1, 0.5, 0.9]), atol=0.02, rtol=0)
    # All signs alike, and no coordinate preferred
    signs = (points.flatten(1) > 0).double().mean(dim=0)
    torch.testing.assert_close(signs, torch.full_like(signs, 0.5), atol=0.02, rtol=0)
    sizes = points.flatten(1).abs().mean(dim=0)
    torch.testing.assert_close(sizes, sizes.mean().expand_as(sizes), atol=0, rtol=0.03)


def test_points_stay_in_the_range_of_the_inputs():
    def steep_outside(x):
        margin = 1 + x.sum(dim=1) + 1e3 * ((x - 1).relu() + (-x).relu()).sum(dim=1)
        return torch.stack([margin, torch.zeros_like(margin)], dim=1)

    x = torch.tensor([[0.1, 0.95]])
    inside = clever_score(steep_outside, x, 3.0, input_space=None, **FEW)
    assert inside.item() == pytest.approx(2.05 / math.sqrt(2), rel=1e-5)
    assert clever_score(steep_outside, x, 3.0, **FEW) < 0.01


def test_seed():
    x = torch.tensor([[0.4, -0.2]])
    first = clever_score(bowl, x, 0.5, **FEW)
    torch.manual_seed(5)
    assert torch.equal(first, clever_score(bowl, x, 0.5, **FEW))
    assert not torch.equal(first, clever_score(bowl, x, 0.5, seed=1, **FEW))


def test_two_classes_and_no_samples():
    model = linear(num_classes=2)
    x = torch.randn(1, 5, dtype=torch.double)
    expected = margins_by_hand(model, x, 2).amax(dim=1)
    torch.testing.assert_close(clever_score(model, x, 1e3, **FEW), expected)
    assert clever_score(model, x[:0], 1.0).shape == (0,)
    assert clever_score(model, x[:0].float(), 1.0, targets=torch.zeros(0, 3, dtype=torch.long)).shape == (0, 3)


def test_smaller_perturbations_than_the_score_hardly_ever_succeed(digits, digits_network):
    images = digits[0][1200:1230]
    score = clever_score(digits_network, images, radius=0.2, norm="linf", num_batches=15, points_per_batch=10)
    preds = digits_network(images).argmax(dim=1)
    for factor, lowest, highest in ((0.8, 0.9, 1.0), (20.0, 0.0, 0.1)):
        kept = [
            digits_network(perturb(digits_network, x[None], y[None], factor * s.item())).argmax() == y
            for x, y, s in zip(images, preds, score, strict=True)
        ]
        assert lowest <= torch.stack(kept).double().mean() <= highest


@pytest.mark.parametrize("shape", [2.0, 4.0, 8.0])
@pytest.mark.parametrize(("location", "scale"), [(5.0, 1.0), (-300.0, 20.0)])
def test_equals_scipys_maximum_likelihood(shape, location, scale):
    values = weibull_max.rvs(shape, loc=location, scale=scale, size=(4, 200), random_state=3)
    fit = fit_reverse_weibull(torch.tensor(values))
    for row, a, b, c in zip(values, fit.location.tolist(), fit.scale.tolist(), fit.shape.tolist(), strict=True):
        # Started near the solution: from its own start, scipy's search ends elsewhere now and then
        expected = weibull_max.fit(row, shape, loc=row.max() + 0.5 * scale, scale=scale)
        assert (c, a, b) == pytest.approx(expected, rel=1e-2)
        assert weibull_max.logpdf(row, c, a, b).sum() >= weibull_max.logpdf(row, *expected).sum() - 1e-4


def test_shape_and_values_are_independent_of_the_batch():
    values = torch.rand(3, 2, 50)
    fit = fit_reverse_weibull(values)
    assert fit.location.shape == (3, 2)
    assert fit.location.dtype == torch.double
    torch.testing.assert_close(fit_reverse_weibull(values[1, 1]).location, fit.location[1, 1])


def test_follows_shift_and_scale():
    values = torch.randn(5, 60, dtype=torch.double).abs().neg()
    plain, moved = fit_reverse_weibull(values), fit_reverse_weibull(7 * values + 3)
    torch.testing.assert_close(moved.location, 7 * plain.location + 3, rtol=1e-4, atol=0)
    torch.testing.assert_close(moved.shape, plain.shape, rtol=1e-3, atol=0)


@pytest.mark.parametrize("value", [0.0, 2.5])
def test_equal_values_are_their_own_location(value):
    noise = 1e-8 * torch.rand(2, 30, dtype=torch.double)
    assert fit_reverse_weibull(torch.full((2, 30), value)).location.tolist() == [value, value]
    if value:
        torch.testing.assert_close(fit_reverse_weibull(value + noise).location, (value + noise).amax(dim=1))
    assert fit_reverse_weibull(torch.full((1, 1), value)).location.item() == value


def test_values_without_an_end_give_a_finite_location():
    values = torch.tensor(np.random.default_rng(0).gumbel(size=(20, 50)))
    fit = fit_reverse_weibull(values)
    assert fit.shape.max() == 20
    assert (fit.location > values.amax(dim=1)).all()
    assert (fit.location < values.amax(dim=1) + 30).all()
