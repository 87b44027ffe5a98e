from collections.abc import Callable
from typing import Any

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
    attack: PGD,
    input_space: InputSpace | None,
    seed: int | None,
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities of clean and of adversarial inputs, in float32 or wider also under mixed precision.

    Without ``x_adv``, the attack finds adversarial inputs; the other arguments are those of ``trades_loss``.
    """
    if x_adv is None:
        seed = int(torch.randint(2**31, ())) if seed is None else seed
        x_adv = attack(model, x, y, input_space=input_space, seed=seed)
    logits, adv_logits = (compute_logits(model, inputs) for inputs in (x, x_adv))
    dtype = at_least_float32(logits.dtype)
    return logits.to(dtype).log_softmax(dim=1), adv_logits.to(dtype).log_softmax(dim=1)
