import copy
from functools import partial

import pytest
import torch
from torch import nn

from lightning_robustness import functional, losses
from lightning_robustness.losses.penalties import find_training_layers, held_batch_statistics
from tests._isolation.test_sandbox import assert_same, snapshot, trained_once
from tests.functional import dense
from tests.functional.models import MODELS, UNBOUNDED

fisher_penalty = partial(losses.fisher_penalty, input_space=UNBOUNDED)
boundary_penalty = partial(losses.boundary_penalty, input_space=UNBOUNDED)
boundary_distance = partial(functional.boundary_distance, input_space=UNBOUNDED)
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
    matrix = dense.information(model, x)
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


# What both penalties have in common

PENALTIES = {
    **{kind: partial(fisher_penalty, kind=kind) for kind in ("spectral", "trace")},
    **{
        f"{kind} by products": partial(fisher_penalty, kind=kind, num_products=2, seed=0)
        for kind in ("spectral", "trace")
    },
    "boundary": lambda model, x: boundary_penalty(model, x, torch.arange(len(x)) % 3, margin=10.0),
    "boundary in l2": lambda model, x: boundary_penalty(
        model, x, torch.arange(len(x)) % 3, margin=1.0, norm="l2", num_rivals=2
    ),
}


@pytest.mark.parametrize("make", [network, normalised_network])
@pytest.mark.parametrize("penalty", ["spectral", "trace", "boundary", "boundary in l2"])
def test_gradients_by_differences(penalty, make):
    model, x, step = make(), inputs(8), 1e-6
    PENALTIES[penalty](model, x).backward()
    for weight in model.parameters():
        direction, values = torch.randn_like(weight), []
        for sign in (1, -1):
            weight.data += sign * step * direction
            values.append(PENALTIES[penalty](model, x).item())
            weight.data -= sign * step * direction
        expected = (values[0] - values[1]) / (2 * step)
        assert (weight.grad * direction).sum().item() == pytest.approx(expected, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("penalty", ["spectral", "trace", "boundary"])
def test_weights_before_a_normalisation_have_no_scale(penalty):
    """As in training itself: otherwise they would shrink, and running statistics never catch up."""
    model = normalised_network()
    PENALTIES[penalty](model, inputs(8)).backward()
    weight = model[0].weight
    assert weight.grad.norm() > 1e-3
    assert (weight * weight.grad).sum().abs() < 1e-3 * weight.norm() * weight.grad.norm()


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_batch_of_one_has_no_statistics(penalty):
    model, x = normalised_network(), inputs(2)
    with pytest.raises(ValueError, match=r"two values per channel .*\(1, 6\).*more samples"):
        PENALTIES[penalty](model, x[:1])
    PENALTIES[penalty](model, x)
    PENALTIES[penalty](model.eval(), x[:1])
    images = nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    PENALTIES[penalty](images, torch.rand(1, 1, 3, 3))  # each position counts


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


# BatchNorm in train mode

LAYERS = {
    "1d": (nn.BatchNorm1d(3), (6, 3)),
    "signals": (nn.BatchNorm1d(3), (6, 3, 5)),
    "images": (nn.BatchNorm2d(3), (6, 3, 4, 4)),
    "volumes": (nn.BatchNorm3d(3), (6, 3, 2, 2, 2)),
    "without weights": (nn.BatchNorm2d(3, affine=False), (6, 3, 4, 4)),
    "large eps": (nn.BatchNorm2d(3, eps=0.5), (6, 3, 4, 4)),
}


def changed(layer):
    layer = copy.deepcopy(layer)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


@pytest.mark.parametrize(("layer", "shape"), LAYERS.values(), ids=LAYERS.keys())
def test_output_of_train_mode(layer, shape):
    layer, x = changed(layer), 2 * torch.randn(shape) + 3
    expected = layer.train()(x)
    layer.eval()
    with held_batch_statistics([layer], lambda: layer(x)):
        torch.testing.assert_close(layer(x), expected)
    assert not torch.allclose(layer(x), expected)  # the hook is gone


def test_samples_are_by_themselves():
    layer, x = changed(nn.BatchNorm1d(3)).eval(), torch.randn(6, 3)
    moved = torch.cat([x[:1] + 1, x[1:]])
    with held_batch_statistics([layer], lambda: layer(x)):
        y = layer(moved)
    with held_batch_statistics([layer], lambda: layer(x)):
        expected = layer(x)
    torch.testing.assert_close(y[1:], expected[1:])
    assert not torch.allclose(y[0], expected[0])


def test_a_layer_that_is_used_twice():
    layer, x = changed(nn.BatchNorm1d(3)), torch.randn(6, 3)

    def network(x):
        return layer(layer(x).square())

    expected = network(x)
    layer.eval()
    with held_batch_statistics([layer], lambda: network(x)):
        torch.testing.assert_close(network(x), expected)


def test_hooks_go_after_an_exception():
    layer = nn.BatchNorm1d(3).eval()
    with pytest.raises(ZeroDivisionError), held_batch_statistics([layer], lambda: layer(torch.randn(6, 3))):
        raise ZeroDivisionError
    assert not layer._forward_hooks


def test_layers_in_train_mode_are_found():
    network = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.BatchNorm2d(3).eval(), nn.Sequential(nn.BatchNorm3d(3)))
    assert find_training_layers(network) == [network[0], network[3][0]]
    assert find_training_layers(lambda x: network(x)) == [network[0], network[3][0]]
    assert find_training_layers(network.eval()) == []


def test_nothing_runs_without_layers():
    with held_batch_statistics([], lambda: 1 / 0):
        pass
