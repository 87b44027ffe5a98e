from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_robustness.attacks import PGD
from lightning_robustness.attacks.budget import check_budgets
from lightning_robustness.utilities.checks import check_classes, check_labels, check_not_empty, check_tensor
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
    highest_label = -1
    check_budgets([attack], input_space)
    if x_adv is None:  # the attack checks the others
        seed = int(torch.randint(2**31, ())) if seed is None else seed
        x_adv = attack(model, x, y, input_space=input_space, seed=seed)
    else:
        highest_label = _check(x, y, x_adv)
    check_not_empty("x", x)
    logits, adv_logits = (compute_logits(model, inputs) for inputs in (x, x_adv))
    check_classes("y", highest_label, logits.shape[1])
    dtype = at_least_float32(logits.dtype)
    return logits.to(dtype).log_softmax(dim=1), adv_logits.to(dtype).log_softmax(dim=1)


def _check(x: Tensor, y: Tensor, x_adv: Tensor) -> int:
    """Check the arguments beside adversarial inputs from elsewhere, and return the highest label."""
    check_tensor("x", x)
    check_tensor("x_adv", x_adv)
    if x.ndim < 2 or x_adv.shape != x.shape:
        raise ValueError(
            f"Expected `x` of shape (N, ...) and `x_adv` of the same but got {tuple(x.shape)} and "
            f"{tuple(x_adv.shape)}. Pass one adversarial input per sample, or leave `x_adv` out."
        )
    return check_labels("y", y, len(x))
