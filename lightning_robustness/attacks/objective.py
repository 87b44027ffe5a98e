"""Objectives of attacks: the margin of a class, and gradients of losses with respect to logits."""

from typing import Literal

import torch
from torch import Tensor

Loss = Literal["cross_entropy", "margin"]


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """Logit of the label less the largest other one: positive where the label wins, unchanged by a shift of all."""
    own = logits.gather(1, y.unsqueeze(1)).squeeze(1)
    return own - logits.scatter(1, y.unsqueeze(1), -torch.inf).amax(dim=1)


def margin_gradient(logits: Tensor, y: Tensor) -> Tensor:
    """Gradient of the negative margin with respect to the logits: 1 for the best other class, -1 for the label."""
    label = y.unsqueeze(1)
    other = logits.scatter(1, label, -torch.inf).argmax(dim=1, keepdim=True)
    return torch.zeros_like(logits).scatter_(1, other, 1.0).scatter_(1, label, -1.0)


def loss_gradient(logits: Tensor, target: Tensor, loss: Loss) -> Tensor:
    """Compute the gradient of a loss of each sample with respect to its logits, scaled so that it does not underflow.

    A confident sample has a tiny gradient of cross-entropy, which half precision would round to zero on its way to the
    input. The factor is a power of two for each sample: directions and signs are exactly what they were.

    Args:
        logits: Logits of shape ``(N, K)``.
        target: Labels of shape ``(N,)``; for cross-entropy also probabilities of shape ``(N, K)``, with the gradient of
            the divergence from these.
        loss: ``"cross_entropy"`` or ``"margin"``.

    """
    if loss == "margin":
        return margin_gradient(logits, target)
    gradient = logits.softmax(dim=1)
    if target.ndim == 1:
        gradient = gradient.scatter_add(1, target.unsqueeze(1), -torch.ones_like(gradient[:, :1]))
    else:
        gradient = gradient - target
    exponent = gradient.abs().amax(dim=1, keepdim=True).frexp().exponent
    return torch.ldexp(gradient, -exponent.clamp(min=-100))
