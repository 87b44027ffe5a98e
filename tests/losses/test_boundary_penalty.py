from functools import partial

import pytest
import torch
from torch import nn

from lightning_robustness import InputSpace, functional, losses
from tests.functional import dense
from tests.functional.models import MODELS, UNBOUNDED

boundary_penalty = partial(losses.boundary_penalty, input_space=UNBOUNDED)
boundary_distance = partial(functional.boundary_distance, input_space=UNBOUNDED)


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("name", ["convolution", "attention", "not in forward mode"])
def test_hinge_of_the_dense_jacobian(name, norm):
    model, shape = MODELS[name]()
    model, x = model.double().eval(), torch.randn(9, *shape).double()
    logits, jacobian = model(x).detach(), dense.jacobian(model, x)
    y = torch.where(torch.arange(9) % 3 == 0, 0, logits.argmax(dim=1))
    distances = boundary_distance(model, x, y, norm)
    margin = distances[distances > 0].median().item()
    hinges, nearest = [], []
    for z, J, c in zip(logits, jacobian, y.tolist(), strict=True):  # noqa: N806
        lacking = {
            j: margin * torch.linalg.vector_norm(J[c] - J[j], ord={"linf": 1, "l2": 2}[norm]) - (z[c] - z[j])
            for j in z.argsort(descending=True).tolist()
            if j != c
        }
        hinges.append(max(0.0, *(value.item() for value in lacking.values())))
        nearest.append(max(0.0, next(iter(lacking.values())).item()))
    # It asks for a distance
    assert [hinge == pytest.approx(0, abs=1e-12) for hinge in hinges] == (distances >= margin * (1 - 1e-12)).tolist()
    assert min(hinges) < max(hinges)
    for num_rivals, expected in ((4, hinges), (1, nearest)):
        penalty = boundary_penalty(model, x, y, margin=margin, norm=norm, num_rivals=num_rivals)
        assert penalty.item() == pytest.approx(sum(expected) / 9)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_gradients_by_differences(norm):
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = torch.randn(8, 5).double(), torch.arange(8) % 3
    boundary_penalty(model, x, y, margin=1.0, norm=norm, num_rivals=2).backward()
    for weight in model.parameters():
        direction, step = torch.randn_like(weight), 1e-6
        values = []
        for sign in (1, -1):
            weight.data += sign * step * direction
            values.append(boundary_penalty(model, x, y, margin=1.0, norm=norm, num_rivals=2).item())
            weight.data -= sign * step * direction
        expected = (values[0] - values[1]) / (2 * step)
        assert (weight.grad * direction).sum().item() == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_zero_slopes_have_a_finite_gradient():
    model, y = nn.Linear(2, 2), torch.zeros(3, dtype=torch.long)
    model.weight.data.zero_()
    for bias, expected in (([1.0, 0.0], 0.0), ([0.0, 1.0], 1.0)):
        model.bias.data = torch.tensor(bias)
        model.zero_grad()
        penalty = boundary_penalty(model, torch.zeros(3, 2), y)
        penalty.backward()
        assert penalty.item() == expected
        assert not model.weight.grad.any()  # zero, and not NaN
        assert model.bias.grad.tolist() == [-expected, expected]


def test_margin_is_in_unnormalised_units():
    model, x, y = nn.Linear(5, 3).double(), torch.rand(8, 5).double(), torch.arange(8) % 3
    space = InputSpace(mean=0.25, std=0.5)
    values = [
        boundary_penalty(model, space.normalize(x), y, margin=margin, input_space=used)
        for margin, used in ((0.1, space), (0.2, UNBOUNDED))
    ]
    torch.testing.assert_close(*values)
