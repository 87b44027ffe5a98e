"""Small models that can be differentiated in different ways."""

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from lightning_robustness import InputSpace

UNBOUNDED = InputSpace(low=None, high=None)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(3, 8), nn.Linear(8, 5)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x)).mean(dim=1))


def square(*, twice, in_forward_mode):
    """Make a network with an element-wise square that can be differentiated once, and in the named ways."""

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


class Function(nn.Module):
    """A module from a function of its layers and the input."""

    def __init__(self, function, *layers):
        super().__init__()
        self.function = function
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        return self.function(self.layers, x)


def dense_block(layers, x):
    for layer in layers:
        x = torch.cat([x, nn.functional.relu(layer(x))], dim=1)
    return x
