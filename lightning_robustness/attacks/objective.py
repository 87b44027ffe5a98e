"""Objectives of attacks: the margin of a class, and losses with their gradients with respect to the logits."""

from typing import Literal

import torch
from torch import Tensor

Loss = Literal["cross_entropy", "margin"]
PGDLoss = Literal[Loss, "rivals", "kl"]


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """Logit of the label less the largest other one: positive where the label wins, unchanged by a shift of all."""
    own = logits.gather(1, y.unsqueeze(1)).squeeze(1)
    return own - logits.scatter(1, y.unsqueeze(1), -torch.inf).amax(dim=1)


def margin_gradient(logits: Tensor, y: Tensor) -> Tensor:
    """Gradient of the negative margin with respect to the logits: 1 for the best other class, -1 for the label."""
    label = y.unsqueeze(1)
    other = logits.scatter(1, label, -torch.inf).argmax(dim=1, keepdim=True)
    return torch.zeros_like(logits).scatter_(1, other, 1.0).scatter_(1, label, -1.0)


def loss_value(logits: Tensor, target: Tensor, loss: PGDLoss) -> Tensor:
    """Compute a value for each sample that rises and falls with a loss, and never saturates.

    Cross-entropy is the softplus of the value returned here, the largest rival of the label in the sense of
    ``logsumexp`` less the label: it rounds to zero on confident samples, the value does not.

    Args:
        logits: Logits of shape ``(N, K)``.
        target: What ``loss_gradient`` takes.
        loss: Name of the loss.

    """
    if loss == "kl":
        return -(target * logits.log_softmax(dim=1)).sum(dim=1)
    if loss == "rivals":
        label, rival = logits.gather(1, target).unbind(dim=1)
        return rival - label
    if loss == "margin":
        return -margin(logits, target)
    label = target.unsqueeze(1)
    return logits.scatter(1, label, -torch.inf).logsumexp(dim=1) - logits.gather(1, label).squeeze(1)


def loss_gradient(logits: Tensor, target: Tensor, loss: PGDLoss) -> Tensor:
    """Compute the direction of the gradient of a loss of each sample with respect to its logits.

    That of cross-entropy is, times the probability of a misclassification, the softmax over the rivals of the label and
    minus one at the label. Without that factor the direction is the same, also in half precision and for samples on
    which the network is so confident that the factor rounds to zero.

    Args:
        logits: Logits of shape ``(N, K)``.
        target: Labels of shape ``(N,)``; for ``"rivals"`` label and rival, of shape ``(N, 2)``; for ``"kl"``
            probabilities of shape ``(N, K)``.
        loss: ``"cross_entropy"``; ``"margin"`` between the label and the best other class; ``"rivals"``: between the
            label and a given class; ``"kl"``: divergence from given probabilities.

    Returns:
        Directions of shape ``(N, K)``, of which the largest component is between 1/2 and 1 where it is not zero.

    """
    if loss == "kl":
        gradient = logits.softmax(dim=1) - target
        exponent = gradient.abs().amax(dim=1, keepdim=True).frexp().exponent
        return torch.ldexp(gradient, -exponent.clamp(min=-100))
    if loss == "rivals":
        signs = torch.tensor([-1.0, 1.0], dtype=logits.dtype, device=logits.device).expand(len(logits), 2)
        return torch.zeros_like(logits).scatter_(1, target, signs)
    if loss == "margin":
        return margin_gradient(logits, target)
    label = target.unsqueeze(1)
    return logits.scatter(1, label, -torch.inf).softmax(dim=1).scatter_(1, label, -1.0)
