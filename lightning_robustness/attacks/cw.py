from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_robustness.attacks.attack import Attack, Perturbation
from lightning_robustness.attacks.classifier import Classifier
from lightning_robustness.attacks.objective import margin, margin_gradient
from lightning_robustness.utilities.checks import check_integer, check_number

# The change of variables maps onto a box that is wider than the range by this factor, and is clamped to the range:
# with 1, pixels at the ends of the range would lie at infinity and never move.
_WIDENING = 2.0
_RETREAT_STEPS = 6


@dataclass(frozen=True, kw_only=True, repr=False)
class CW(Attack):
    r"""The attack of Carlini and Wagner in the l2 norm, which looks for the smallest perturbation that succeeds.

    .. math:: \min_w \|x(w) - x\|_2^2 + c \, \max(m(x(w)), -\kappa), \qquad m = z_y - \max_{k \ne y} z_k

    By Adam, where :math:`x(w)` is a scaled tanh that keeps inputs in their range, :math:`z` are the logits and
    :math:`m` is their margin, negated in targeted mode. Distances are in units of the range, so that :math:`c` means
    the same for pixels up to 1 and up to 255. A sample whose objective has stopped falling leaves the batch. It has no
    budget: of the images that succeed, each sample keeps the closest; without one, the input.

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

    c: float = 1.0
    kappa: float = 0.0
    steps: int = 50
    lr: float = 0.01
    binary_search_steps: int = 1

    def __post_init__(self) -> None:
        check_number("kappa", self.kappa)
        for name in ("c", "lr"):
            check_number(name, getattr(self, name), exclusive=True)
        for name in ("steps", "binary_search_steps"):
            check_integer(name, getattr(self, name), minimum=1)

    def perturb(self, model: Classifier, x: Tensor, y: Tensor, active: Tensor) -> Perturbation:
        """Attack the active samples of a batch, given by their indices, within a sandbox."""
        closest, distance, queries = x.clone(), x.new_full((len(active),), torch.inf), torch.zeros_like(y)
        c, failed, succeeded = torch.full_like(distance, self.c), torch.zeros_like(distance), distance
        for _ in range(self.binary_search_steps):
            candidate, candidate_distance, used = self._descend(model, x[active], y[active], c)
            closer = candidate_distance < distance
            closest[active[closer]] = candidate[closer]
            distance = torch.minimum(distance, candidate_distance)
            queries[active] += used
            found = candidate_distance.isfinite()
            failed, succeeded = torch.where(found, failed, c), torch.where(found, c, succeeded)
            c = torch.where(succeeded.isinf(), 10 * c, (failed + succeeded) / 2)
        found = active[distance.isfinite()]
        closest[found] = self._retreat(model, x[found], y[found], closest[found])
        queries[found] += _RETREAT_STEPS
        return Perturbation(closest, queries)

    @torch.no_grad()
    def _retreat(self, model: Classifier, x: Tensor, y: Tensor, x_adv: Tensor) -> Tensor:
        """Move back towards the inputs by bisection, as far as the attack still succeeds: Adam's steps overshoot."""
        failed, succeeded = x.new_zeros(len(x), *[1] * (x.ndim - 1)), x.new_ones(len(x), *[1] * (x.ndim - 1))
        for _ in range(_RETREAT_STEPS if len(x) else 0):
            share = (failed + succeeded) / 2
            succeeds = (self._deficit(model, model(torch.lerp(x, x_adv, share)), y) <= -self.kappa).reshape(share.shape)
            failed, succeeded = torch.where(succeeds, failed, share), torch.where(succeeds, share, succeeded)
        return torch.where(succeeded == 1, x_adv, torch.lerp(x, x_adv, succeeded))

    def _descend(self, model: Classifier, x: Tensor, y: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Minimise for one weight per sample; return the closest successes, their distances, and the cost."""
        box, index = _Box(model), torch.arange(len(x), device=x.device)
        w = box.inverse(x)
        adam = _Adam(self.lr, w)
        closest, distance, queries = x.clone(), torch.full_like(c, torch.inf), torch.full_like(y, self.steps)
        loss, last_loss, window = distance, distance, max(self.steps // 10, 1)
        may_leave = self.binary_search_steps > 1 and not self.all_steps
        for step in range(self.steps):
            x_adv, derivative = box(w)
            logits, gradient = model.gradient(x_adv, partial(self._weights, y=y))
            deficit = self._deficit(model, logits, y)
            delta = (x_adv - x) / box.width
            squared = delta.flatten(1).square().sum(dim=1)
            closer = (deficit <= -self.kappa) & (squared < distance[index])
            closest[index[closer]], distance[index[closer]] = x_adv[closer], squared[closer]
            loss = torch.minimum(loss, squared + c * deficit.clamp(min=-self.kappa))
            push = (c * (deficit > -self.kappa)).reshape(-1, *[1] * (x.ndim - 1))
            w = adam.step(w, torch.addcmul(delta.mul_(2 / box.width), gradient, push).mul_(derivative))
            if may_leave and step % window == window - 1:
                falling = (last_loss - loss > 1e-4 * loss.abs()).nonzero().squeeze(1)
                last_loss = loss
                if len(falling) < len(index):
                    queries[index] = step + 1
                    index, x, y, c, w, loss, last_loss = (t[falling] for t in (index, x, y, c, w, loss, last_loss))
                    queries[index] = self.steps
                    adam.keep(falling)
                    if len(index) == 0:
                        break
        return closest, distance, queries

    def _weights(self, logits: Tensor, y: Tensor) -> Tensor:
        gradient = margin_gradient(logits, y)
        return gradient if self.targeted else -gradient

    def _deficit(self, model: Classifier, logits: Tensor, y: Tensor) -> Tensor:
        """Return how far the attack is behind: the margin, and what rounding may take from it in another batch."""
        deficit = -margin(logits, y) if self.targeted else margin(logits, y)
        return deficit + 4 * torch.finfo(model.dtype).eps * logits.abs().amax(dim=1)


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
    """Adam for samples that may leave."""

    def __init__(self, lr: float, like: Tensor, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        self.lr, self.betas, self.count = lr, betas, 0
        self.mean, self.square = torch.zeros_like(like), torch.zeros_like(like)

    def step(self, w: Tensor, gradient: Tensor) -> Tensor:
        self.count += 1
        self.mean.lerp_(gradient, 1 - self.betas[0])
        self.square.mul_(self.betas[1]).addcmul_(gradient, gradient, value=1 - self.betas[1])
        bias = 1 - self.betas[0] ** self.count, (1 - self.betas[1] ** self.count) ** 0.5
        return w.addcdiv(self.mean, self.square.sqrt().div_(bias[1]).add_(1e-8), value=-self.lr / bias[0])

    def keep(self, index: Tensor) -> None:
        self.mean, self.square = self.mean[index], self.square[index]
