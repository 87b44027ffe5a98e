import math
from importlib import import_module

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_robustness import InputSpace
from lightning_robustness.functional import fisher_spectral_norm
from tests.functional.test_jacobian import MODELS, square
from tests.networks import train_network
from tests.utilities.test_sandbox import assert_same, snapshot, trained_once

METHODS = ["auto", "exact", "lanczos", "power", "hutchinson", "blackbox"]
PRECISE = ["auto", "exact", "lanczos", "power"]


def information(model, x):
    """G of each sample in float64, from a dense Jacobian."""
    result = []
    for sample in x:
        jacobian = torch.autograd.functional.jacobian(lambda t: model(t[None])[0], sample).flatten(1).double()
        p = model(sample[None])[0].double().softmax(0).detach()
        result.append(jacobian.T @ (torch.diag(p) - torch.outer(p, p)) @ jacobian)
    return torch.stack(result)


def dense(model, x):
    return torch.linalg.eigvalsh(information(model, x))[:, -1]


def linear(num_classes, width, scale=1.0):
    model = nn.Linear(width, num_classes).double()
    model.weight.data *= scale * width**0.5
    return model


@pytest.mark.parametrize("method", PRECISE)
@pytest.mark.parametrize("num_classes", [2, 3, 10, 40])
def test_linear_softmax_model_has_a_closed_form(method, num_classes):
    model, x = linear(num_classes, 30), torch.randn(9, 30, dtype=torch.float64)
    p, weight = model(x).softmax(1), model.weight
    expected = torch.stack([torch.linalg.eigvalsh(weight.T @ (q.diag() - q.outer(q)) @ weight)[-1] for q in p])
    result = fisher_spectral_norm(model, x, method, max_steps=1000)
    torch.testing.assert_close(result, expected.detach(), rtol=1e-6, atol=0)


def test_two_classes_by_hand():
    weight = torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    x = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    sigmoid = 1 / (1 + math.exp(-1))
    for method in (*PRECISE, "blackbox"):
        result = fisher_spectral_norm(lambda x: x @ weight.T, x, method)
        assert result.tolist() == pytest.approx([9 / 4, 9 * sigmoid * (1 - sigmoid)], rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_networks_agree_with_the_dense_matrix(name, dtype):
    model, shape = MODELS[name]()
    model, x = model.to(dtype), torch.randn(5, *shape, dtype=dtype)
    expected = dense(model.eval(), x)
    for method in ("exact", "lanczos"):
        result = fisher_spectral_norm(model.train(), x, method)
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=0)


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
    six = fisher_spectral_norm(network, x, "lanczos", max_steps=3, return_components=True)
    error = (six.spectral_norm - exact).abs()
    assert six.products.max() == 6
    assert (error <= six.residual + 1e-6 * exact).all()
    assert (error / exact).mean() < 1e-3
    assert (error / exact).quantile(0.98) < 1e-3
    rough = fisher_spectral_norm(network, x, "lanczos", tolerance=1e-3, return_components=True)
    assert ((rough.spectral_norm - exact).abs() / exact).max() < 1e-3
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


@pytest.mark.parametrize("method", ["hutchinson", "blackbox"])
@pytest.mark.parametrize("name", ["convolution", "attention"])
def test_lower_bounds(method, name):
    model, shape = MODELS[name]()
    model, x = model.double().eval(), torch.randn(8, *shape, dtype=torch.float64)
    exact = dense(model, x)
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
    assert (span <= dense(model, x) * (1 + 1e-4)).all()


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


@given(seed=st.integers(0, 1000))
def test_divergence_is_quadratic_to_second_order(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, d = torch.randn(1, 5).double(), torch.randn(5).double()
    G = information(model, x)[0]  # noqa: N806
    assert fisher_spectral_norm(model, x).item() == pytest.approx(torch.linalg.eigvalsh(G)[-1].item(), rel=1e-9)
    log_p = model(x).log_softmax(1)
    errors = []
    for size in (1e-2, 1e-3):
        moved = model(x + size * d).log_softmax(1)
        divergence = (log_p.exp() * (log_p - moved)).sum()
        errors.append(abs(divergence.item() - size**2 * (d @ G @ d).item() / 2))
    assert errors[1] <= 1e-2 * errors[0] + 1e-15  # third order: a tenth of the step, a thousandth of the error


def test_components_of_the_exact_method():
    model, shape = MODELS["convolution"]()
    model, x = model.double().eval(), torch.randn(4, *shape, dtype=torch.float64)
    parts = fisher_spectral_norm(model, x, "exact", return_components=True)
    G = information(model, x)  # noqa: N806
    torch.testing.assert_close(parts.trace, G.diagonal(dim1=1, dim2=2).sum(1))
    jacobians = torch.stack([torch.autograd.functional.jacobian(lambda t: model(t[None])[0], s) for s in x]).flatten(2)
    torch.testing.assert_close(parts.jacobian_norm, torch.linalg.matrix_norm(jacobians, ord=2))
    of_p = torch.stack([torch.autograd.functional.jacobian(lambda t: model(t[None])[0].softmax(0), s) for s in x])
    torch.testing.assert_close(parts.lipschitz, of_p.flatten(2).norm(dim=2).amax(1))
    assert parts.products.tolist() == [5] * 4
    assert parts.residual is None


@pytest.mark.parametrize("method", METHODS)
def test_values_are_in_unnormalised_units(method):
    model, pixels = linear(4, 3), torch.rand(6, 3, dtype=torch.float64)
    space = InputSpace(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.5))
    options = {"num_directions": 30, "max_steps": 1000}
    expected = fisher_spectral_norm(lambda x: model(space.normalize(x)), pixels, method, **options)
    result = fisher_spectral_norm(model, space.normalize(pixels), method, input_space=space, **options)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=0)
    assert not torch.allclose(result, fisher_spectral_norm(model, space.normalize(pixels), method), rtol=0.1)


