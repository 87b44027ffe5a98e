from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_robustness.attacks.attack import Attack, Perturbation
from lightning_robustness.attacks.classifier import Classifier
from lightning_robustness.attacks.ddn import DDN, RETREAT_STEPS, Found, Goal, retreat, search
from lightning_robustness.attacks.norms import l2_norm, nonzero
from lightning_robustness.utilities.checks import check_integer, check_number

# The change of variables maps onto a box that is wider than the range by this factor, and is clamped to the range:
# with 1, pixels at the ends of the range would lie at infinity and never move.
_WIDENING = 2.0


@dataclass(frozen=True, kw_only=True, repr=False)
class CW(Attack):
    r"""The attack of Carlini and Wagner in the l2 norm, which looks for the smallest perturbation that succeeds.

    .. math:: \min_w \|x(w) - x\|_2^2 + c \, \max(m(x(w)), -\kappa), \qquad m = z_y - \max_{k \ne y} z_k

    By Adam, where :math:`x(w)` is a scaled tanh that keeps inputs in their range, :math:`z` are the logits and
    :math:`m` is their margin, negated in targeted mode. Adam starts from the image that a short search by
    :class:`DDN` finds, which succeeds on robust networks too, and there :math:`c` is relative to the weight that
    balances both terms: nothing depends on the scale of the logits. Where that search has no success, and with
    ``initial_steps=0``, it is the published attack, which starts from the input and takes :math:`c` as it is. Distances
    are in units of the range, so that :math:`c` means the same for pixels up to 1 and up to 255.

    It has no budget, and every sample takes all steps. Of the images that succeed, each sample keeps the closest, moved
    back towards the input by bisection; without one, the input.

    Args:
        c: Weight of the margin; with binary search, the first one that is tried.
        kappa: Margin by which the wrong class has to win.
        steps: Number of steps, each one gradient; with binary search, for each weight.
        lr: Learning rate.
        binary_search_steps: Number of weights that are tried for each sample: larger by a factor of 10 until one
            succeeds, then halfway between the largest that failed and the smallest that succeeded. 1 for no search.
        initial_steps: Number of steps of the search that Adam starts from, each one gradient; 0 for the published
            attack, which breaks few samples of a robust network unless the weight fits its logits.
        targeted: Whether ``y`` holds the labels to be predicted after the attack, instead of the true labels.
        all_steps: Whether every sample goes through every step, also those that are misclassified before the attack.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> import torch
        >>> from lightning_robustness.attacks import CW
        >>> model = torch.nn.Linear(2, 2)
        >>> model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
        >>> x_adv = CW(steps=200)(model, torch.tensor([[0.75, 0.25]]), torch.tensor([0]))
        >>> x_adv.round(decimals=2)
        tensor([[0.5000, 0.5000]])

    """

    c: float = 1.0
    kappa: float = 0.0
    steps: int = 50
    lr: float = 0.01
    binary_search_steps: int = 1
    initial_steps: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("kappa", self.kappa)
        for name in ("c", "lr"):
            check_number(name, getattr(self, name), exclusive=True)
        for name in ("steps", "binary_search_steps"):
            check_integer(name, getattr(self, name), minimum=1)
        check_integer("initial_steps", self.initial_steps, minimum=0)

    def perturb(self, model: Classifier, x: Tensor, y: Tensor, active: Tensor) -> Perturbation:
        """Attack the active samples of a batch, given by their indices, within a sandbox."""
        goal, (rows, labels) = Goal(model, self.targeted, self.kappa), (x[active], y[active])
        found = first = self._first(goal, rows, labels, active)
        c = torch.full_like(found.distance, self.c)
        failed, succeeded = torch.zeros_like(c), torch.full_like(c, torch.inf)
        for _ in range(self.binary_search_steps):
            closest, distance = self._descend(goal, rows, labels, c, found if self.initial_steps else first)
            closer = distance < found.distance
            found = found._replace(
                x_adv=torch.where(closer.reshape(-1, *[1] * (x.ndim - 1)), closest, found.x_adv),
                distance=torch.minimum(distance, found.distance),
                queries=found.queries + self.steps,
            )
            is_enough = distance.isfinite()
            failed, succeeded = torch.where(is_enough, failed, c), torch.where(is_enough, c, succeeded)
            c = torch.where(succeeded.isinf(), 10 * c, (failed + succeeded) / 2)
        x_adv, queries = x.clone(), torch.zeros_like(y)
        x_adv[active] = retreat(goal, rows, labels, found)
        queries[active] = found.queries + RETREAT_STEPS * found.succeeded.long()
        return Perturbation(x_adv, queries)

    def _first(self, goal: Goal, x: Tensor, y: Tensor, active: Tensor) -> Found:
        """Search for the image to start from; without a search, the input."""
        if self.initial_steps:
            return search(goal, x, y, self.initial_steps, DDN.gamma, active)
        nothing = torch.zeros_like(y)
        return Found(x, x.new_full((len(x),), torch.inf), nothing, nothing.bool())

    def _descend(self, goal: Goal, x: Tensor, y: Tensor, c: Tensor, start: Found) -> tuple[Tensor, Tensor]:
        """Minimise for one weight per sample; return the closest successes and their distances."""
        column = (-1, *[1] * (x.ndim - 1))
        box, weight = _Box(goal.model), c.reshape(column)
        w = box.inverse(start.x_adv)
        adam = _Adam(self.lr, w)
        closest, distance = x, torch.full_like(start.distance, torch.inf)
        for step in range(self.steps):
            x_adv, derivative = box(w)
            logits, gradient = goal.model.gradient(x_adv, partial(goal.weights, y=y))
            delta, deficit = x_adv - x, goal.deficit(logits, y)
            size = l2_norm(delta)
            closer = (deficit <= 0) & (size.flatten() < distance)
            closest = torch.where(closer.reshape(column), x_adv, closest)
            distance = torch.where(closer, size.flatten(), distance)
            if step == 0:
                # At the closest point of the boundary, 2 |delta| / |gradient of the margin| is the exact multiplier
                balance = 2 * size / box.width**2 / nonzero(l2_norm(gradient))
                weight = torch.where(start.succeeded.reshape(column) & (size > 0), balance * weight, weight)
            push = torch.where((deficit > 0).reshape(column), weight, 0.0)
            w = adam.step(w, torch.addcmul(delta.mul_(2 / box.width**2), gradient, push, value=-1).mul_(derivative))
        return closest, distance


