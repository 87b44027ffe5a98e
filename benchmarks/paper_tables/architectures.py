"""Scaled-down versions of the papers' networks, for small images; the last layer of each is its head."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

NUM_CLASSES = 10


def _convolution(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, stride, size // 2), nn.ReLU())


def _normalized(inputs: int, outputs: int, stride: int = 1, size: int = 3, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class Residual(nn.Module):
    """A branch and a shortcut, which are added, and an activation."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut, self.activation = branch, shortcut, activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.branch(x) + self.shortcut(x))


class DenseLayer(nn.Module):
    """New channels, computed from all channels before them and put behind them."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.new = nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(), nn.Conv2d(inputs, growth, 3, 1, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.new(x)], dim=1)


class Patches(nn.Module):
    """Embeddings of the patches of an image, with learned positions; shape ``(N, patches, width)``."""

    def __init__(self, channels: int, image_size: int, patch_size: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(channels, width, patch_size, patch_size)
        self.positions = nn.Parameter(0.02 * torch.randn((image_size // patch_size) ** 2, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x).flatten(2).transpose(1, 2) + self.positions


class MeanOfPatches(nn.Module):
    """The mean over the patches."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


def alexnet(channels: int, image_size: int) -> nn.Sequential:
    """Large kernels first, three convolutions, dropout and two linear layers."""
    side = image_size // 4
    return nn.Sequential(
        _convolution(channels, 16, 5, 2),
        _convolution(16, 32),
        nn.MaxPool2d(2),
        _convolution(32, 32),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32 * side**2, 128),
        nn.ReLU(),
        nn.Linear(128, NUM_CLASSES),
    )


def vgg(channels: int, image_size: int) -> nn.Sequential:
    """Pairs of 3x3 convolutions between poolings, and two linear layers."""
    side = image_size // 4
    return nn.Sequential(
        *(_convolution(channels, 8), _convolution(8, 8), nn.MaxPool2d(2)),
        *(_convolution(8, 16), _convolution(16, 16), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * side**2, 64), nn.ReLU(), nn.Linear(64, NUM_CLASSES)),
    )


def resnet(channels: int, image_size: int, blocks: int) -> nn.Sequential:
    """Residual blocks with batch normalisation in two stages, this many in each."""
    layers: list[nn.Module] = [_normalized(channels, 16, 2), nn.ReLU()]
    width = 16
    for outputs, first_stride in ((16, 1), (32, 2)):
        for number in range(blocks):
            stride = first_stride if number == 0 else 1
            branch = nn.Sequential(_normalized(width, outputs, stride), nn.ReLU(), _normalized(outputs, outputs))
            is_same = stride == 1 and width == outputs
            shortcut = nn.Identity() if is_same else _normalized(width, outputs, stride, size=1)
            layers.append(Residual(branch, shortcut, nn.ReLU()))
            width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, NUM_CLASSES))


def densenet(channels: int, image_size: int) -> nn.Sequential:
    """Two blocks of three dense layers with a transition between them."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, 2, 1, bias=False),
        *(DenseLayer(16 + 8 * number, 8) for number in range(3)),
        *(nn.BatchNorm2d(40), nn.ReLU(), nn.Conv2d(40, 24, 1, bias=False), nn.AvgPool2d(2)),
        *(DenseLayer(24 + 8 * number, 8) for number in range(3)),
        *(nn.BatchNorm2d(48), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, NUM_CLASSES)),
    )


def mobilenet(channels: int, image_size: int) -> nn.Sequential:
    """Inverted residuals: expansion, depthwise convolution, projection."""
    layers: list[nn.Module] = [_normalized(channels, 16, 2), nn.ReLU6()]
    width = 16
    for outputs, stride in ((16, 1), (24, 2), (24, 1)):
        hidden = 3 * width
        branch = nn.Sequential(
            *(_normalized(width, hidden, size=1), nn.ReLU6()),
            *(_normalized(hidden, hidden, stride, groups=hidden), nn.ReLU6()),
            _normalized(hidden, outputs, size=1),
        )
        is_same = stride == 1 and width == outputs
        layers.append(Residual(branch, nn.Identity(), nn.Identity()) if is_same else branch)
        width = outputs
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, _normalized(width, 64, size=1), nn.ReLU6(), *pooled, nn.Linear(64, NUM_CLASSES))


def vit(channels: int, image_size: int) -> nn.Sequential:
    """Two layers of self-attention over sixteen patches, whose mean is classified."""
    width = 48
    options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
    layers = [nn.TransformerEncoderLayer(width, 4, 2 * width, **options) for _ in range(2)]
    patches = Patches(channels, image_size, image_size // 4, width)
    return nn.Sequential(patches, *layers, nn.LayerNorm(width), MeanOfPatches(), nn.Linear(width, NUM_CLASSES))


def fully_connected(channels: int, image_size: int, layers: int, width: int) -> nn.Sequential:
    """Hidden layers of one width."""
    modules: list[nn.Module] = [nn.Flatten()]
    inputs = channels * image_size**2
    for _ in range(layers):
        modules += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*modules, nn.Linear(inputs, NUM_CLASSES))


ARCHITECTURES: dict[str, Callable[[int, int], nn.Sequential]] = {
    "alexnet": alexnet,
    "vgg": vgg,
    "resnet": partial(resnet, blocks=1),
    "resnet-deep": partial(resnet, blocks=2),
    "densenet": densenet,
    "mobilenet": mobilenet,
    "vit": vit,
    "fc-2x100": partial(fully_connected, layers=2, width=100),
    "fc-2x500": partial(fully_connected, layers=2, width=500),
    "fc-2x1000": partial(fully_connected, layers=2, width=1000),
    "fc-2x2000": partial(fully_connected, layers=2, width=2000),
    "fc-3x500": partial(fully_connected, layers=3, width=500),
    "fc-4x500": partial(fully_connected, layers=4, width=500),
}
