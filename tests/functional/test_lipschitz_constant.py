from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from lightning_robustness import functional
from tests.functional import dense
from tests.functional.models import UNBOUNDED

lipschitz_constant = partial(functional.lipschitz_constant, input_space=UNBOUNDED)


def network(num_classes=4):
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.GELU(), nn.Flatten(), nn.Linear(12, num_classes)
    ).double()


def reference(model, x):
    """Largest row norm of the dense Jacobian of the probabilities."""
    return dense.jacobian(lambda t: model(t).softmax(dim=1), x).norm(dim=2).amax(dim=1)


@pytest.mark.parametrize("num_classes", [2, 3, 15])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_equals_the_dense_jacobian(num_classes, batch_size):
    model, x = network(num_classes).eval(), torch.randn(batch_size, 2, 4, 4, dtype=torch.double)
    torch.testing.assert_close(lipschitz_constant(model, x), reference(model, x), rtol=1e-10, atol=0)


def test_saturated_samples_keep_their_digits():
    def model(x):
        return torch.cat([60 * x, 0 * x], dim=1)

    value = lipschitz_constant(model, torch.ones(1, 1))
    p = torch.tensor(-60.0, dtype=torch.double).exp() / (1 + torch.tensor(-60.0, dtype=torch.double).exp())
    assert value.item() == pytest.approx((60 * p * (1 - p)).item(), rel=1e-5)
    assert lipschitz_constant(model, 1e4 * torch.ones(1, 1)) == 0


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float16, 5e-3), (torch.bfloat16, 0.1), (torch.float32, 1e-4)])
def test_precision(dtype, rtol):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    model[2].bias.data[0] = 20.0  # gradients of about 1e-9, which half precision cannot hold
    x = torch.randn(4, 6).to(dtype)
    value = lipschitz_constant(model, x)
    assert value.dtype == torch.float32
    expected = reference(model.double(), x.double())
    assert expected.max() < 1e-6
    torch.testing.assert_close(value.double(), expected, rtol=10 * rtol, atol=0)


def test_spectral_norm_equals_the_dense_jacobian():
    model, x = network(5).eval(), torch.randn(4, 2, 4, 4, dtype=torch.double)
    jacobian = dense.jacobian(lambda t: model(t).softmax(dim=1), x)
    expected = [np.linalg.svd(matrix.detach().numpy(), compute_uv=False)[0] for matrix in jacobian]
    result = lipschitz_constant(model, x, norm="spectral")
    np.testing.assert_allclose(result, expected, rtol=1e-9)
    assert (result >= lipschitz_constant(model, x)).all()
