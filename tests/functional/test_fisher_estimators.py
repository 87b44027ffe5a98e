import warnings
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_robustness import functional
from lightning_robustness.functional._fisher_estimators import (
    FisherOperator,
    FisherSettings,
    exact,
    lanczos,
    power,
    rayleigh,
)
from lightning_robustness.functional._jacobian import InputJacobian
from tests.functional import dense
from tests.functional.models import MODELS, UNBOUNDED
from tests.networks import train_network

fisher_spectral_norm = partial(functional.fisher_spectral_norm, input_space=UNBOUNDED)


def test_one_forward_pass_serves_several_estimators():
    model, shape = MODELS["convolution"]()
    model, x, calls = model.double().eval(), torch.randn(4, *shape).double(), []
    jacobian = InputJacobian(lambda x: (calls.append(1), model(x))[1], x, UNBOUNDED, twice=True)
    expected = dense.largest_eigenvalue(model, x)
    settings = FisherSettings(tolerance=1e-12, max_steps=1000)
    for result in (method(jacobian, settings) for method in (exact, power, lanczos)):
        torch.testing.assert_close(result.spectral_norm, expected, rtol=1e-9, atol=0)
    assert len(calls) == 1


@pytest.mark.parametrize("distribution", ["gaussian", "rademacher"])
def test_largest_rayleigh_quotient(distribution):
    model, x = nn.Linear(6, 4).double(), torch.randn(3, 6).double()
    directions = torch.randn(7, 4, generator=torch.Generator().manual_seed(5)).double()
    directions = directions if distribution == "gaussian" else directions.sign()
    expected = []
    for p in model(x).softmax(dim=1).detach():
        rows = p.sqrt().unsqueeze(1) * (model.weight - p @ model.weight).detach()  # sqrt(p_k) grad log p_k
        expected.append(max((w @ rows @ rows.T @ w / (w @ w)).item() for w in directions))
    settings = FisherSettings(num_directions=7, distribution=distribution, seed=5)
    result = rayleigh(InputJacobian(model, x, UNBOUNDED), settings)
    assert result.spectral_norm.tolist() == pytest.approx(expected)
    assert result.products.tolist() == [7] * 3


def test_components_of_the_exact_method():
    model, shape = MODELS["convolution"]()
    model, x = model.double().eval(), torch.randn(4, *shape, dtype=torch.float64)
    parts = fisher_spectral_norm(model, x, "exact", return_components=True)
    G = dense.information(model, x)  # noqa: N806
    torch.testing.assert_close(parts.trace, G.diagonal(dim1=1, dim2=2).sum(1))
    torch.testing.assert_close(parts.jacobian_norm, torch.linalg.matrix_norm(dense.jacobian(model, x), ord=2))
    of_p = dense.jacobian(lambda t: model(t).softmax(dim=1), x)
    torch.testing.assert_close(parts.lipschitz, of_p.norm(dim=2).amax(1))
    assert parts.products.tolist() == [5] * 4
    assert parts.residual is None


@given(seed=st.integers(0, 1000), num_classes=st.integers(2, 8))
def test_bounds_of_the_jacobian(seed, num_classes):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, num_classes)).double()
    x = 3 * torch.randn(4, 6).double()
    parts = fisher_spectral_norm(model, x, "exact", return_components=True)
    p = model(x).softmax(1).detach()
    squared = parts.jacobian_norm.square()
    assert (parts.spectral_norm <= (2 * p * (1 - p)).amax(1) * squared * (1 + 1e-9)).all()
    assert (parts.spectral_norm <= squared / 2 * (1 + 1e-9)).all()
    assert (parts.spectral_norm <= parts.trace * (1 + 1e-9)).all()


def distance_to_eigenvalues(result, spectrum):
    return (result.spectral_norm.unsqueeze(1) - spectrum).abs().amin(dim=1)


@pytest.mark.parametrize("num_classes", [10, 100])
def test_lanczos_on_trained_networks(digits, num_classes):
    images, labels = digits
    if num_classes == 100:  # which of the first hundred images is the closest
        labels = torch.cdist(images.flatten(1), images[:100].flatten(1)).argmin(dim=1)
    network, x = train_network(images[:1200], labels[:1200], epochs=30), images[1200:1500]
    exact = fisher_spectral_norm(network, x, "exact")
    lanczos = fisher_spectral_norm(network, x, "lanczos", return_components=True)
    error = (lanczos.spectral_norm - exact).abs()
    assert (error <= lanczos.residual + 1e-6 * exact).all()
    assert (error <= 1e-5 * exact).all()
    # Few steps from a start that holds little of the largest eigenvector may end at a smaller eigenvalue
    rows = torch.func.vmap(torch.func.jacrev(lambda image: network(image.unsqueeze(0)).squeeze(0)))(x).flatten(2)
    spectrum = torch.linalg.eigvalsh(dense.information_of(rows, network(x)))
    six = fisher_spectral_norm(network, x, "lanczos", max_steps=3, return_components=True)
    error = (six.spectral_norm - exact).abs()
    assert six.products.max() == 6
    assert (distance_to_eigenvalues(six, spectrum) <= six.residual + 1e-5 * exact).all()
    assert (error / exact).mean() < 1e-3
    assert (error / exact).quantile(0.98) < 1e-3
    rough = fisher_spectral_norm(network, x, "lanczos", tolerance=1e-3, return_components=True)
    assert (distance_to_eigenvalues(rough, spectrum) <= 1e-3 * rough.spectral_norm).all()
    assert ((rough.spectral_norm - exact).abs() / exact).quantile(0.99) < 1e-3
    assert rough.products.float().mean() < lanczos.products.float().mean() < 10


