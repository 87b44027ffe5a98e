"""The attack of adversarial training: from the arguments of a user to adversarial inputs, and overfitting to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_robustness._arguments import check_flag, check_number
from lightning_robustness._isolation.draws import Draws
from lightning_robustness._isolation.sandbox import sandbox
from lightning_robustness._processes import rank_zero_warn
from lightning_robustness.attacks import PGD, Attack, Cascade, get_attack
from lightning_robustness.attacks._classifier import Classifier, open_classifier
from lightning_robustness.attacks.attack import budgets_of, check_budgets, craft
from lightning_robustness.input_space import InputSpace, check_normalized, clip

# Share of values that may be outside of the range by an overshoot
_FEW = 0.1
# Number of steps of the attack that looks for overfitting to a single one
MANY_STEPS = 5
# How far accuracy under many steps must fall
_FALL = 0.2


def make_inner_attacks(
    attack: str | Callable[..., Any],
    eps: float | None,
    budgets: Sequence[float] | None,
    steps: int | None,
    alpha: float | None,
    all_steps: bool,
    input_space: InputSpace,
) -> list[Callable[..., Any]]:
    """Get an attack to train against for each of the budgets, or for the only one."""
    check_flag("all_steps", all_steps)
    if eps is not None:
        check_number("eps", eps)
    if budgets is not None:
        _check_list(budgets, eps)
    given = [{"eps": size, "steps": steps, "alpha": alpha} for size in ([eps] if budgets is None else budgets)]
    options = [{name: value for name, value in own.items() if value is not None} for own in given]
    attacks = [_make(attack, own, all_steps, input_space) for own in options]
    attacking = [attack for attack, own in zip(attacks, options, strict=True) if own.get("eps") != 0]
    check_budgets(attacking or attacks, input_space)
    return attacks


def _check_list(budgets: Any, eps: float | None) -> None:
    if isinstance(budgets, str) or not isinstance(budgets, Sequence) or not budgets:
        raise ValueError(f"Expected argument `budgets` to be a list of numbers, one per epoch, but got {budgets!r}.")
    if eps is not None:
        raise ValueError(f"Expected `eps` or `budgets` but got both, {eps!r} and {list(budgets)}. Leave one out.")
    for budget in budgets:
        check_number("budgets", budget)


def _make(
    attack: str | Callable[..., Any], options: dict[str, Any], all_steps: bool, input_space: InputSpace
) -> Callable[..., Any]:
    if isinstance(attack, str) and attack == "fast":
        eps = options.get("eps", PGD.eps)
        made = get_attack("pgd", **{"steps": 1, "eps": eps, "alpha": 1.25 * eps} | options)
    else:
        made = get_attack(attack, **options) if isinstance(attack, str) else _change(get_attack(attack), options)
    made = _prepare(made, all_steps)
    if "eps" in options and not any(budgets_of(made, input_space)):
        raise ValueError(f"Expected an attack that has a budget, for `eps`, but got {made!r}. Leave `eps` out.")
    return made


def _change(attack: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    known = [field.name for field in fields(attack)] if isinstance(attack, Attack) else []
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(
            f"Expected an attack that takes {', '.join(unknown)} but got {attack!r}, which does not. Set it where the "
            "attack is made."
        )
    return replace(attack, **options) if isinstance(attack, Attack) else attack


def _prepare(attack: Callable[..., Any], all_steps: bool) -> Callable[..., Any]:
    if getattr(attack, "targeted", False):
        raise ValueError(f"Expected an attack that is not targeted, since it gets the true labels, but got {attack!r}.")
    if isinstance(attack, Cascade):
        attack = replace(attack, attacks=tuple(_prepare(part, all_steps) for part in attack.attacks))
    return replace(attack, all_steps=all_steps) if isinstance(attack, Attack) else attack


def perturb(
    attack: Callable[..., Any],
    forward: Callable[..., Any],
    x: Tensor,
    y: Tensor,
    space: InputSpace,
    seed: int,
    index: int,
    eval_mode: bool,
    is_checked: bool,
) -> tuple[Tensor, Tensor | float]:
    """Attack a batch of training; return adversarial inputs, and the share of samples without finite gradients."""
    if is_checked or not isinstance(attack, Attack):
        with open_classifier(forward, x, y, space, seed, index, eval_mode, precise=False) as (classifier, x, y):
            return craft(attack, classifier, x, y).x_adv, _share(classifier)
    # The same without checks, whose results would have to come from the device, and without a copy of the inputs
    with sandbox(forward, y, seed=seed, index=index, eval_mode=eval_mode, precise=False) as (y,):
        x, rows = x.detach(), torch.arange(len(x), device=x.device)
        classifier = Classifier(forward, space, x, -1, Draws(rows, seed, index))
        x_adv = attack.perturb(classifier, classifier.unnormalize(x), y.long()).x_adv
        return classifier.normalize(x_adv), _share(classifier)


def _share(classifier: Classifier) -> Tensor | float:
    return 0.0 if classifier.nonfinite is None else classifier.nonfinite.float().mean()


class Clipping:
    """Values a little outside of the range, put into it: augmentation may produce some, hours into a run."""

    def __init__(self, space: InputSpace, key: str) -> None:
        self.space, self.key = space, key
        self._is_first = True
        self._has_warned = False

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the inputs, and the share that was outside; a first batch that is evidently in another space fails."""
        is_first, self._is_first = self._is_first, False
        if is_first:
            check_normalized(self.space, x)
        try:
            self.space.check(x)
        except ValueError:
            clipped, outside = clip(self.space, x)
            if is_first and self._is_mistaken(x, outside):
                raise
        else:
            return x, 0.0
        self.space.check(clipped)
        if not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"Some inputs of a training batch leave the range [{self.space.low}, {self.space.high}], as "
                f"augmentation can make them. They are clipped for the attack; `{self.key}` has their share."
            )
        return clipped, outside.flatten(1).any(dim=1).float().mean()

    def _is_mistaken(self, x: Tensor, outside: Tensor) -> bool:
        """Return whether more than a few values are outside, or their mean is."""
        mean, low, high = self.space.unnormalize(x).mean(), self.space.low, self.space.high
        center = mean if low is None and high is None else mean.clamp(low, high)
        return bool(outside.float().mean() > _FEW) or bool(center != mean)