@pytest.mark.parametrize("method", METHODS)
def test_chunks_and_batches_give_the_same(method):
    model, shape = MODELS["convolution"]()
    model, x = model.double().eval(), torch.randn(7, *shape, dtype=torch.float64)
    whole = fisher_spectral_norm(model, x, method)
    torch.testing.assert_close(fisher_spectral_norm(model, x, method, chunk_size=3), whole, rtol=1e-9, atol=0)
    single = torch.cat([fisher_spectral_norm(model, sample, method) for sample in x.split(1)])
    torch.testing.assert_close(single, whole, rtol=1e-9, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_everything_is_as_before(method):
    network, x = trained_once(), torch.randn(6, 4)
    before = snapshot(network)
    reference = fisher_spectral_norm(network, x, method)
    assert_same(before, snapshot(network))
    with torch.no_grad():
        assert torch.equal(fisher_spectral_norm(network, x, method), reference)
    with torch.inference_mode():
        assert torch.equal(fisher_spectral_norm(network, x.clone(), method), reference)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fisher_spectral_norm(network, x, method), reference)
    network.requires_grad_(False).eval()
    assert torch.equal(fisher_spectral_norm(network, x, method), reference)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("margin", [30.0, 200.0])
def test_saturated_samples_stay_finite(method, margin):
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 1.0]])
    x = torch.tensor([[margin, 0.0], [0.0, 0.0]])
    result = fisher_spectral_norm(lambda x: x @ weight.T, x, method)
    expected = 2 * math.exp(-margin)  # p of the second class, times its squared distance to the first
    assert result.isfinite().all()
    assert result[0].item() == pytest.approx(expected, rel=0.5, abs=1e-8 if method == "blackbox" else 1e-40)
    assert result[1] > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", PRECISE)
def test_half_precision_models(dtype, method):
    model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(5, 6)
    expected = fisher_spectral_norm(model, x, method)
    result = fisher_spectral_norm(model.to(dtype), x.to(dtype), method)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected, rtol=0.05, atol=0.01)


def test_memory_is_bounded_by_chunks(monkeypatch):
    monkeypatch.setattr(import_module("lightning_robustness.functional.fisher_spectral_norm"), "_JACOBIAN_NUMBERS", 100)
    sizes = []

    def model(x):
        sizes.append(len(x))
        return x @ torch.ones(5, 4)

    fisher_spectral_norm(model, torch.randn(20, 5), "exact")
    assert set(sizes[2:]) == {5}  # 5 samples, 4 classes, 5 inputs


def test_auto_depends_on_the_number_of_classes():
    for num_classes, is_exact in ((12, True), (13, False)):
        parts = fisher_spectral_norm(linear(num_classes, 4), torch.randn(2, 4).double(), return_components=True)
        assert (parts.residual is None) == is_exact


@pytest.mark.parametrize("method", METHODS)
def test_empty_batch(method):
    assert fisher_spectral_norm(nn.Linear(3, 2), torch.randn(0, 3), method).shape == (0,)


@pytest.mark.parametrize("method", METHODS)
def test_logits_that_are_not_finite(method):
    with pytest.raises(ValueError, match="2 of 3 samples have NaN or infinite ones"):
        fisher_spectral_norm(lambda x: x.sqrt(), torch.tensor([[1.0, 1.0], [-1.0, 1.0], [1.0, -2.0]]), method)


def test_models_that_do_not_fit():
    mixing = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False))
    with pytest.raises(ValueError, match="treats each sample by itself"):
        fisher_spectral_norm(mixing, torch.randn(4, 3))
    with pytest.raises(ValueError, match="the model cuts the graph"):
        fisher_spectral_norm(lambda x: x.detach(), torch.randn(4, 3))
    assert fisher_spectral_norm(lambda x: x.detach(), torch.randn(4, 3), "blackbox").shape == (4,)
    with pytest.raises(RuntimeError, match="neither twice nor in forward mode"):
        fisher_spectral_norm(square(twice=False, in_forward_mode=False), torch.randn(4, 6), "lanczos")
    with pytest.raises(ValueError, match="at least 2 classes but got 1"):
        fisher_spectral_norm(nn.Linear(3, 1), torch.randn(4, 3))


@pytest.mark.parametrize(
    ("x", "options", "error", "match"),
    [
        (
            torch.randn(4, 3),
            {"method": "fast"},
            ValueError,
            r"`method` to be one of \('auto', 'exact', .* but got 'fast'",
        ),
        (torch.randn(4, 3), {"tolerance": -1.0}, ValueError, "`tolerance` to be non-negative but got -1.0"),
        (torch.randn(4, 3), {"max_steps": 0}, ValueError, "`max_steps` to be an integer of at least 1 but got 0"),
        (torch.randn(4, 3), {"chunk_size": 2.5}, ValueError, "`chunk_size` to be an integer of at least 1 but got 2.5"),
        (torch.randn(4, 3), {"distribution": "uniform"}, ValueError, "'gaussian' or 'rademacher' but got 'uniform'"),
        (torch.randn(3), {}, ValueError, r"inputs of shape \(N, ...\) with at least 2 dimensions but got \(3,\)"),
        (torch.ones(4, 3).long(), {}, TypeError, "inputs to be a floating point tensor"),
        (torch.ones(4, 3) * 2, {"input_space": InputSpace()}, ValueError, r"range \[0.0, 1.0\] but observed \[2, 2\]"),
    ],
)
def test_bad_input(x, options, error, match):
    with pytest.raises(error, match=match):
        fisher_spectral_norm(nn.Linear(3, 2), x, **options)
