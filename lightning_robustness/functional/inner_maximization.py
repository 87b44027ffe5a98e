"""Adversarial inputs for the losses of adversarial training."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from lightning_robustness.utilities.checks import check_integer
from lightning_robustness.utilities.input_space import InputSpace
from lightning_robustness.utilities.logits import check_differentiable, compute_logits
from lightning_robustness.utilities.precision import at_least_float32
from lightning_robustness.utilities.sandbox import sandbox

# Standard deviation of the start, as published with TRADES and MART
_START = 1e-3


def maximize(
    model: Callable[..., Any],
    x: Tensor,
    y: Tensor | None = None,
    *,
    eps: float,
    alpha: float,
    steps: int,
    input_space: InputSpace | None,
    seed: int | None,
) -> Tensor:
    """Climb by signed gradient steps in the l-infinity ball around inputs, with the model in eval mode.

    Args:
        model: Callable from inputs to logits; it is left as it was.
        x: Inputs as the model sees them.
        y: Labels, whose cross-entropy is maximised; without, it is the divergence from the prediction for ``x``.
        eps: Radius of the ball, in un-normalised units.
        alpha: Size of a step, likewise.
        steps: Number of steps.
        input_space: Range and normalisation of the inputs; by default [0, 1].
        seed: Seed of the start; by default drawn from torch's random state.

    Returns:
        Adversarial inputs as the model sees them.

    Raises:
        ValueError: If inputs are out of range, or an argument is, or the model cannot be differentiated.

    """
    _check_arguments(eps, alpha, steps)
    space = InputSpace() if input_space is None else input_space
    space.check(x)
    seed = int(torch.randint(2**31, ())) if seed is None else seed
    with sandbox(model, x, seed=seed) as (x,):
        dtype = x.dtype

        def log_probabilities(pixels: Tensor) -> Tensor:
            return log_softmax(compute_logits(model, space.normalize(pixels).to(dtype)))

        center = space.unnormalize(x.to(at_least_float32(dtype)))
        low, high = _clamp(space, center - eps), _clamp(space, center + eps)
        pixels = (center + _START * torch.randn_like(center)).clamp(low, high)
        with torch.no_grad():
            reference = log_probabilities(center) if y is None else None
        for _ in range(steps):
            pixels.requires_grad_()
            log_p = log_probabilities(pixels)
            check_differentiable(log_p, otherwise="pass `x_adv=`")
            if reference is None:
                objective = cross_entropy(log_p, y, reduction="sum")  # type: ignore[arg-type]
            else:
                objective = kl_div(log_p, reference, reduction="sum", log_target=True)
            (gradient,) = torch.autograd.grad(objective, pixels)
            pixels = (pixels.detach() + alpha * gradient.sign()).clamp(low, high)
        return space.normalize(pixels).to(dtype)


def log_softmax(logits: Tensor) -> Tensor:
    """Logarithms of probabilities, in float32 or wider also under mixed precision."""
    return logits.to(at_least_float32(logits.dtype)).log_softmax(dim=1)


def _clamp(space: InputSpace, pixels: Tensor) -> Tensor:
    return pixels if space.low is None and space.high is None else pixels.clamp(space.low, space.high)


def _check_arguments(eps: float, alpha: float, steps: int) -> None:
    for name, value in (("eps", eps), ("alpha", alpha)):
        if not value >= 0:
            raise ValueError(f"Expected argument `{name}` to be non-negative but got {value}.")
    check_integer("steps", steps, minimum=1)
