import numpy as np
import pytest
import torch
from scipy.stats import weibull_max

from lightning_robustness.functional.clever_score import fit_reverse_weibull


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


def test_parameters_are_found_from_many_values():
    values = weibull_max.rvs(3.0, loc=2.0, scale=0.5, size=20_000, random_state=0)
    fit = fit_reverse_weibull(torch.tensor(values))
    assert [fit.location.item(), fit.scale.item(), fit.shape.item()] == pytest.approx([2.0, 0.5, 3.0], rel=0.02)


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
