from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_robustness._arguments import check_integer, check_number, check_option
from lightning_robustness._isolation.draws import Draws
from lightning_robustness.attacks._classifier import Classifier
from lightning_robustness.attacks._steps import (
    AdaptiveSteps,
    PGDLoss,
    PlannedSteps,
    l2_norm,
    loss_gradient,
    loss_value,
    nonzero,
)
from lightning_robustness.attacks.attack import Attack, Norm, Perturbation

Start = Literal["uniform", "sign", "gaussian", "clean"]
Schedule = Literal["constant", "shrinking", "adaptive"]
# Standard deviation of the Gaussian start, as published with TRADES and MART
_NOISE = 1e-3
# Last of the shrinking steps, as a share of the first
_SHRINKAGE = 0.05


@dataclass(frozen=True, kw_only=True, repr=False)
class PGD(Attack):
    r"""Projected gradient descent, in the l-infinity or the l2 norm.

    .. math:: x_{t+1} = \Pi\big(x_t + \alpha \, d(\nabla_{x_t} L(z(x_t), y))\big)

    Where :math:`L` is the loss of the logits :math:`z`, :math:`d` the sign (l-infinity) or the division by the l2 norm,
    and :math:`\Pi` the projection onto the ball of radius ``eps`` around the input and onto the range of inputs. A
    sample leaves the batch at the first step at which it is broken, and keeps that image; which samples these are is
    seen in the forward pass that the gradient needs anyway.

    Its settings give other attacks, which ``get_attack`` knows by name: FGSM is one step of ``eps`` from the clean
    image, BIM is PGD from there, MIFGSM is BIM with momentum 1, RFGSM starts with a step in a random direction. The
    default is PGD as published, which is weak on robust networks: ``get_attack("pgd", strength="fast")`` finds more
    with 16 gradients than any number of constant steps.

    The direction of the gradient of cross-entropy is computed such that it does not underflow on confident samples.

    Args:
        eps: Largest distance from the input, in the units of the range.
        alpha: Size of a step, or of the first if they change; by default ``eps`` for a single constant step,
            ``2.5 * eps / steps`` for several, and ``2 * eps`` where they change.
        steps: Number of steps, each one gradient.
        norm: ``"linf"`` or ``"l2"``.
        start: ``"uniform"`` in the ball, in the l2 norm by direction and radius; ``"sign"``: a step of ``alpha`` in
            every coordinate, up or down at random; ``"gaussian"``: noise of standard deviation 0.001, as in TRADES;
            ``"clean"``: the input.
        restarts: Number of starts, each with the samples that are not broken yet; by default one for each loss.
        momentum: Decay of the sum of earlier gradients, each divided by its mean absolute value.
        loss: ``"cross_entropy"``; ``"margin"`` between the label and the best other class; ``"rivals"``, the margin to
            one other class, where restart r with this loss takes the class with the r-th highest clean logit, as long
            as there is one; or ``"kl"``, the divergence from the clean prediction, as in TRADES, which is zero at a
            clean start. The last two have no targeted mode. Restarts take several losses in turn.
        schedule: ``"constant"`` steps; ``"shrinking"`` geometrically to a 20th of the first, best with few steps;
            or ``"adaptive"`` as in Auto-PGD (Croce and Hein, 2020), which pays from about 40 steps on.
        targeted: Whether ``y`` holds the labels to be predicted after the attack, instead of the true labels.
        all_steps: Whether every sample goes through every step, for adversarial inputs of full strength.

    Raises:
        ValueError: If an argument is out of range or unknown, or two do not go together.

    Example:
        >>> import torch
        >>> from lightning_robustness.attacks import PGD
        >>> model = torch.nn.Linear(2, 2)
        >>> model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
        >>> PGD(eps=0.25, steps=2, start="clean")(model, torch.tensor([[0.75, 0.5]]), torch.tensor([0]))
        tensor([[0.5000, 0.7500]])

    """

    eps: float = 8 / 255
    alpha: float | None = None
    steps: int = 10
    norm: Norm = "linf"
    start: Start = "uniform"
    restarts: int | None = None
    momentum: float = 0.0
    loss: PGDLoss | Sequence[PGDLoss] = "cross_entropy"
    schedule: Schedule = "constant"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.loss, Iterable):
            check_option("loss", self.loss, PGDLoss)
        if not isinstance(self.loss, str):
            object.__setattr__(self, "loss", tuple(self.loss))  # a list is not hashable
        for name in ("eps", "momentum", *(["alpha"] if self.alpha is not None else [])):
            check_number(name, getattr(self, name))
        for name in ("steps", *(["restarts"] if self.restarts is not None else [])):
            check_integer(name, getattr(self, name), minimum=1)
        for name, options in (("norm", Norm), ("start", Start), ("schedule", Schedule)):
            check_option(name, getattr(self, name), options)
        for loss in self.losses:
            check_option("loss", loss, PGDLoss)
        self._check_combinations()

    def _check_combinations(self) -> None:
        if not 0 < len(self.losses) <= self.num_restarts:
            raise ValueError(
                f"Expected argument `loss` to be a loss, or at most as many as `restarts`, of which there are "
                f"{self.num_restarts}, but got {self.loss!r}. Leave `restarts` out for one start with each loss."
            )
        if self.norm == "l2" and self.start == "sign":
            raise ValueError(
                'Expected argument `start` to be "uniform", "gaussian" or "clean" in the l2 norm but got "sign".'
            )
        if "kl" in self.losses and (self.start == "clean" or self.targeted):
            raise ValueError(
                'Expected loss="kl", the divergence from the clean prediction, with a random start and without '
                f"targets but got start={self.start!r}, targeted={self.targeted}."
            )
        if "rivals" in self.losses and self.targeted:
            raise ValueError(
                'Expected loss="rivals", which chooses classes by itself, without targets but got targeted=True. '
                'Use loss="margin".'
            )
        if self.schedule == "adaptive" and self.momentum:
            raise ValueError(
                f"Expected no momentum with adaptive steps, which have one of their own, but got {self.momentum}."
            )

    @property
    def losses(self) -> tuple[PGDLoss, ...]:
        """Losses that restarts take in turn."""
        return (self.loss,) if isinstance(self.loss, str) else tuple(self.loss)

    @property
    def num_restarts(self) -> int:
        """Number of starts, also where it was left out."""
        return self.restarts or max(len(self.losses), 1)

    @property
    def step_size(self) -> float:
        """Size of a step, of the first if they change: ``alpha``, or its default."""
        if self.alpha is not None:
            return self.alpha
        if self.schedule != "constant":
            return 2 * self.eps
        return self.eps if self.steps == 1 else 2.5 * self.eps / self.steps

    def perturb(self, model: Classifier, x: Tensor, y: Tensor) -> Perturbation:
        """Attack all samples of a batch, within a sandbox."""
        x_adv = x
        queries = torch.zeros_like(y)
        zero_gradients = torch.zeros_like(y, dtype=torch.bool)
        survivors, ball = torch.arange(len(x), device=x.device), self._ball(model, x)
        plan = self._plan()
        for restart, (loss, rank) in enumerate(plan):
            if loss == "rivals" and model.num_classes is not None and rank > model.num_classes - 2:
                continue
            rows = slice(None) if len(survivors) == len(x) else survivors  # a view instead of a copy
            bounds = [corner[rows] for corner in ball]
            start = self._start(model, x[rows], bounds, model.draws.rows(rows), restart)
            descent = self.descend(model, x[rows], y[rows], start, bounds, loss, rank)
            x_adv = descent.x_adv if isinstance(rows, slice) else x_adv.index_copy(0, rows, descent.x_adv)
            queries[rows] += descent.queries
            if restart == 0 and descent.zero_gradients is not None:
                zero_gradients[rows] = descent.zero_gradients
            if restart + 1 < len(plan):
                with torch.no_grad():
                    unbroken = ~self.reached(model(descent.x_adv), y[survivors])
                queries[survivors] += 1
                survivors = survivors[unbroken]
                if len(survivors) == 0:
                    break
        return Perturbation(x_adv, queries, zero_gradients)

    def descend(
        self,
        model: Classifier,
        x: Tensor,
        y: Tensor,
        start: Tensor,
        ball: Sequence[Tensor] | None = None,
        loss: PGDLoss | None = None,
        rank: int = 0,
    ) -> Perturbation:
        """Take all steps from a given start, with the first loss unless another is given; rivals have a rank."""
        loss = loss or self.losses[0]
        target, num_passes = self._target(model, x, y, loss, rank)
        final, queries = start if self.all_steps else start.clone(), torch.full_like(y, self.steps + num_passes)
        zero_gradients, steps = torch.zeros_like(y, dtype=torch.bool), self._steps(start)
        origin = torch.arange(len(x), device=x.device)
        batch = _Batch(origin, start, y, target, tuple(ball or self._ball(model, x)))
        for step in range(self.steps):
            logits, gradient = model.gradient(batch.x_adv, partial(self._weights, target=batch.target, loss=loss))
            if step == 0:
                zero_gradients = gradient.flatten(1).abs().amax(dim=1) == 0
            broken = self.reached(logits, batch.y)
            # The number of these is all that the device is waited for
            rest = batch.origin if self.all_steps else (~broken).nonzero().squeeze(1)
            if len(rest) < len(broken):
                final.index_copy_(0, batch.origin, batch.x_adv)  # written again where the attack continues
                queries[batch.origin] = torch.where(broken, step + 1, self.steps) + num_passes
                if len(rest) == 0:
                    return Perturbation(final, queries, zero_gradients)
                batch, logits, gradient = batch.rows(rest), logits[rest], gradient[rest]
                steps.keep(rest)
            value = partial(self._value, logits, target=batch.target, loss=loss)
            x_adv = steps.move(batch.x_adv, gradient, value, partial(self._project, model, batch.ball))
            batch = batch._replace(x_adv=x_adv)
        final = batch.x_adv if self.all_steps else final.index_copy_(0, batch.origin, batch.x_adv)
        return Perturbation(final, queries, zero_gradients)

    def _plan(self) -> list[tuple[PGDLoss, int]]:
        """Return the loss of each restart and, for rivals, the rank of the one that it attacks, from 0."""
        losses = [self.losses[restart % len(self.losses)] for restart in range(self.num_restarts)]
        return [(loss, losses[:restart].count(loss)) for restart, loss in enumerate(losses)]

    def _target(self, model: Classifier, x: Tensor, y: Tensor, loss: PGDLoss, rank: int) -> tuple[Tensor, int]:
        """Return the target of a loss, and the number of forward passes that it took."""
        if loss not in ("rivals", "kl"):
            return y, 0
        with torch.no_grad():
            logits = model(x)
        if loss == "kl":
            return logits.softmax(dim=1), 1
        rivals = logits.scatter(1, y.unsqueeze(1), -torch.inf).topk(rank + 1, dim=1).indices[:, rank]
        return torch.stack([y, rivals], dim=1), 1

    def _steps(self, start: Tensor) -> PlannedSteps | AdaptiveSteps:
        if self.schedule == "adaptive":
            return AdaptiveSteps(self.step_size, self.steps, self.norm, start)
        factor = _SHRINKAGE ** (1 / max(self.steps - 1, 1)) if self.schedule == "shrinking" else 1.0
        return PlannedSteps(self.step_size, factor, self.norm, self.momentum)

    def _start(self, model: Classifier, x: Tensor, ball: Sequence[Tensor], draws: Draws, restart: int) -> Tensor:
        if self.start == "clean":
            return x
        draws, shape = draws.stream(restart), x.shape[1:]
        if self.start == "gaussian":
            start = x + _NOISE * draws.normal(0, shape, x.dtype)
            if self.all_steps:  # as published, projected by the first step only
                return start
        elif self.norm == "l2":
            direction = draws.normal(0, shape, x.dtype)
            # Uniform in the radius, not the volume: in many dimensions, that would be next to the surface
            radius = draws.uniform(1, (1,) * len(shape), 0.0, self.eps, x.dtype)
            start = x + direction * (radius / nonzero(l2_norm(direction)))
        elif self.start == "sign":
            start = x + self.step_size * draws.signs(0, shape, x.dtype)
        else:
            start = draws.uniform(0, shape, -self.eps, self.eps, x.dtype).add_(x)
        return self._project(model, ball, start)

    def _weights(self, logits: Tensor, target: Tensor, loss: PGDLoss) -> Tensor:
        gradient = loss_gradient(logits, target, loss)
        return -gradient if self.targeted else gradient

    def _value(self, logits: Tensor, target: Tensor, loss: PGDLoss) -> Tensor:
        value = loss_value(logits, target, loss)
        return -value if self.targeted else value

    def _ball(self, model: Classifier, x: Tensor) -> list[Tensor]:
        """Return what the projection needs: the corners of the box to stay in, or the centre of the ball."""
        if self.norm == "l2":
            return [x]
        corners = [x - self.eps, x + self.eps]
        is_bounded = model.low is not None or model.high is not None
        return [corner.clamp_(model.low, model.high) for corner in corners] if is_bounded else corners

    def _project(self, model: Classifier, ball: Sequence[Tensor], x_adv: Tensor) -> Tensor:
        if self.norm == "linf":
            return x_adv.clamp_(*ball)
        (x,) = ball
        delta = x_adv - x
        return model.clamp(x + delta * (self.eps / nonzero(l2_norm(delta))).clamp(max=1.0))


class _Batch(NamedTuple):
    """Samples that are not broken yet: where they are in the batch, their present points, and what these aim at."""

    origin: Tensor
    x_adv: Tensor
    y: Tensor
    target: Tensor
    ball: tuple[Tensor, ...]

    def rows(self, rows: Tensor) -> "_Batch":
        origin, x_adv, y, target = (part[rows] for part in (self.origin, self.x_adv, self.y, self.target))
        return _Batch(origin, x_adv, y, target, tuple(corner[rows] for corner in self.ball))
