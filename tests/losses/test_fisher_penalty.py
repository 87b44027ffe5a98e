import copy
from functools import partial

import pytest
import torch
from torch import nn

from lightning_robustness import InputSpace, functional, losses
from tests._isolation.test_sandbox import assert_same, snapshot, trained_once
from tests.functional.dense import information
from tests.functional.models import MODELS, UNBOUNDED

fisher_penalty = partial(losses.fisher_penalty, input_space=UNBOUNDED)
fisher_spectral_norm = partial(functional.fisher_spectral_norm, input_space=UNBOUNDED)


def network(num_classes=3):
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, num_classes)).double()
    model[2].weight.data *= 3
    return model


def inputs(number=4):
    return torch.randn(number, 5, dtype=torch.float64)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_to_the_dense_matrix(name, dtype):
    model, shape = MODELS[name]()
    model, x = model.to(dtype).eval(), torch.randn(5, *shape, dtype=dtype)
    matrix = information(model, x)
    spectral, trace = fisher_penalty(model, x).double(), fisher_penalty(model, x, "trace").double()
    torch.testing.assert_close(spectral, torch.linalg.eigvalsh(matrix)[:, -1].mean(), rtol=1e-4, atol=0)
    torch.testing.assert_close(trace, matrix.diagonal(dim1=1, dim2=2).sum(dim=1).mean(), rtol=1e-4, atol=0)


def normalised_network():
    layers = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)
    return nn.Sequential(*layers).double()


def test_batch_normalisation_in_training():
    model, x = normalised_network(), inputs(8)
    frozen = copy.deepcopy(model).eval()
    hidden = model[0](x).detach()
    frozen[1].running_mean, frozen[1].running_var = hidden.mean(dim=0), hidden.var(dim=0, correction=0)
    torch.testing.assert_close(fisher_penalty(model, x), fisher_penalty(frozen, x))
    model.eval()
    torch.testing.assert_close(fisher_penalty(model, x), fisher_spectral_norm(model, x).mean())


@pytest.mark.parametrize("kind", ["spectral", "trace"])
def test_gradcheck_in_the_weights(kind):
    model, x = network(), inputs()

    def penalty(*weights):
        return fisher_penalty(lambda t: torch.func.functional_call(model, names(weights), (t,)), x, kind)

    def names(weights):
        return dict(zip(dict(model.named_parameters()), weights, strict=True))

    weights = [p.detach().clone().requires_grad_() for p in model.parameters()]
    assert torch.autograd.gradcheck(penalty, weights)


@pytest.mark.parametrize("kind", ["spectral", "trace"])
@pytest.mark.parametrize("make", [network, normalised_network])
def test_gradients_of_the_modules_own_weights(kind, make):
    model, x = make(), inputs()
    fisher_penalty(model, x, kind).backward()
    step = 1e-6
    for parameter in model.parameters():
        flat, gradient = parameter.data.view(-1), parameter.grad.view(-1)
        for index in range(0, len(flat), 5):
            value = flat[index].item()
            values = []
            for moved in (value + step, value - step):
                flat[index] = moved
                values.append(fisher_penalty(model, x, kind).item())
            flat[index] = value
            assert gradient[index].item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-4, abs=1e-7)


def test_many_steps_of_power_iteration_are_exact_and_few_a_lower_bound():
    model, x = network(num_classes=20), inputs(8)
    exact = fisher_penalty(model, x)
    gradients = torch.autograd.grad(exact, model.parameters())
    values = [fisher_penalty(model, x, num_products=number) for number in (1, 2, 5, 300)]
    assert values == sorted(values)
    assert 0.5 * exact < values[0] <= exact
    torch.testing.assert_close(values[-1], exact, rtol=1e-9, atol=0)
    for gradient, expected in zip(torch.autograd.grad(values[-1], model.parameters()), gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-9)


def test_random_vectors_give_the_trace_without_bias():
    model, x = network(num_classes=10), inputs()
    exact = fisher_penalty(model, x, "trace")
    estimates = torch.stack([fisher_penalty(model, x, "trace", num_products=50, seed=seed) for seed in range(40)])
    error = (estimates.mean() - exact).abs() / (estimates.std() / 40**0.5)
    assert error < 3
    assert estimates.std() < 0.2 * exact