@pytest.mark.parametrize("seed", range(5))
def test_lanczos_is_not_led_astray_by_rounding(seed):
    torch.manual_seed(seed)
    # Nearly all of the information is in one direction: the second step finds little more than rounding errors
    layers = [nn.Linear(30, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 1), nn.Linear(1, 200)]
    network, x = nn.Sequential(*layers), torch.randn(20, 30)
    network[-1].weight.data *= 20
    exact = fisher_spectral_norm(network.double(), x.double(), "exact")
    for tolerance in (1e-3, 1e-6, 1e-9, 0.0):
        lanczos = fisher_spectral_norm(network.float(), x, "lanczos", tolerance=tolerance, return_components=True)
        torch.testing.assert_close(lanczos.spectral_norm.double(), exact, rtol=1e-4, atol=0)
        assert (lanczos.residual <= 1e-3 * lanczos.spectral_norm).all()


@pytest.mark.parametrize("method", ["rayleigh", "blackbox"])
@pytest.mark.parametrize("name", ["convolution", "attention"])
def test_lower_bounds(method, name):
    model, shape = MODELS[name]()
    model, x = model.double().eval(), torch.randn(8, *shape, dtype=torch.float64)
    exact = dense.largest_eigenvalue(model, x)
    for options in ({"distribution": "rademacher"}, {"rayleigh_ritz": False}, {"num_directions": 3}, {}):
        result = fisher_spectral_norm(model, x, method, **options)
        assert (result <= exact * (1 + 1e-4)).all()
        assert (result > 0.01 * exact).all()


@given(seed=st.integers(0, 1000), num_directions=st.integers(1, 12))
def test_rayleigh_ritz_is_never_below_the_largest_direction(seed, num_directions):
    torch.manual_seed(seed)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double(), torch.randn(3, 6).double()
    best, span = (
        fisher_spectral_norm(model, x, "blackbox", rayleigh_ritz=ritz, num_directions=num_directions, seed=seed)
        for ritz in (False, True)
    )
    assert (span >= best).all()
    assert (span <= dense.largest_eigenvalue(model, x) * (1 + 1e-4)).all()


def test_power_iteration_that_reaches_its_last_step_says_so():
    """At zero, p is uniform and G has the eigenvalues 1/4, 0.989/4 and 1/16; far out, G is zero."""
    axes = torch.tensor([[1.0, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]) / 2
    model = nn.Linear(3, 4, bias=False)
    model.weight.data = axes * torch.tensor([1.0, 0.989**0.5, 0.5])
    x = torch.tensor([[0.0, 0.0, 0.0], [900.0, 0.0, 900.0]])
    with pytest.warns(UserWarning, match=r"1 of 2 samples.*`max_steps`.*lanczos"):
        found = fisher_spectral_norm(model, x, "power", return_components=True)
    assert found.converged.tolist() == [False, True]
    assert 0.2490 < found.spectral_norm[0] < 0.2499
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fisher_spectral_norm(model, x, "power", max_steps=2000, return_components=True)
        assert fisher_spectral_norm(model, x, "lanczos").tolist() == pytest.approx([0.25, 0.0])
    assert found.converged.tolist() == [True, True]
    assert found.spectral_norm[0] == pytest.approx(0.25, rel=1e-5)


def factor(model, x):
    """The matrix L J with the rows sqrt(p_k) grad log p_k, shape ``(N, K, n)``."""
    p = model(x).detach().softmax(dim=1).unsqueeze(2)
    return p.sqrt() * dense.jacobian(lambda t: model(t).log_softmax(dim=1), x)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", ["convolution", "attention"])
def test_products_equal_the_dense_matrix(name, create_graph):
    model, shape = MODELS[name]()
    model, x = model.double().eval(), torch.randn(3, *shape).double()
    operator = FisherOperator(InputJacobian(model, x, UNBOUNDED, create_graph=create_graph, twice=True))
    Q, c = factor(model, x), torch.randn(3, 5, 1).double()  # noqa: N806
    torch.testing.assert_close(operator.gram().detach(), Q @ Q.mT)
    torch.testing.assert_close(operator.transposed_product(c.squeeze(2)).detach(), (Q.mT @ c).squeeze(2))
    torch.testing.assert_close(operator.gram_product(c.squeeze(2)), (Q @ Q.mT @ c).squeeze(2))
    assert operator.gram().requires_grad == operator.transposed_product(c.squeeze(2)).requires_grad == create_graph
    assert not operator.gram_product(c.squeeze(2)).requires_grad


@pytest.mark.parametrize("margin", [0.0, 5.0, 50.0])
def test_start_is_the_gradient_of_the_predicted_class(margin):
    model = nn.Linear(6, 4).double()
    model.bias.data[2] = margin
    x = torch.randn(3, 6).double()
    operator = FisherOperator(InputJacobian(model, x, UNBOUNDED))
    c = operator.start()
    torch.testing.assert_close(c.norm(dim=1), torch.ones(3).double())
    # The gradient of log p of class c is the sum of p_k (W_c - W_k) over the other classes, which does not cancel
    p, preds = model(x).softmax(dim=1).detach(), model(x).argmax(dim=1)
    weight = model.weight.detach()
    gradient = (p.unsqueeze(2) * (weight[preds].unsqueeze(1) - weight)).sum(dim=1)
    directions = (nn.functional.normalize(v, eps=1e-300) for v in (operator.transposed_product(c), gradient))
    torch.testing.assert_close(*directions)


def test_probabilities_that_underflow():
    operator = FisherOperator(InputJacobian(lambda x: x, torch.tensor([[1e4, 0.0]]), UNBOUNDED, twice=True))
    for value in (operator.gram(), operator.start(), operator.gram_product(torch.ones(1, 2).double())):
        assert not value.any()
