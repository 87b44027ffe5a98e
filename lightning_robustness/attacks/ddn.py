import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_robustness._arguments import check_integer, check_share
from lightning_robustness.attacks._classifier import Classifier
from lightning_robustness.attacks._steps import as_column, l2_norm, margin, margin_gradient, nonzero
from lightning_robustness.attacks.attack import Attack, Norm, Perturbation

# The search comes from outside: it starts at this many times the distance to the boundary of the linearised model, but
# not beyond this share of the diameter of the range, with steps that fall from and to these shares of the first norm.
_FIRST_NORM, _LARGEST_NORM = 5.0, 0.3
_FIRST_STEP, _LAST_STEP = 1.0, 0.002
# Change of the norm in the last step
_LAST_GAMMA = 0.001
# Sharpness of the softmax over the rivals in the first and the last step, for logits with a spread of 1
_FIRST_SHARPNESS, _LAST_SHARPNESS = 5.0, 200.0
_RETREAT_STEPS = 6
_RANDOM_IMAGES = 8


@dataclass(frozen=True, kw_only=True, repr=False)
class DDN(Attack):
    r"""Decoupled direction and norm, which looks for the smallest perturbation in the l2 norm that succeeds.

    .. math:: \delta \leftarrow \epsilon \frac{\delta + \alpha \, g / \|g\|}{\|\delta + \alpha \, g / \|g\|\|}

    Where :math:`g` is the gradient of the other classes' logits, weighted by their softmax, less the label's, and
    :math:`\epsilon` the norm, which shrinks by a share :math:`\gamma` while the attack succeeds and grows by it while
    it does not (Rony et al., 2019). As in FMN (Pintor et al., 2021), :math:`\gamma` falls over the steps as
    :math:`\alpha` does. The search begins outside of the boundary, at several times its distance in the linearised
    model, and the softmax sharpens over the steps: both find closer images on robust networks. It divides the logits by
    their spread, so that nothing depends on their scale. At the end, bisection moves each image back towards its input.

    It has no budget, and every sample takes all steps. Where no gradient leads to success, random images are tried;
    without success, the input comes back.

    Args:
        steps: Number of steps, each one gradient.
        gamma: Share by which the norm changes in the first steps.
        targeted: Whether ``y`` holds the labels to be predicted after the attack, instead of the true labels.
        all_steps: Whether samples that are misclassified before the attack go through it too; it does not change them.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> import torch
        >>> from lightning_robustness.attacks import DDN
        >>> model = torch.nn.Linear(2, 2)
        >>> model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
        >>> DDN(steps=20)(model, torch.tensor([[0.75, 0.25]]), torch.tensor([0])).round(decimals=2)
        tensor([[0.5000, 0.5000]])

    """

    norm: ClassVar[Norm] = "l2"

    steps: int = 100
    gamma: float = 0.35

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("steps", self.steps, minimum=1)
        check_share("gamma", self.gamma)

    def perturb(self, model: Classifier, x: Tensor, y: Tensor) -> Perturbation:
        """Attack all samples of a batch, within a sandbox."""
        goal = Goal(model, self.targeted)
        found, zero_gradients = search(goal, x, y, self.steps, self.gamma)
        return retreat(goal, x, y, found)._replace(zero_gradients=zero_gradients)


