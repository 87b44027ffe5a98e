import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_robustness import InputSpace, functional
from tests.functional import dense
from tests.functional.models import MODELS, UNBOUNDED, square

fisher_spectral_norm = partial(functional.fisher_spectral_norm, input_space=UNBOUNDED)
METHODS = ["auto", "exact", "lanczos", "power", "rayleigh", "blackbox"]
PRECISE = ["auto", "exact", "lanczos", "power"]


def linear(num_classes, width, scale=1.0):
    model = nn.Linear(width, num_classes).double()
    model.weight.data *= scale * width**0.5
    return model


@pytest.mark.gpu_like
@pytest.mark.parametrize("method", PRECISE)
@pytest.mark.parametrize("num_classes", [2, 3, 10, 40])
def test_linear_softmax_model_has_a_closed_form(method, num_classes):
    model, x = linear(num_classes, 30), torch.randn(9, 30, dtype=torch.float64)
    p, weight = model(x).softmax(1), model.weight
    expected = torch.stack([torch.linalg.eigvalsh(weight.T @ (q.diag() - q.outer(q)) @ weight)[-1] for q in p])
    result = fisher_spectral_norm(model, x, method, max_steps=1000)
    torch.testing.assert_close(result, expected.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_networks_agree_with_the_dense_matrix(name, dtype):
    model, shape = MODELS[name]()
    model, x = model.to(dtype), torch.randn(5, *shape, dtype=dtype)
    expected = dense.largest_eigenvalue(model.eval(), x)
    for method in ("exact", "lanczos"):
        result = fisher_spectral_norm(model.train(), x, method)
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_narrow_network_of_many_classes_agrees_with_the_dense_matrix(dtype):
    """Lanczos vectors then end up in the null space of the Jacobian, where all products are rounding errors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 300)).to(dtype)
    x = torch.rand(16, 64, dtype=dtype)
    result = fisher_spectral_norm(model, x, "lanczos")
    torch.testing.assert_close(result.double(), dense.largest_eigenvalue(model, x), rtol=1e-5, atol=0)


@given(seed=st.integers(0, 1000))
def test_divergence_is_quadratic_to_second_order(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, d = torch.randn(1, 5).double(), torch.randn(5).double()
    G = dense.information(model, x)[0]  # noqa: N806
    assert fisher_spectral_norm(model, x).item() == pytest.approx(torch.linalg.eigvalsh(G)[-1].item(), rel=1e-9)
    log_p = model(x).log_softmax(1)
    errors = []
    for size in (1e-2, 1e-3):
        moved = model(x + size * d).log_softmax(1)
        divergence = (log_p.exp() * (log_p - moved)).sum()
        errors.append(abs(divergence.item() - size**2 * (d @ G @ d).item() / 2))
    assert errors[1] <= 1e-2 * errors[0] + 1e-15  # third order: a tenth of the step, a thousandth of the error


@pytest.mark.gpu_like
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


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)])
def test_half_precision_cannot_hold_the_steps_of_differences(dtypes):
    of_model, of_inputs = dtypes
    model = nn.Linear(6, 4).to(of_model)
    with pytest.raises(ValueError, match=r"float32 for method='blackbox'.*`float\(\)`"):
        fisher_spectral_norm(lambda x: model(x.to(of_model)), torch.rand(5, 6).to(of_inputs), "blackbox")
    assert fisher_spectral_norm(model.float(), torch.rand(5, 6), "blackbox").all()


def test_memory_is_bounded_by_chunks():
    sizes, weight = [], torch.ones(2**18, 16)

    def model(x):
        sizes.append(len(x))
        return x @ weight

    fisher_spectral_norm(model, torch.zeros(12, 2**18), "exact")
    assert sizes[2:] == [8, 4]  # 8 Jacobians have 2^25 entries


def test_auto_depends_on_the_number_of_classes():
    for num_classes, is_exact in ((12, True), (13, False)):
        parts = fisher_spectral_norm(linear(num_classes, 4), torch.randn(2, 4).double(), return_components=True)
        assert (parts.residual is None) == is_exact


def test_models_that_do_not_fit():
    assert fisher_spectral_norm(lambda x: x.detach(), torch.randn(4, 3), "blackbox").shape == (4,)
    with pytest.raises(RuntimeError, match="neither twice nor in forward mode"):
        fisher_spectral_norm(square(twice=False, in_forward_mode=False), torch.randn(4, 6), "lanczos")


@pytest.mark.gpu_like
@pytest.mark.parametrize("method", PRECISE)
@pytest.mark.parametrize("num_classes", [3, 20])
def test_direction_is_the_principal_eigenvector_and_lowers_the_prediction(method, num_classes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, num_classes)).double()
    x = torch.randn(6, 3, 4, dtype=torch.float64)
    found = fisher_spectral_norm(model, x, method, max_steps=2000, tolerance=1e-12, return_direction=True)
    for sample, direction, matrix in zip(x, found.direction, dense.information(model, x), strict=True):
        expected = np.linalg.eigh(matrix.numpy())[1][:, -1]
        assert abs(expected @ direction.flatten().numpy()) == pytest.approx(1, abs=1e-5)
        p, moved = (model(t[None])[0].softmax(0) for t in (sample, sample + 1e-4 * direction))
        assert moved[p.argmax()] < p.max()


@pytest.mark.parametrize("method", ["rayleigh", "blackbox"])
def test_direction_of_a_lower_bound_attains_it(method):
    torch.manual_seed(0)
    model, x = linear(4, 6), torch.randn(5, 6, dtype=torch.float64)
    found = fisher_spectral_norm(model, x, method, num_directions=4, return_direction=True)
    attained = torch.einsum("ni,nij,nj->n", found.direction, dense.information(model, x), found.direction)
    assert (attained >= found.spectral_norm * (1 - 1e-5)).all()
    torch.testing.assert_close(found.direction.norm(dim=1), torch.ones(5, dtype=torch.float64))


def test_direction_of_saturated_and_normalised_inputs():
    model, space = nn.Linear(2, 2, bias=False), InputSpace(None, None, std=(0.5, 0.25))
    model.weight.data = torch.tensor([[3.0, 2.0], [0.0, 0.0]])
    x = torch.tensor([[0.1, 0.0], [20.0, 0.0]]).reshape(2, 2, 1, 1)
    found = functional.fisher_spectral_norm(
        lambda t: model(t.flatten(1)), x, input_space=space, return_direction=True
    ).direction
    torch.testing.assert_close(found.flatten(1), torch.tensor([[-0.6, -0.8]] * 2))  # weight / std, downhill
