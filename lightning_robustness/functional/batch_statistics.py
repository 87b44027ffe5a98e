"""BatchNorm in train mode without coupling between samples."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_robustness.utilities.sandbox import find_modules


def find_training_layers(model: Callable[..., Any]) -> list[_BatchNorm]:
    """Find the BatchNorm layers of a model that are in train mode, which normalise by the statistics of the batch."""
    modules = dict.fromkeys(module for root in find_modules(model) for module in root.modules())
    return [module for module in modules if isinstance(module, _BatchNorm) and module.training]


@contextmanager
def held_batch_statistics(layers: list[_BatchNorm], run: Callable[[], Any]) -> Iterator[None]:
    """Normalise the next pass of BatchNorm layers by the statistics of a first one, which is run here.

    Derivatives with respect to the weights go through the statistics. Derivatives with respect to the inputs of the
    next pass do not, so each sample has its own.

    Args:
        layers: The layers, in eval mode.
        run: Callable that runs the network on the batch. In the block, the network may be run once.

    """
    statistics: list[tuple[Tensor, Tensor]] = []
    is_recording = True

    def normalize(layer: _BatchNorm, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x = args[0]
        if is_recording:
            statistics.append(torch.var_mean(x, dim=[0, *range(2, x.ndim)], correction=0))
            variance, mean = statistics[-1]
        else:
            variance, mean = statistics.pop(0)  # layers run in the same order, some perhaps twice
        scale = torch.rsqrt(variance + layer.eps)
        scale = scale if layer.weight is None else scale * layer.weight
        shift = -mean * scale if layer.bias is None else layer.bias - mean * scale
        shape = (1, -1, *[1] * (x.ndim - 2))
        return x * scale.reshape(shape) + shift.reshape(shape)

    hooks = [layer.register_forward_hook(normalize) for layer in layers]
    try:
        if layers:
            run()
        is_recording = False
        yield
    finally:
        for hook in hooks:
            hook.remove()
