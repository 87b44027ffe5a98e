from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_robustness.attacks import PGD
from lightning_robustness.utilities.input_space import InputSpace
from lightning_robustness.utilities.logits import compute_logits
from lightning_robustness.utilities.precision import at_least_float32


def log_probabilities(
    model: Callable[..., Any],
    x: Tensor,
    y: Tensor,
    x_adv: Tensor | None,
    *,
    loss: Literal["cross_entropy", "kl"],
    eps: float,
    alpha: float,
    steps: int,
    input_space: InputSpace | None,
    seed: int | None,
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities of clean and of adversarial inputs, in float32 or wider also under mixed precision.

    Args:
        model: Callable from inputs to logits; it runs once on each, in the mode that it is in.
        x: Inputs as the model sees them.
        y: Labels.
        x_adv: Adversarial inputs as the model sees them. If None, PGD in the l-infinity norm looks for them, with the
            model in eval mode and from a small Gaussian start.
        loss: Loss that PGD maximises.
        eps: Budget of PGD, in un-normalised units.
        alpha: Size of its steps, in un-normalised units.
        steps: Number of its steps.
        input_space: Range and normalisation of the inputs; by default [0, 1], not normalised.
        seed: Seed of its start; by default drawn from torch's random state.

    """
    if x_adv is None:
        attack = PGD(eps=eps, alpha=alpha, steps=steps, start="gaussian", loss=loss, all_steps=True)
        seed = int(torch.randint(2**31, ())) if seed is None else seed
        x_adv = attack(model, x, y, input_space=input_space, seed=seed)
    logits, adv_logits = compute_logits(model, x), compute_logits(model, x_adv)
    log_p, adv_log_p = (z.to(at_least_float32(z.dtype)).log_softmax(dim=1) for z in (logits, adv_logits))
    return log_p, adv_log_p
