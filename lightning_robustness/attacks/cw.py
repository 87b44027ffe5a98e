from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from lightning_robustness._arguments import check_integer, check_number
from lightning_robustness.attacks._classifier import Classifier
from lightning_robustness.attacks._steps import as_column, l2_norm, nonzero
from lightning_robustness.attacks.attack import Attack, Norm, Perturbation
from lightning_robustness.attacks.ddn import DDN, Closest, Goal, retreat, search

# The share of the box in which the published attack starts, as in its authors' code: the ends lie at infinity
_STARTING_SHARE = 0.999999
# The box of the search from a DDN start is wider than the range by this factor, and clamped to the range: pixels at the
# ends of the range move as the others do
_WIDENING = 2.0


@dataclass(frozen=True, kw_only=True, repr=False)
class CW(Attack):
    r"""The attack of Carlini and Wagner in the l2 norm, as published.

    .. math:: \min_w \|x(w) - x\|_2^2 + c \, \max(m(x(w)), -\kappa), \qquad m = z_y - \max_{k \ne y} z_k

    By Adam from the input, where :math:`x(w)` is a scaled tanh that keeps inputs in their range, :math:`z` are the
    logits and :math:`m` is their margin, negated in targeted mode. Distances are in units of the range, so that
    :math:`c` means the same for pixels up to 1 and up to 255. The weight has to fit the scale of the logits: with a
    fixed one the attack breaks few samples of a robust network, and :class:`MinimumNormCW` is the one to judge it by.

    It has no budget, and every sample takes all steps. Each sample keeps the closest of the images that succeed;
    without one, the input.

    The tanh reaches the ends of the range at infinity. As in the authors' code, inputs are scaled by 0.999999 towards
    the middle of the range first: a pixel at exactly 0 or 1 moves, but by less than 1e-5 in 50 steps of 0.01.

    Args:
        c: Weight of the margin; with binary search, the first one that is tried.
        kappa: Margin by which the wrong class has to win.
        steps: Number of steps, each one gradient; with binary search, for each weight.
        lr: Learning rate.
        binary_search_steps: Number of weights that are tried for each sample: larger by a factor of 10 until one
            succeeds, then halfway between the largest that failed and the smallest that succeeded. 1 for no search.
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

    norm: ClassVar[Norm] = "l2"

    c: float = 1.0
    kappa: float = 0.0
    steps: int = 50
    lr: float = 0.01
    binary_search_steps: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("kappa", self.kappa)
        for name in ("c", "lr"):
            check_number(name, getattr(self, name), exclusive=True)
        for name in ("steps", "binary_search_steps"):
            check_integer(name, getattr(self, name), minimum=1)

    def perturb(self, model: Classifier, x: Tensor, y: Tensor) -> Perturbation:
        """Attack all samples of a batch, within a sandbox."""
        goal, box = Goal(model, self.targeted, self.kappa), _Box(model, start=_STARTING_SHARE)
        first = Closest(x, x.new_full((len(x),), torch.inf), torch.zeros_like(y))
        found = self._search_weights(goal, box, x, y, first)
        return Perturbation(found.x_adv, found.queries)

    def _search_weights(
        self, goal: Goal, box: "_Box", x: Tensor, y: Tensor, first: Closest, from_closest: bool = False
    ) -> Closest:
        """Minimise for one weight after the other, each from the first images or from the closest so far."""
        found = first
        c = torch.full_like(found.distance, self.c)
        failed, succeeded = torch.zeros_like(c), torch.full_like(c, torch.inf)
        for _ in range(self.binary_search_steps):
            closest, distance = self._descend(goal, box, x, y, c, found if from_closest else first)
            closer = distance < found.distance
            found = found._replace(
                x_adv=torch.where(as_column(closer, x), closest, found.x_adv),
                distance=torch.minimum(distance, found.distance),
                queries=found.queries + self.steps,
            )
            is_enough = distance.isfinite()
            failed, succeeded = torch.where(is_enough, failed, c), torch.where(is_enough, c, succeeded)
            c = torch.where(succeeded.isinf(), 10 * c, (failed + succeeded) / 2)
        return found

    def _descend(
        self, goal: Goal, box: "_Box", x: Tensor, y: Tensor, c: Tensor, start: Closest
    ) -> tuple[Tensor, Tensor]:
        """Minimise for one weight per sample; return the closest successes and their distances."""
        w, weight = box.inverse(start.x_adv), as_column(c, x)
        adam = torch.optim.Adam([w], lr=self.lr)
        closest = x
        distance = torch.full_like(start.distance, torch.inf)
        for step in range(self.steps):
            x_adv, derivative = box(w)
            logits, gradient = goal.model.gradient(x_adv, partial(goal.weights, y=y))
            delta = x_adv - x
            deficit = goal.deficit(logits, y)
            size = l2_norm(delta)
            closer = (deficit <= 0) & (size.flatten() < distance)
            closest = torch.where(as_column(closer, x), x_adv, closest)
            distance = torch.where(closer, size.flatten(), distance)
            if step == 0:
                # At the closest point of the boundary, 2 |delta| / |gradient of the margin| is the exact multiplier
                balance = 2 * size / box.width**2 / nonzero(l2_norm(gradient))
                weight = torch.where(as_column(start.succeeded, x) & (size > 0), balance * weight, weight)
            push = torch.where(as_column(deficit > 0, x), weight, 0.0)
            w.grad = torch.addcmul(delta.mul_(2 / box.width**2), gradient, push, value=-1).mul_(derivative)
            adam.step()
        return closest, distance


@dataclass(frozen=True, kw_only=True, repr=False)
class MinimumNormCW(CW):
    """The objective of Carlini and Wagner from the image that a short search by :class:`DDN` finds.

    It breaks samples of robust networks too, where :class:`CW` needs a weight that fits the logits: from that image,
    ``c`` is relative to the weight that balances both terms, so that nothing depends on the scale of the logits. Where
    the search has no success, it starts from the input and uses ``c`` unscaled. The box of the tanh is twice as wide
    as the range, and clamped to it: pixels at the ends of the range move. At the end, bisection moves each image back
    towards its input. It has no budget, and every sample takes all steps.

    Args:
        c: Weight of the margin; with binary search, the first one that is tried.
        kappa: Margin by which the wrong class has to win.
        steps: Number of steps, each one gradient; with binary search, for each weight.
        lr: Learning rate.
        binary_search_steps: Number of weights that are tried for each sample, as in :class:`CW`, each from the closest
            image so far.
        initial_steps: Number of steps of the search by DDN, each one gradient.
        targeted: Whether ``y`` holds the labels to be predicted after the attack, instead of the true labels.
        all_steps: Whether every sample goes through every step, also those that are misclassified before the attack.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> import torch
        >>> from lightning_robustness.attacks import MinimumNormCW
        >>> model = torch.nn.Linear(2, 2)
        >>> model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
        >>> MinimumNormCW(steps=5)(model, torch.tensor([[1.0, 0.0]]), torch.tensor([0])).round(decimals=2)
        tensor([[0.5000, 0.5000]])

    """

    initial_steps: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("initial_steps", self.initial_steps, minimum=1)

    @property
    def passes(self) -> int:
        """Largest number of passes with gradients; a few without follow."""
        return self.initial_steps + self.steps * self.binary_search_steps

    def perturb(self, model: Classifier, x: Tensor, y: Tensor) -> Perturbation:
        """Attack all samples of a batch, within a sandbox."""
        goal, box = Goal(model, self.targeted, self.kappa), _Box(model, widening=_WIDENING)
        first, _ = search(goal, x, y, self.initial_steps, DDN.gamma)
        found = self._search_weights(goal, box, x, y, first, from_closest=True)
        return retreat(goal, x, y, found)


class _Box:
    """The change of variables: inputs in their range as a function of variables without one.

    It is wider than the range by a factor, and variables stand for inputs in a share of the box around its middle.
    """

    def __init__(self, model: Classifier, widening: float = 1.0, start: float = 1.0) -> None:
        self.model, self.width, self.middle = model, 1.0, 0.0
        self.is_bounded = model.low is not None and model.high is not None
        if model.low is not None and model.high is not None:
            self.width, self.middle = model.high - model.low, (model.high + model.low) / 2
        self.scale, self.start = widening * self.width / 2, start

    def __call__(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs, and their derivative."""
        if not self.is_bounded:
            return self.model.clamp(w), torch.ones_like(w)
        tanh = w.tanh()
        return self.model.clamp(self.middle + self.scale * tanh), self.scale * (1 - tanh.square())

    def inverse(self, x: Tensor) -> Tensor:
        return torch.atanh(self.start * (x - self.middle) / self.scale) if self.is_bounded else x.clone()
