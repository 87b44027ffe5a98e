"""Steps of gradient attacks: their direction, and how their size changes."""

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from lightning_robustness.attacks.budget import Norm
from lightning_robustness.attacks.norms import l2_norm, nonzero

# Constants of Auto-PGD: how much of a move is the step itself, the rest being momentum; and the share of the steps
# between two checkpoints that have to increase the loss
_OWN_SHARE = 0.75
_INCREASING_SHARE = 0.75


class Steps(Protocol):
    """Steps of the samples of a batch."""

    def move(
        self, x_adv: Tensor, gradient: Tensor, value: Callable[[], Tensor], project: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the next points.

        Args:
            x_adv: Points.
            gradient: Gradients there.
            value: Callable that returns the losses there.
            project: Callable that puts points back into the budget and the range.

        """

    def keep(self, rows: Tensor) -> None:
        """Forget all samples but these."""


class PlannedSteps:
    """Steps of sizes that are known beforehand.

    Args:
        size: Size of the first step.
        factor: Ratio of a step to the one before it.
        norm: ``"linf"`` for the sign of the gradient, ``"l2"`` for its direction.
        momentum: Decay of the sum of earlier gradients.

    """

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

    A move is a step and a share of the move before it. At each checkpoint, a sample whose loss rose in fewer than three
    of four steps since the last one, or whose best loss has not risen since then although the size was not halved
    there, halves its size and goes on from the best point that it has seen.

    Args:
        size: Size of the first step.
        steps: Number of steps.
        norm: ``"linf"`` for the sign of the gradient, ``"l2"`` for its direction.
        start: Where samples start.

    """

    def __init__(self, size: float, steps: int, norm: Norm, start: Tensor) -> None:
        self._norm: Norm = norm
        self._checkpoints, self._step, self._last_checkpoint = set(checkpoints(steps)), 0, 0
        self._size = start.new_full((len(start), *[1] * (start.ndim - 1)), size)
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
        rows = is_better.reshape(self._size.shape)
        self._best = torch.where(rows, x_adv, self._best)
        self._best_direction = torch.where(rows, direction, self._best_direction)
        self._best_value = torch.where(is_better, value, self._best_value)
        if self._step > 0:
            self._increases = self._increases + (value > self._value)
        self._value = value

    def _review(self, x_adv: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        stalls = self._increases < _INCREASING_SHARE * (self._step - self._last_checkpoint)
        stalls |= ~self._is_halved & (self._best_value <= self._best_then)
        rows = stalls.reshape(self._size.shape)
        self._size = torch.where(rows, self._size / 2, self._size)
        self._before = torch.where(rows, self._best, self._before)
        self._is_halved, self._best_then, self._last_checkpoint = stalls, self._best_value, self._step
        self._increases = torch.zeros_like(self._increases)
        return torch.where(rows, self._best, x_adv), torch.where(rows, self._best_direction, direction)


def checkpoints(steps: int) -> list[int]:
    """Return the steps at which Auto-PGD reviews sizes: after 22 %, then ever shorter periods of at least 6 %.

    Example:
        >>> from lightning_robustness.attacks.steps import checkpoints
        >>> checkpoints(100)
        [22, 41, 57, 70, 80, 87, 93, 99]

    """
    before, share, found = 0, 22, []
    while share <= 100:
        found.append(math.ceil(share * steps / 100))
        before, share = share, share + max(share - before - 3, 6)
    return found


def _direction(gradient: Tensor, norm: Norm) -> Tensor:
    return gradient.sign() if norm == "linf" else gradient / nonzero(l2_norm(gradient))