class _Box:
    """The change of variables: inputs in their range as a function of variables without one."""

    def __init__(self, model: Classifier) -> None:
        self.model, self.width, self.middle = model, 1.0, 0.0
        self.is_bounded = model.low is not None and model.high is not None
        if model.low is not None and model.high is not None:
            self.width, self.middle = model.high - model.low, (model.high + model.low) / 2

    def __call__(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs, and their derivative."""
        if not self.is_bounded:
            return self.model.clamp(w), torch.ones_like(w)
        scale, tanh = _WIDENING * self.width / 2, w.tanh()
        return self.model.clamp(self.middle + scale * tanh), scale * (1 - tanh.square())

    def inverse(self, x: Tensor) -> Tensor:
        return torch.atanh((x - self.middle) / (_WIDENING * self.width / 2)) if self.is_bounded else x.clone()


class _Adam:
    """Adam, on tensors without a graph."""

    def __init__(self, lr: float, like: Tensor, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        self.lr, self.betas, self.count = lr, betas, 0
        self.mean, self.square = torch.zeros_like(like), torch.zeros_like(like)

    def step(self, w: Tensor, gradient: Tensor) -> Tensor:
        self.count += 1
        self.mean.lerp_(gradient, 1 - self.betas[0])
        self.square.mul_(self.betas[1]).addcmul_(gradient, gradient, value=1 - self.betas[1])
        bias = 1 - self.betas[0] ** self.count, (1 - self.betas[1] ** self.count) ** 0.5
        return w.addcdiv(self.mean, self.square.sqrt().div_(bias[1]).add_(1e-8), value=-self.lr / bias[0])
