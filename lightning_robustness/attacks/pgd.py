from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from lightning_robustness.attacks.attack import Attack, Norm, Perturbation, all_or
from lightning_robustness.attacks.classifier import Classifier
from lightning_robustness.attacks.norms import l2_norm, nonzero
from lightning_robustness.attacks.objective import Loss, loss_gradient

Start = Literal["uniform", "sign", "clean"]


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
            every coordinate, up or down by chance; ``"clean"``: the input.
        restarts: How often to start, each time with the samples that are not broken yet.
        momentum: Decay of the sum of earlier gradients, each divided by its mean absolute value.
        loss: ``"cross_entropy"``, or ``"margin"`` between the label and the best other class.
        targeted: Whether ``y`` holds labels that the model shall predict, instead of true ones that it shall not.
        all_steps: Whether every sample goes through every step, for an image of full strength.
        progress: Whether to show a progress bar.
        low: Smallest value of inputs, or None for no bound.
        high: Largest value of inputs, or None for no bound.

    Raises:
        ValueError: If an argument is out of range or unknown.

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
    loss: Loss = "cross_entropy"

    def __post_init__(self) -> None:
        for name in ("eps", "momentum", *(["alpha"] if self.alpha is not None else [])):
            self._check_number(name)
        for name in ("steps", "restarts"):
            self._check_count(name)
        for name, options in (("norm", Norm), ("start", Start), ("loss", Loss)):
            self._check_option(name, options)
        if self.norm == "l2" and self.start == "sign":
            raise ValueError('Expected argument `start` to be "uniform" or "clean" in the l2 norm but got "sign".')

    @property
    def step_size(self) -> float:
        """What ``alpha`` is, or by default becomes."""
        if self.alpha is not None:
            return self.alpha
        return self.eps if self.steps == 1 else 2.5 * self.eps / self.steps

    def perturb(self, model: Classifier, x: Tensor, y: Tensor, active: Tensor) -> Perturbation:
        """Attack the active samples of a batch, given by their indices, within a sandbox."""
        x_adv, queries, zero_gradients = x, torch.zeros_like(y), torch.zeros_like(y, dtype=torch.bool)
        survivors, ball = active, self._ball(model, x)
        for restart in range(self.restarts):
            rows = all_or(survivors, len(x))
            # Drawn for the whole batch: a sample's start depends on no other sample
            start = self._start(model, x, ball)
            descent = self.descend(model, x[rows], y[rows], start[rows], [corner[rows] for corner in ball])
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
        final, queries = start if self.all_steps else start.clone(), torch.full_like(y, self.steps)
        zero_gradients = torch.zeros_like(y, dtype=torch.bool)
        index, x_adv, velocity = torch.arange(len(x), device=x.device), start, None
        for step in self._iterations(self.steps):
            logits, gradient = model.gradient(x_adv, partial(self._weights, y=y))
            if step == 0:
                zero_gradients = ~gradient.flatten(1).any(dim=1)
            if not self.all_steps and (broken := self.reached(logits, y)).any():
                final[index[broken]] = x_adv[broken]
                queries[index[broken]] = step + 1
                rest = (~broken).nonzero().squeeze(1)
                if len(rest) == 0:
                    return Perturbation(final, queries, zero_gradients)
                index, y, x_adv, gradient, *ball = (t[rest] for t in (index, y, x_adv, gradient, *ball))
                velocity = velocity[rest] if velocity is not None else None
            if self.momentum:
                gradient /= nonzero(gradient.abs().mean(dim=tuple(range(1, gradient.ndim)), keepdim=True))
                velocity = gradient = gradient if velocity is None else gradient.add_(velocity, alpha=self.momentum)
            x_adv = self._project(model, self._move(x_adv, gradient), *ball)
        if self.all_steps:
            return Perturbation(x_adv, queries, zero_gradients)
        final[index] = x_adv
        return Perturbation(final, queries, zero_gradients)

    def _start(self, model: Classifier, x: Tensor, ball: list[Tensor]) -> Tensor:
        if self.start == "clean":
            return x
        if self.norm == "l2":
            direction = torch.randn_like(x)
            # Uniform in the radius, not the volume: in many dimensions, that would be next to the surface
            start = x + direction * (self.eps * torch.rand_like(l2_norm(x)) / nonzero(l2_norm(direction)))
        elif self.start == "sign":
            start = x + self.step_size * torch.randn_like(x).sign()
        else:
            start = torch.empty_like(x).uniform_(-self.eps, self.eps).add_(x)
        return self._project(model, start, *ball)

    def _weights(self, logits: Tensor, y: Tensor) -> Tensor:
        gradient = loss_gradient(logits, y, self.loss)
        return -gradient if self.targeted else gradient

    def _move(self, x_adv: Tensor, gradient: Tensor) -> Tensor:
        direction = gradient.sign() if self.norm == "linf" else gradient / nonzero(l2_norm(gradient))
        return torch.add(x_adv, direction, alpha=self.step_size)

    def _ball(self, model: Classifier, x: Tensor) -> list[Tensor]:
        """What the projection needs: the corners of the box that the attack may use, or the centre of the ball."""
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
