import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from lightning_robustness import InputSpace
from lightning_robustness.functional.jacobian import Jacobian, check_samples_are_independent

NO_SPACE = InputSpace(low=None, high=None)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(3, 8), nn.Linear(8, 5)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x)).mean(dim=1))


def square(*, twice, in_forward_mode):
    """Network with an element-wise square that can be differentiated once, and in the named ways."""

    def backward_rule(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.save_for_forward(x)
            return torch.from_numpy(x.detach().numpy() ** 2)

        backward = staticmethod(backward_rule if twice else once_differentiable(backward_rule))
        if in_forward_mode:

            @staticmethod
            def jvp(ctx, tangent):
                return 2 * ctx.saved_tensors[0] * tangent

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, x):
            return self.head(Square.apply(self.first(x)))

    return Module()


MODELS = {
    "convolution": lambda: (
        nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.GELU(), nn.Linear(16, 5)
        ),
        (2, 6, 6),
    ),
    "attention": lambda: (Attention(), (4, 3)),
    "not in forward mode": lambda: (square(twice=True, in_forward_mode=False), (6,)),
    "not twice": lambda: (square(twice=False, in_forward_mode=True), (6,)),
}


@pytest.mark.parametrize("name", MODELS)
def test_products_equal_the_dense_jacobian(name):
    model, shape = MODELS[name]()
    model, x = model.double().eval(), torch.randn(3, *shape, dtype=torch.float64)
    space = InputSpace(low=None, high=None, std=[0.5 + c for c in range(shape[0])])
    dense = torch.stack([torch.autograd.functional.jacobian(lambda t: model(t[None])[0], sample) for sample in x])
    dense = (dense / space.scale(x)).flatten(2)
    jacobian = Jacobian(model, x, space, twice=True)
    u = torch.randn(3, 5, dtype=torch.float64)
    torch.testing.assert_close(jacobian.logits, model(x))
    torch.testing.assert_close(jacobian.rows(), dense)
    torch.testing.assert_close(jacobian.transposed_product(u), (dense.mT @ u.unsqueeze(2)).squeeze(2))
    for _ in range(2):
        torch.testing.assert_close(jacobian.gram_product(u), (dense @ dense.mT @ u.unsqueeze(2)).squeeze(2))


def test_half_precision_holds_tiny_weights():
    model = nn.Linear(4, 3).to(torch.bfloat16)
    jacobian = Jacobian(model, torch.randn(2, 4, dtype=torch.bfloat16), NO_SPACE)
    u = torch.tensor([[1e-30, 0.0, -1e-30], [0.0, 0.0, 0.0]])
    expected = u @ model.weight.float()
    torch.testing.assert_close(jacobian.transposed_product(u), expected, rtol=1e-2, atol=1e-33)
    assert jacobian.logits.dtype == torch.float32


@pytest.mark.parametrize("skips", [False, True])
def test_a_model_that_can_be_differentiated_only_once(skips):
    model, skip = square(twice=False, in_forward_mode=False), nn.Linear(6, 5)
    # With a second branch, forward mode alone would return the product of that one
    function = (lambda x: model(x) + skip(x)) if skips else model
    jacobian = Jacobian(function, torch.randn(2, 6), NO_SPACE, twice=True)
    with pytest.raises(RuntimeError, match=r"neither twice nor in forward mode. Use `method='exact'`"):
        jacobian.gram_product(torch.randn(2, 5))


def test_a_model_without_a_graph():
    with pytest.raises(ValueError, match=r"the model cuts the graph.*method='blackbox'"):
        Jacobian(lambda x: x.detach(), torch.randn(2, 6), NO_SPACE)


def test_logits_that_are_not_finite():
    with pytest.raises(ValueError, match="1 of 2 samples have NaN"):
        Jacobian(lambda x: x.log(), torch.tensor([[1.0, 1.0], [-1.0, 1.0]]), NO_SPACE)


def test_samples_that_are_mixed():
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)).eval()
    with pytest.raises(ValueError, match=r"logits of one depend on another\. Does a BatchNorm use the statistics"):
        check_samples_are_independent(network, torch.randn(5, 4))
    check_samples_are_independent(network, torch.randn(1, 4))
    check_samples_are_independent(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval(), torch.randn(5, 4))
    check_samples_are_independent(lambda x: x.detach(), torch.randn(5, 4))