def test_random_vectors_come_from_the_seed_or_the_random_state():
    model, x = network(), inputs()
    torch.manual_seed(1)
    first, second = (fisher_penalty(model, x, "trace", num_products=1).item() for _ in range(2))
    assert first != second
    torch.manual_seed(1)
    assert fisher_penalty(model, x, "trace", num_products=1).item() == first
    seeded = [fisher_penalty(model, x, "trace", num_products=1, seed=3).item() for _ in range(2)]
    assert seeded[0] == seeded[1]


def test_confident_samples_have_a_gradient():
    model, x = nn.Linear(2, 3), torch.tensor([[20.0, 0.0]])
    model.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.5]])
    model.bias.data.zero_()
    expected = fisher_spectral_norm(model.double(), x.double())
    model, penalty = model.float(), fisher_penalty(model.float(), x, num_products=3)
    penalty.backward()
    assert penalty.item() == pytest.approx(expected.item(), rel=1e-3)
    assert model.weight.grad.isfinite().all()
    assert model.weight.grad.any()


@pytest.mark.parametrize("num_products", [None, 1])
@pytest.mark.parametrize("kind", ["spectral", "trace"])
def test_probabilities_that_underflow_have_no_information(kind, num_products):
    model, x = nn.Linear(2, 2), torch.tensor([[1e4, 0.0], [0.0, 0.0]])
    model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
    penalty = fisher_penalty(model, x[:1], kind, num_products=num_products)
    penalty.backward()
    assert penalty.item() == 0.0
    assert not model.weight.grad.any()  # zero, and not NaN
    if kind == "spectral":  # at equal probabilities the eigenvalue is |w_0 - w_1|^2 / 4, of which this is the mean
        assert fisher_penalty(model, x, kind, num_products=num_products).item() == pytest.approx(0.25)


@pytest.mark.parametrize("num_products", [None, 3])
def test_half_precision_models(num_products):
    model, x = network(), inputs()
    expected = fisher_penalty(model, x, num_products=num_products).item()
    penalty = fisher_penalty(model.bfloat16(), x.bfloat16(), num_products=num_products)
    assert penalty.dtype == torch.float32
    assert penalty.item() == pytest.approx(expected, rel=0.05)


def test_values_are_in_unnormalised_units():
    model, x = network(), torch.rand(4, 5, dtype=torch.float64)
    space = InputSpace(mean=0.25, std=0.5)
    expected = 4 * fisher_penalty(model, space.normalize(x))
    for number in (None, 100):
        torch.testing.assert_close(
            fisher_penalty(model, space.normalize(x), input_space=space, num_products=number), expected
        )


# What both penalties have in common

PENALTIES = {
    **{kind: partial(fisher_penalty, kind=kind) for kind in ("spectral", "trace")},
    **{
        f"{kind} by products": partial(fisher_penalty, kind=kind, num_products=2, seed=0)
        for kind in ("spectral", "trace")
    },
    "boundary": lambda model, x: losses.boundary_penalty(
        model, x, torch.arange(len(x)) % 3, margin=10.0, input_space=UNBOUNDED
    ),
}


@pytest.mark.parametrize("penalty", ["spectral", "trace", "boundary"])
def test_weights_before_a_normalisation_have_no_scale(penalty):
    """As in training itself: otherwise they would shrink, and running statistics never catch up."""
    model = normalised_network()
    PENALTIES[penalty](model, inputs(8)).backward()
    weight = model[0].weight
    assert weight.grad.norm() > 1e-3
    assert (weight * weight.grad).sum().abs() < 1e-3 * weight.norm() * weight.grad.norm()


@pytest.mark.parametrize("penalty", PENALTIES)
def test_only_gradients_are_left(penalty):
    model, x = trained_once(), torch.randn(6, 4)
    before = snapshot(model)
    with torch.autocast("cpu", torch.bfloat16):
        value = PENALTIES[penalty](model, x)
    assert_same(before, snapshot(model))
    assert value.dtype == torch.float32
    model.zero_grad()
    value.backward()
    assert model.body[0].weight.grad.any()
    assert model.head.bias.grad is None  # frozen
    assert_same({k: v for k, v in before.items() if k != "gradients"}, snapshot(model))
