from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_robustness._arguments import check_integer, check_number, is_number
from lightning_robustness._isolation.draws import Draws
from lightning_robustness.attacks._classifier import Classifier
from lightning_robustness.attacks._steps import margin
from lightning_robustness.attacks.attack import Attack, Norm, Perturbation
from lightning_robustness.attacks.pgd import PGD


@dataclass(frozen=True, kw_only=True, repr=False)
class SirenAttack(Attack):
    r"""SirenAttack, a particle swarm for audio and other sequences, by outputs alone or followed by gradient steps.

    .. math:: v \leftarrow \omega v + c_1 r_1 (b_p - d) + c_2 r_2 (b - d), \qquad d \leftarrow d + v

    Each particle is a perturbation :math:`d` of at most ``eps`` with a velocity :math:`v`, drawn by random numbers
    :math:`r` towards its own best :math:`b_p` and the best of the swarm :math:`b`: those with the smallest margin of
    the label. A swarm without progress starts anew from random places, its best kept. In the white-box form, signed
    gradient steps refine the best of the swarm where it has not succeeded. A sample leaves the batch when it is broken.

    Args:
        eps: Largest change of a coordinate, in the units of the range.
        steps: Number of iterations of the swarm, each one query per particle.
        num_particles: Number of particles for each sample.
        gradient_steps: Number of gradient steps after the swarm: 0 for the black-box form.
        alpha: Size of a gradient step.
        inertia: Weight :math:`\omega` of the velocity in the first and the last iteration.
        attraction: Weights :math:`c_1` and :math:`c_2`.
        patience: Iterations without progress after which a swarm starts anew.
        targeted: Whether ``y`` holds the labels to be predicted after the attack, instead of the true labels.
        all_steps: Whether every sample goes through every step, also those that are misclassified early.

    Raises:
        ValueError: If an argument is out of range, or inputs are not sequences.

    Example:
        >>> import torch
        >>> from lightning_robustness.attacks import SirenAttack
        >>> model = torch.nn.Linear(2, 2)
        >>> model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
        >>> x_adv = SirenAttack(eps=0.25)(model, torch.tensor([[0.75, 0.5]]), torch.tensor([0]))
        >>> model(x_adv).argmax(dim=1)
        tensor([1])

    """

    eps: float = 0.5
    steps: int = 50
    num_particles: int = 25
    gradient_steps: int = 0
    alpha: float = 0.05
    inertia: tuple[float, float] = (0.9, 0.1)
    attraction: tuple[float, float] = (1.4961, 1.4961)
    patience: int = 10
    norm: ClassVar[Norm] = "linf"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("eps", "alpha"):
            check_number(name, getattr(self, name))
        for name in ("steps", "num_particles", "patience"):
            check_integer(name, getattr(self, name), minimum=1)
        check_integer("gradient_steps", self.gradient_steps, minimum=0)
        for name in ("inertia", "attraction"):
            value = getattr(self, name)
            value = tuple(value) if isinstance(value, Sequence) else (value,)
            object.__setattr__(self, name, value)
            if len(value) != 2 or not all(is_number(v) and v >= 0 for v in value):
                raise ValueError(f"Expected argument `{name}` to be two non-negative numbers but got {value!r}.")

    @property
    def passes(self) -> int:
        """Largest number of passes."""
        return self.steps * self.num_particles + self.gradient_steps

    @property
    def white_box(self) -> bool:
        """Return whether the attack uses gradients."""
        return self.gradient_steps > 0

    def perturb(self, model: Classifier, x: Tensor, y: Tensor) -> Perturbation:
        """Attack all samples of a batch, within a sandbox."""
        if x.ndim not in (2, 3):
            raise ValueError(
                f"Expected sequences of shape (N, L) or (N, C, L) for SirenAttack but got {tuple(x.shape)}. "
                "For images, use Square or PGD."
            )
        x_adv, queries, rest = self._swarm(model, x, y, model.draws)
        nonfinite = torch.zeros_like(y, dtype=torch.bool)
        if (steps := self.gradient_steps) and len(rest):
            attack = PGD(eps=self.eps, alpha=self.alpha, steps=steps, targeted=self.targeted, all_steps=self.all_steps)
            refinement = attack.descend(model, x[rest], y[rest], x_adv[rest])
            x_adv[rest] = refinement.x_adv
            queries[rest] += refinement.queries
            nonfinite[rest] |= False if model.nonfinite is None else model.nonfinite
        return Perturbation(x_adv, queries, nonfinite_gradients=nonfinite)

    @torch.no_grad()
    def _swarm(self, model: Classifier, x: Tensor, y: Tensor, draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
        """Run the swarms; return the best inputs, the cost and the samples that are not broken."""
        final, queries = x.clone(), torch.full_like(y, self.steps * self.num_particles)
        index, places = torch.arange(len(x), device=x.device), self._scatter(x, draws.stream(self.steps))
        velocities, own_best = torch.zeros_like(places), places
        own_lowest = places.new_full(places.shape[:2], torch.inf)
        best, lowest, idle = places[0], own_lowest[0], torch.zeros_like(y)
        for step in range(self.steps):
            values = torch.stack([self._objective(model, model.clamp(x + place), y) for place in places])
            better = values < own_lowest
            own_best = torch.where(better.reshape(*better.shape, *[1] * (x.ndim - 1)), places, own_best)
            own_lowest = torch.minimum(own_lowest, values)
            value, particle = own_lowest.min(dim=0)
            idle = torch.where(value < lowest, 0, idle + 1)
            best, lowest = own_best[particle, torch.arange(len(x), device=x.device)], value
            broken = lowest < 0
            rest = index if self.all_steps else (~broken).nonzero().squeeze(1)
            if len(rest) < len(broken):
                final.index_copy_(0, index, model.clamp(x + best))  # written again where the swarm continues
                queries[index] = torch.where(broken, (step + 1) * self.num_particles, queries[index])
                index, x, y, best, lowest, idle = (t[rest] for t in (index, x, y, best, lowest, idle))
                draws = draws.rows(rest)
                places, velocities, own_best, own_lowest = (
                    t[:, rest] for t in (places, velocities, own_best, own_lowest)
                )
                if len(index) == 0:
                    break
            fresh = draws.stream(step)
            velocities = self._accelerate(velocities, places, own_best, best, step, fresh)
            places = (places + velocities).clamp_(-self.eps, self.eps)
            lost = (idle >= self.patience).nonzero().squeeze(1)
            if len(lost):
                places[:, lost] = self._scatter(x[lost], fresh.rows(lost))
                velocities[:, lost], own_lowest[:, lost] = 0.0, torch.inf
                places[0, lost], idle[lost] = best[lost], 0
        final.index_copy_(0, index, model.clamp(x + best))
        return final, queries, index

    def _scatter(self, x: Tensor, draws: Draws) -> Tensor:
        """Draw perturbations, one for each particle and sample."""
        shape = self.num_particles, *x.shape[1:]
        return draws.uniform(2, shape, -self.eps, self.eps, x.dtype).transpose(0, 1).contiguous()

    def _accelerate(
        self, velocities: Tensor, places: Tensor, own_best: Tensor, best: Tensor, step: int, draws: Draws
    ) -> Tensor:
        first, last = self.inertia
        inertia = first + (last - first) * step / max(self.steps - 1, 1)
        velocities = inertia * velocities
        shape = self.num_particles, *places.shape[2:]
        for number, (weight, goal) in enumerate(zip(self.attraction, (own_best, best), strict=True)):
            share = draws.uniform(number, shape, dtype=places.dtype).transpose(0, 1)
            velocities += weight * share * (goal - places)
        return velocities.clamp_(-self.eps, self.eps)

    def _objective(self, model: Classifier, x: Tensor, y: Tensor) -> Tensor:
        value = margin(model(x), y)
        return -value if self.targeted else value
