from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_robustness._arguments import check_classes, check_labels, check_not_empty, check_tensor
from lightning_robustness._isolation.references import find_modules
from lightning_robustness._model.access import compute_logits
from lightning_robustness._numbers import at_least_float32
from lightning_robustness.attacks import PGD
from lightning_robustness.attacks.attack import check_budgets
from lightning_robustness.functional._jacobian import InputJacobian, opened
from lightning_robustness.input_space import InputSpace


def log_probabilities(
    model: Callable[..., Any],
    x: Tensor,
    y: Tensor,
    x_adv: Tensor | None,
    attack: PGD,
    input_space: InputSpace | None,
    seed: int | None,
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities of clean and of adversarial inputs, in float32 or wider also under mixed precision.

    Without ``x_adv``, the attack finds adversarial inputs; the other arguments are as for ``trades_loss``.
    """
    highest_label = -1
    check_budgets([attack], input_space, smallest=0.0)
    if x_adv is None:  # the attack checks the others
        seed = int(torch.randint(2**31, ())) if seed is None else seed
        x_adv = attack(model, x, y, input_space=input_space, seed=seed)
    else:
        highest_label = _check(x, y, x_adv)
    check_not_empty("x", x)
    logits, adv_logits = (compute_logits(model, inputs) for inputs in (x, x_adv))
    check_classes("y", None, highest_label, logits.shape[1])
    dtype = at_least_float32(logits.dtype)
    return logits.to(dtype).log_softmax(dim=1), adv_logits.to(dtype).log_softmax(dim=1)


def _check(x: Tensor, y: Tensor, x_adv: Tensor) -> int:
    """Check the arguments given with adversarial inputs from elsewhere, and return the highest label."""
    check_tensor("x", x)
    check_tensor("x_adv", x_adv)
    if x.ndim < 2 or x_adv.shape != x.shape:
        raise ValueError(
            f"Expected `x` of shape (N, ...) and `x_adv` of the same but got {tuple(x.shape)} and "
            f"{tuple(x_adv.shape)}. Pass one adversarial input per sample, or leave `x_adv` out."
        )
    return check_labels("y", y, len(x))


def find_training_layers(model: Callable[..., Any]) -> list[_BatchNorm]:
    """Find the BatchNorm layers of a model that are in train mode, which normalise by the statistics of the batch."""
    modules = dict.fromkeys(module for root in find_modules(model) for module in root.modules())
    return [module for module in modules if isinstance(module, _BatchNorm) and module.training]


@contextmanager
def held_batch_statistics(layers: list[_BatchNorm], run: Callable[[], Any]) -> Iterator[None]:
    """Normalise the next pass of BatchNorm layers by the statistics of a first one, which is run here.

    Derivatives with respect to the weights go through the statistics. Derivatives with respect to the inputs of the
    next pass do not, so each sample has its own.
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


@contextmanager
def training_jacobian(
    model: Callable[..., Any], x: Tensor, input_space: InputSpace | None = None, seed: int = 0
) -> Iterator[InputJacobian]:
    """Open a sandbox with a Jacobian that can be differentiated in the weights, for a training loss.

    BatchNorm layers in train mode normalise by the statistics of the batch, held fixed with respect to inputs. With
    running statistics, which lag behind, training would find weights with a small penalty and a broken network.
    """
    weights = [p for module in find_modules(model) for p in module.parameters() if p.requires_grad]
    layers = find_training_layers(model)
    with opened(model, x, input_space, seed, precise=False) as (x, space):
        check_not_empty("x", x)
        for weight in weights:
            weight.requires_grad_()
        with held_batch_statistics(layers, lambda: model(x)):
            jacobian = InputJacobian(model, x, space, create_graph=True)
        yield jacobian