@dataclass(frozen=True)
class Goal:
    """Criterion of success: the margin by which another class, or the target, has to win."""

    model: Classifier
    targeted: bool
    kappa: float = 0.0

    def deficit(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return how far the attack is behind: the margin, and what rounding may take from it in another batch."""
        deficit = (-margin(logits, y) if self.targeted else margin(logits, y)) + self.kappa
        precision = torch.finfo(self.model.dtype)
        # Kernels for half precision sum in single precision, and round once
        units = 4 if precision.bits == 16 else 32
        return deficit + units * precision.eps * logits.abs().amax(dim=1)

    def weights(self, logits: Tensor, y: Tensor, sharpness: float = math.inf) -> Tensor:
        """Return the gradient of what the attack wants to grow, with respect to the logits.

        It grows a weighted mean of the rivals less the label. The weights are the softmax of the rivals, divided by the
        spread of the logits and multiplied by the sharpness: the best rival alone, if the sharpness is infinite.
        """
        if math.isinf(sharpness):
            gradient = margin_gradient(logits, y)
        else:
            rivals = logits.scatter(1, y.unsqueeze(1), -torch.inf)
            spread = logits.amax(dim=1, keepdim=True) - logits.amin(dim=1, keepdim=True)
            spread = spread.clamp(min=sharpness * torch.finfo(spread.dtype).tiny)  # the quotient stays finite
            shares = ((rivals - rivals.amax(dim=1, keepdim=True)) * (sharpness / spread)).softmax(dim=1)
            gradient = shares.scatter(1, y.unsqueeze(1), -1.0)
        return -gradient if self.targeted else gradient


class Closest(NamedTuple):
    """Closest image that succeeds for each sample (the input without one), its distance, and the cost."""

    x_adv: Tensor
    distance: Tensor
    queries: Tensor

    @property
    def succeeded(self) -> Tensor:
        """Return whether there is a success."""
        return self.distance.isfinite()


def search(goal: Goal, x: Tensor, y: Tensor, steps: int, gamma: float) -> tuple[Closest, Tensor]:
    """Run DDN without the bisection at the end; tell which first gradients were zero, too."""
    model, draws = goal.model, goal.model.draws
    x_adv = x
    closest = x
    distance = x.new_full((len(x),), torch.inf)
    zero_gradients, norm, step_size = torch.zeros_like(y, dtype=torch.bool), torch.zeros(()), torch.zeros(())
    for step in range(steps):
        decay, sharpness = (1 + math.cos(math.pi * step / steps)) / 2, _sharpness(step, steps)
        logits, gradient = model.gradient(x_adv, partial(goal.weights, y=y, sharpness=sharpness))
        deficit, size = goal.deficit(logits, y), l2_norm(x_adv - x).flatten()
        closer = (deficit <= 0) & (size < distance)
        closest = torch.where(as_column(closer, x), x_adv, closest)
        distance = torch.where(closer, size, distance)
        if step == 0:
            norm, zero_gradients = _first_norm(model, x, deficit, gradient), ~gradient.flatten(1).any(dim=1)
            step_size = norm
        else:
            share = _LAST_GAMMA + (gamma - _LAST_GAMMA) * decay
            shrunk = torch.minimum(norm, as_column(distance, x)) * (1 - share)
            norm = torch.where(as_column(deficit <= 0, x), shrunk, norm * (1 + share))
        if (is_zero := ~gradient.flatten(1).any(dim=1)).any():
            gradient[is_zero] = draws.rows(is_zero).normal(step, x.shape[1:], x.dtype)
        length = step_size * (_LAST_STEP + (_FIRST_STEP - _LAST_STEP) * decay)
        delta = x_adv - x + gradient * (length / nonzero(l2_norm(gradient)))
        x_adv = model.clamp(x + delta * (norm / nonzero(l2_norm(delta))))
    found = Closest(closest, distance, torch.full_like(y, steps))
    return _try_random_images(goal, x, y, found, steps), zero_gradients


@torch.no_grad()
def retreat(goal: Goal, x: Tensor, y: Tensor, found: Closest) -> Perturbation:
    """Move back towards the inputs by bisection, as far as the attack still succeeds: steps overshoot."""
    if not found.succeeded.any():
        return Perturbation(found.x_adv, found.queries)
    # All samples, also those without success: in a batch of another size, other kernels round in other ways
    failed = as_column(torch.zeros_like(found.distance), x)
    succeeded = torch.ones_like(failed)
    for _ in range(_RETREAT_STEPS):
        share = (failed + succeeded) / 2
        logits = goal.model(goal.model.clamp(torch.lerp(x, found.x_adv, share)))
        succeeds = as_column(goal.deficit(logits, y) <= 0, x)
        failed, succeeded = torch.where(succeeds, failed, share), torch.where(succeeds, share, succeeded)
    x_adv = torch.where(succeeded == 1, found.x_adv, goal.model.clamp(torch.lerp(x, found.x_adv, succeeded)))
    return Perturbation(x_adv, found.queries + _RETREAT_STEPS * found.succeeded.long())


def _sharpness(step: int, steps: int) -> float:
    # The first gradient is the margin's, so it also gives the distance to the boundary of the linearised model
    if step == 0:
        return math.inf
    return float(_FIRST_SHARPNESS * (_LAST_SHARPNESS / _FIRST_SHARPNESS) ** (step / max(steps - 1, 1)))


def _first_norm(model: Classifier, x: Tensor, deficit: Tensor, gradient: Tensor) -> Tensor:
    linear = as_column(deficit.abs(), x) / nonzero(l2_norm(gradient))
    if model.low is None or model.high is None:  # only a bound for where the gradient is zero
        return torch.minimum(_FIRST_NORM * linear, 100 * l2_norm(x).clamp(min=1.0))
    return (_FIRST_NORM * linear).clamp(max=_LARGEST_NORM * (model.high - model.low) * math.sqrt(x[0].numel()))


@torch.no_grad()
def _try_random_images(goal: Goal, x: Tensor, y: Tensor, found: Closest, stream: int) -> Closest:
    """Try random images within the range for samples without success, the last resort where gradients mislead."""
    model, (x_adv, distance, queries) = goal.model, found
    if model.low is None or model.high is None:
        return found
    for attempt in range(_RANDOM_IMAGES):
        rows = distance.isinf().nonzero().squeeze(1)
        if len(rows) == 0:
            break
        draws = model.draws.rows(rows).stream(stream)
        images = model.clamp(draws.uniform(attempt, x.shape[1:], model.low, model.high, x.dtype))
        succeeds = goal.deficit(model(images), y[rows]) <= 0
        queries = queries.index_add(0, rows, torch.ones_like(rows))
        rows, images = rows[succeeds], images[succeeds]
        x_adv = x_adv.index_copy(0, rows, images)
        distance = distance.index_copy(0, rows, l2_norm(images - x[rows]).flatten())
    return Closest(x_adv, distance, queries)
