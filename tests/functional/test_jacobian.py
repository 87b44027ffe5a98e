import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_robustness import InputSpace
from lightning_robustness.functional._jacobian import InputJacobian, check_samples_are_independent
from tests.functional import dense
from tests.functional.models import MODELS, UNBOUNDED, square


@pytest.mark.parametrize("name", MODELS)
def test_products_equal_the_dense_jacobian(name):
    model, shape = MODELS[name]()
    model, x = model.double().eval(), torch.randn(3, *shape, dtype=torch.float64)
    space = InputSpace(low=None, high=None, std=[0.5 + c for c in range(shape[0])])
    expected = dense.jacobian(model, x) / space.scale(x).expand_as(x).flatten(1).unsqueeze(1)
    jacobian = InputJacobian(model, x, space, twice=True)
    u = torch.randn(3, 5, dtype=torch.float64)
    torch.testing.assert_close(jacobian.logits, model(x))
    torch.testing.assert_close(jacobian.rows(), expected)
    torch.testing.assert_close(jacobian.transposed_product(u), (expected.mT @ u.unsqueeze(2)).squeeze(2))
    for _ in range(2):
        torch.testing.assert_close(jacobian.gram_product(u), (expected @ expected.mT @ u.unsqueeze(2)).squeeze(2))


def test_half_precision_holds_tiny_weights():
    model = nn.Linear(4, 3).to(torch.bfloat16)
    jacobian = InputJacobian(model, torch.randn(2, 4, dtype=torch.bfloat16), UNBOUNDED)
    u = torch.tensor([[1e-30, 0.0, -1e-30], [0.0, 0.0, 0.0]])
    expected = u @ model.weight.float()
    torch.testing.assert_close(jacobian.transposed_product(u), expected, rtol=1e-2, atol=1e-33)
    assert jacobian.logits.dtype == torch.float32


@pytest.mark.parametrize("skips", [False, True])
def test_a_model_that_can_be_differentiated_only_once(skips):
    model, skip = square(twice=False, in_forward_mode=False), nn.Linear(6, 5)
    # With a second branch, forward mode alone would return the product of that one
    function = (lambda x: model(x) + skip(x)) if skips else model
    jacobian = InputJacobian(function, torch.randn(2, 6), UNBOUNDED, twice=True)
    with pytest.raises(RuntimeError, match=r"'exact'.* or .*'rayleigh'"):
        jacobian.gram_product(torch.randn(2, 5))


def test_a_model_without_a_graph():
    with pytest.raises(ValueError, match="method='blackbox'"):
        InputJacobian(lambda x: x.detach(), torch.randn(2, 6), UNBOUNDED)


def test_logits_that_are_not_finite_in_training():
    x = torch.tensor([[1.0, 1.0], [-1.0, 1.0]])
    jacobian = InputJacobian(lambda x: x.log(), x, UNBOUNDED, create_graph=True)  # the loss becomes NaN, as any other
    assert jacobian.logits.isnan().any()


def test_rows_are_computed_once():
    calls = []

    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            calls.append(gradient)
            return gradient

    model = nn.Linear(4, 3)
    jacobian = InputJacobian(lambda x: model(Counting.apply(x)), torch.randn(2, 4), UNBOUNDED)
    first, second = jacobian.rows(), jacobian.rows()
    assert torch.equal(first, model.weight.detach().expand(2, 3, 4))
    assert first is second
    assert len(calls) == 3


@pytest.mark.parametrize("name", ["convolution", "attention"])
def test_graphs_of_rows_and_products(name):
    """Their derivatives with respect to the weights are those of the dense Jacobian."""
    model, shape = MODELS[name]()
    model, x, u = model.double().eval(), torch.randn(2, *shape).double(), torch.randn(2, 5).double()
    weights = list(model.parameters())

    def gradients(value):
        return torch.autograd.grad(value, weights, allow_unused=True, retain_graph=True, materialize_grads=True)

    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels cannot be differentiated twice
        expected = dense.jacobian(model, x, create_graph=True)
    jacobian = InputJacobian(model, x, UNBOUNDED, create_graph=True)
    torch.testing.assert_close(gradients(jacobian.rows().square().sum()), gradients(expected.square().sum()))
    product = jacobian.transposed_product(u)
    torch.testing.assert_close(
        gradients(product.square().sum()), gradients((expected.mT @ u.unsqueeze(2)).square().sum())
    )
    torch.testing.assert_close(jacobian.gram_product(u), (expected @ expected.mT @ u.unsqueeze(2)).squeeze(2).detach())
    assert not jacobian.gram_product(u).requires_grad
    assert not InputJacobian(model, x, UNBOUNDED).rows().requires_grad


def test_samples_that_are_not_mixed():
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)).eval()
    check_samples_are_independent(network, torch.randn(1, 4))
    check_samples_are_independent(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval(), torch.randn(5, 4))
    check_samples_are_independent(lambda x: x.detach(), torch.randn(5, 4))
