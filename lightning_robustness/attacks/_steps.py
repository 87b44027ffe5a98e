import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from lightning_robustness._numbers import exponents
from lightning_robustness.attacks.attack import Norm


def l2_norm(x: Tensor, start_dim: int = 1) -> Tensor:
    """Euclidean norm over the dimensions from one on, in a shape that broadcasts with the tensor."""
    return torch.linalg.vector_norm(x, dim=tuple(range(start_dim, x.ndim)), keepdim=True)


def as_column(values: Tensor, like: Tensor) -> Tensor:
    """Bring one value per sample into a shape that broadcasts with a batch."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def nonzero(x: Tensor) -> Tensor:
    """Non-negative values that can be divided by."""
    return x.clamp(min=torch.finfo(x.dtype).tiny)


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

    Cross-entropy is the softplus of this value, the ``logsumexp`` of the rivals less the label: it rounds to zero on
    confident samples, the value does not.
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

    For cross-entropy, it is the softmax over the rivals of the label, and minus one at the label: the gradient without
    the probability of a misclassification as a factor, which rounds to zero on confident samples.
    """
    if loss == "kl":
        gradient = logits.softmax(dim=1) - target
        return torch.ldexp(gradient, -exponents(gradient.abs().amax(dim=1, keepdim=True)).clamp(min=-100))
    if loss == "rivals":
        signs = torch.tensor([-1.0, 1.0], dtype=logits.dtype, device=logits.device).expand(len(logits), 2)
        return torch.zeros_like(logits).scatter_(1, target, signs)
    if loss == "margin":
        return margin_gradient(logits, target)
    label = target.unsqueeze(1)
    return logits.scatter(1, label, -torch.inf).softmax(dim=1).scatter_(1, label, -1.0)


# Constants of Auto-PGD: how much of a move is the step itself, the rest being momentum; and the share of the steps
# between two checkpoints that have to increase the loss
_OWN_SHARE = 0.75
_INCREASING_SHARE = 0.75


class PlannedSteps:
    """Steps of sizes that are known beforehand."""

    def __init__(self, size: float, factor: float, norm: Norm, momentum: float) -> None:
        self._size, self._factor, self._norm, self._momentum = size, factor, norm, momentum
        self._velocity: Tensor | None = None

    def move(
        self, x_adv: Tensor, gradient: Tensor, value: Callable[[], Tensor], project: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the next points."""
        if self._momentum:
            gradient /= nonzero(gradient.abs().mean(dim=tuple(range(1, gradient.ndim)), keepdim=True))
            gradient = gradient if self._velocity is None else gradient.add_(self._velocity, alpha=self._momentum)
            self._velocity = gradient
        following = project(torch.add(x_adv, _direction(gradient, self._norm), alpha=self._size))
        self._size *= self._factor
        return following

    def keep(self, rows: Tensor) -> None:
        """Forget all samples but these."""
        self._velocity = self._velocity[rows] if self._velocity is not None else None


class AdaptiveSteps:
    """Steps of Auto-PGD (Croce and Hein, 2020): each sample halves their size when progress stalls.

    At each checkpoint, a sample whose loss rose in fewer than three of four steps since the last one, or whose best
    loss has not risen since then although the size was not halved there, restarts with half the size from the best
    point that it has seen.
    """

    def __init__(self, size: float, steps: int, norm: Norm, start: Tensor) -> None:
        self._norm: Norm = norm
        self._checkpoints, self._step, self._last_checkpoint = set(checkpoints(steps)), 0, 0
        self._size = as_column(start.new_full((len(start),), size), start)
        self._before, self._best, self._best_direction = start, start, torch.zeros_like(start)
        self._value = self._best_value = self._best_then = start.new_full((len(start),), -torch.inf)
        self._increases = torch.zeros_like(self._value)
        self._is_halved = torch.zeros_like(self._value, dtype=torch.bool)

    def move(
        self, x_adv: Tensor, gradient: Tensor, value: Callable[[], Tensor], project: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the next points."""
        direction = _direction(gradient, self._norm)
        self._record(x_adv, direction, value())
        if self._step in self._checkpoints:
            x_adv, direction = self._review(x_adv, direction)
        following = project(x_adv + self._size * direction)
        if self._step > 0:
            momentum = (1 - _OWN_SHARE) * (x_adv - self._before)
            following = project(torch.lerp(x_adv, following, _OWN_SHARE).add_(momentum))
        self._before, self._step = x_adv, self._step + 1
        return following

    def keep(self, rows: Tensor) -> None:
        """Forget all samples but these."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value[rows])

    def _record(self, x_adv: Tensor, direction: Tensor, value: Tensor) -> None:
        is_better = value > self._best_value
        rows = as_column(is_better, x_adv)
        self._best = torch.where(rows, x_adv, self._best)
        self._best_direction = torch.where(rows, direction, self._best_direction)
        self._best_value = torch.where(is_better, value, self._best_value)
        if self._step > 0:
            self._increases = self._increases + (value > self._value)
        self._value = value

    def _review(self, x_adv: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        stalls = self._increases < _INCREASING_SHARE * (self._step - self._last_checkpoint)
        stalls |= ~self._is_halved & (self._best_value <= self._best_then)
        rows = as_column(stalls, x_adv)
        self._size = torch.where(rows, self._size / 2, self._size)
        self._before = torch.where(rows, self._best, self._before)
        self._is_halved, self._best_then, self._last_checkpoint = stalls, self._best_value, self._step
        self._increases = torch.zeros_like(self._increases)
        return torch.where(rows, self._best, x_adv), torch.where(rows, self._best_direction, direction)


def checkpoints(steps: int) -> list[int]:
    """Return the steps at which Auto-PGD reviews sizes: after 22 %, then ever shorter periods of at least 6 %."""
    before, share = 0, 22
    found = []
    while share <= 100:
        found.append(math.ceil(share * steps / 100))
        before, share = share, share + max(share - before - 3, 6)
    return found


def _direction(gradient: Tensor, norm: Norm) -> Tensor:
    return gradient.sign() if norm == "linf" else gradient / nonzero(l2_norm(gradient))
