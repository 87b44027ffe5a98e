from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from lightning_robustness.attacks.attack import Attack, Perturbation, all_or
from lightning_robustness.attacks.budget import Norm
from lightning_robustness.attacks.classifier import Classifier
from lightning_robustness.attacks.norms import l2_norm, nonzero
from lightning_robustness.attacks.objective import Loss, loss_gradient
from lightning_robustness.utilities.checks import check_integer, check_number, check_option
from lightning_robustness.utilities.draws import Draws

Start = Literal["uniform", "sign", "gaussian", "clean"]
PGDLoss = Literal[Loss, "kl"]
# Standard deviation of the Gaussian start, as published with TRADES and MART
_NOISE = 1e-3


@dataclass(frozen=True, kw_only=True, repr=False)
class PGD(Attack):
    r"""Projected gradient descent, in the l-infinity or the l2 norm.

    .. math:: x_{t+1} = \Pi\big(x_t + \alpha \, d(\nabla_{x_t} L(z(x_t), y))\big)

    Where :math:`L` is the loss of the logits :math:`z`, :math:`d` the sign (l-infinity) or the division by the l2 norm,
    and :math:`\Pi` the projection onto the ball of radius ``eps`` around the input and onto the range of inputs. A
    sample leaves the batch at the first step at which it is broken, and keeps that image; which samples these are is
    seen in the forward pass that the gradient needs anyway.

    Its settings give other attacks, which ``get_attack`` knows by name: FGSM is one step of ``eps`` from the clean
    image, BIM is PGD from there, MIFGSM is BIM with momentum 1, RFGSM starts with a step in a random direction.

    Args:
        eps: Largest distance from the input, in the units of the range.
        alpha: Size of a step; by default ``eps`` for a single step and ``2.5 * eps / steps`` for several.
        steps: Number of steps, each one gradient.
        norm: ``"linf"`` or ``"l2"``.
        start: ``"uniform"`` in the ball, in the l2 norm by direction and radius; ``"sign"``: a step of ``alpha`` in
            every coordinate, up or down at random; ``"gaussian"``: noise of standard deviation 0.001, as in TRADES;
            ``"clean"``: the input.
        restarts: Number of starts, each with the samples that are not broken yet.
        momentum: Decay of the sum of earlier gradients, each divided by its mean absolute value.
        loss: ``"cross_entropy"``; ``"margin"`` between the label and the best other class; or ``"kl"``, the divergence
            of the prediction from that of the input, as in TRADES, which is zero at a clean start and has no targets.
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
    restarts: int = 1
    momentum: float = 0.0
    loss: PGDLoss = "cross_entropy"

    def __post_init__(self) -> None:
        for name in ("eps", "momentum", *(["alpha"] if self.alpha is not None else [])):
            check_number(name, getattr(self, name))
        for name in ("steps", "restarts"):
            check_integer(name, getattr(self, name), minimum=1)
        for name, options in (("norm", Norm), ("start", Start), ("loss", PGDLoss)):
            check_option(name, getattr(self, name), options)
        if self.norm == "l2" and self.start == "sign":
            raise ValueError(
                'Expected argument `start` to be "uniform", "gaussian" or "clean" in the l2 norm but got "sign".'
            )
        if self.loss == "kl" and (self.start == "clean" or self.targeted):
            raise ValueError(
                'Expected loss="kl", the divergence from the clean prediction, with a random start and without '
                f"targets but got start={self.start!r}, targeted={self.targeted}."
            )

    @property
    def step_size(self) -> float:
        """Size of a step: ``alpha``, or its default."""
        if self.alpha is not None:
            return self.alpha
        return self.eps if self.steps == 1 else 2.5 * self.eps / self.steps

    def perturb(self, model: Classifier, x: Tensor, y: Tensor, active: Tensor) -> Perturbation:
        """Attack the active samples of a batch, given by their indices, within a sandbox."""
        x_adv, queries, zero_gradients = x, torch.zeros_like(y), torch.zeros_like(y, dtype=torch.bool)
        survivors, ball = active, self._ball(model, x)
        for restart in range(self.restarts):
            rows = all_or(survivors, len(x))
            bounds = [corner[rows] for corner in ball]
            start = self._start(model, x[rows], bounds, model.draws.rows(rows), restart)
            descent = self.descend(model, x[rows], y[rows], start, bounds)
            x_adv = descent.x_adv if isinstance(rows, slice) else x_adv.index_copy(0, rows, descent.x_adv)
            queries[survivors] += descent.queries
            if restart == 0 and descent.zero_gradients is not None:
                zero_gradients[survivors] = descent.zero_gradients
            if restart + 1 < self.restarts:
                with torch.no_grad():
                    unbroken = ~self.reached(model(descent.x_adv), y[survivors])
                queries[survivors] += 1
                survivors = survivors[unbroken]
                if len(survivors) == 0:
                    break
        return Perturbation(x_adv, queries, zero_gradients)

    def descend(
        self, model: Classifier, x: Tensor, y: Tensor, start: Tensor, ball: list[Tensor] | None = None
    ) -> Perturbation:
        """Take all steps from a given start."""
        ball = self._ball(model, x) if ball is None else ball
        target, num_passes = y, 0
        if self.loss == "kl":
            with torch.no_grad():
                target, num_passes = model(x).softmax(dim=1), 1
        final, queries = start if self.all_steps else start.clone(), torch.full_like(y, self.steps + num_passes)
        zero_gradients = torch.zeros_like(y, dtype=torch.bool)
        index, x_adv, velocity = torch.arange(len(x), device=x.device), start, None
        for step in range(self.steps):
            logits, gradient = model.gradient(x_adv, partial(self._weights, target=target))
            if step == 0:
                zero_gradients = ~gradient.flatten(1).any(dim=1)
            if not self.all_steps and (broken := self.reached(logits, y)).any():
                final[index[broken]] = x_adv[broken]
                queries[index[broken]] = step + 1 + num_passes
                rest = (~broken).nonzero().squeeze(1)
                if len(rest) == 0:
                    return Perturbation(final, queries, zero_gradients)
                index, y, target, x_adv = (t[rest] for t in (index, y, target, x_adv))
                gradient, *ball = (t[rest] for t in (gradient, *ball))
                velocity = velocity[rest] if velocity is not None else None
            if self.momentum:
                gradient /= nonzero(gradient.abs().mean(dim=tuple(range(1, gradient.ndim)), keepdim=True))
                velocity = gradient = gradient if velocity is None else gradient.add_(velocity, alpha=self.momentum)
            x_adv = self._project(model, self._move(x_adv, gradient), *ball)
        final = x_adv if self.all_steps else final.index_copy_(0, index, x_adv)
        return Perturbation(final, queries, zero_gradients)

    def _start(self, model: Classifier, x: Tensor, ball: list[Tensor], draws: Draws, restart: int) -> Tensor:
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
        return self._project(model, start, *ball)

    def _weights(self, logits: Tensor, target: Tensor) -> Tensor:
        gradient = loss_gradient(logits, target, "cross_entropy" if self.loss == "kl" else self.loss)
        return -gradient if self.targeted else gradient

    def _move(self, x_adv: Tensor, gradient: Tensor) -> Tensor:
        direction = gradient.sign() if self.norm == "linf" else gradient / nonzero(l2_norm(gradient))
        return torch.add(x_adv, direction, alpha=self.step_size)

    def _ball(self, model: Classifier, x: Tensor) -> list[Tensor]:
        """Return what the projection needs: the corners of the box to stay in, or the centre of the ball."""
        if self.norm == "l2":
            return [x]
        corners = [x - self.eps, x + self.eps]
        is_bounded = model.low is not None or model.high is not None
        return [corner.clamp_(model.low, model.high) for corner in corners] if is_bounded else corners

    def _project(self, model: Classifier, x_adv: Tensor, *ball: Tensor) -> Tensor:
        if self.norm == "linf":
            return x_adv.clamp_(*ball)
        (x,) = ball
        delta = x_adv - x
        return model.clamp(x + delta * (self.eps / nonzero(l2_norm(delta))).clamp(max=1.0))