@dataclass
class CatastrophicOverfitting:
    """Sign of catastrophic overfitting: accuracy under many attack steps falls, accuracy under one step does not.

    If the budget changes, the comparison starts over, since a larger budget lowers both accuracies.
    """

    single: float | None = None
    multi: float = 0.0
    eps: float | None = None
    seen: bool = False

    def update(self, single: float, multi: float, eps: float | None = None) -> bool:
        """Compare the accuracies of an epoch at its budget, and return whether it shows the sign."""
        is_there = self.single is not None and single >= self.single and multi <= self.multi - _FALL
        if not is_there and (self.single is None or multi >= self.multi or eps != self.eps):
            self.single, self.multi, self.eps = single, multi, eps
        self.seen = self.seen or is_there
        return is_there

    def watch(self, trainer: Trainer, single: float, multi: float, eps: float, checkpoint: str | None = None) -> bool:
        """Update at the end of an epoch, warn the first time the sign is there, and keep a checkpoint until then."""
        was_seen, is_there = self.seen, self.update(single, multi, eps)
        if is_there and not was_seen:
            rank_zero_warn(
                f"Catastrophic overfitting: at the end of epoch {trainer.current_epoch}, accuracy under the one step "
                f"that this run trains against is {single:.0%}, after {self.single:.0%} in an earlier epoch, but "
                f"{multi:.0%}, after {self.multi:.0%}, under PGD with {MANY_STEPS} steps: the network has learned "
                "to defeat the one step. Train against several (`attack='pgd'`), or with a smaller `eps` or `alpha`."
                + (f" A checkpoint of the last epoch before is in {checkpoint}." if checkpoint is not None else "")
            )
        has_fallen = multi <= self.multi - _FALL
        if checkpoint is not None and not self.seen and not has_fallen:
            trainer.save_checkpoint(checkpoint)
        return is_there
