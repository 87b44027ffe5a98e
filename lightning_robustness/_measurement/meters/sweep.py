"""Attack samples with increasing budgets, from one budget to the next."""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from lightning_robustness._measurement.meters import Meter
from lightning_robustness._measurement.plan import AttackLike, list_attacks, name_attacks
from lightning_robustness._measurement.subject import Subject
from lightning_robustness._model.access import check_finite
from lightning_robustness._model.batch import Batch
from lightning_robustness._numbers import read_clock, write_settings
from lightning_robustness._processes import rank_zero_warn
from lightning_robustness.attacks import PGD, Attack, Budget, Cascade, budget_of
from lightning_robustness.attacks._classifier import Classifier, open_classifier
from lightning_robustness.attacks._steps import as_column
from lightning_robustness.attacks.attack import Norm, check_budgets, check_size, perturb
from lightning_robustness.attacks.registry import Strength
from lightning_robustness.functional._image_quality import image_quality
from lightning_robustness.input_space import InputSpace, check_input_space

# Least share of an attack's steps that it takes from a warm start: with fewer, accuracy was up to two percentage points
# higher than with independent attacks on some networks, instead of half a point
_WARM_SHARE = 0.4
# Attacks and budgets of the CMMR paper
SWEEP_ATTACKS = ("fgsm", "bim", "pgd", "mifgsm")
SWEEP_BUDGETS = tuple(number / 100 for number in range(1, 21))


def plan_sweep(
    attacks: Iterable[AttackLike] | Mapping[str, AttackLike],
    budgets: Sequence[float],
    input_space: InputSpace | None = None,
    prefix: str = "",
    strength: Strength = "paper",
    norm: Norm = "linf",
) -> list[dict[str, Callable[..., Any]]]:
    """Return attacks by name, one dictionary per budget; names of arguments in messages begin with the prefix."""
    if len(budgets) == 0 or not all(low < high for low, high in zip([0.0, *budgets], budgets, strict=False)):
        raise ValueError(
            f"Expected argument `{prefix}budgets` to hold positive, increasing numbers but got {list(budgets)}."
        )
    try:
        check_size(budgets[0])
    except ValueError as error:
        raise ValueError(
            f"Expected argument `{prefix}budgets` to hold budgets that can change an input in single precision but got "
            f"{budgets[0]}. Pass larger ones, such as {list(SWEEP_BUDGETS[4::5])}."
        ) from error
    argument = f"{prefix}attacks"
    attacks = list_attacks(attacks, argument)
    if len(attacks) == 0:
        raise ValueError(f"Expected argument `{argument}` to hold at least one attack but got none.")
    plan = [
        _at_budget(name_attacks(attacks, budget, strength, norm, argument, is_sweep=True), budget, argument)
        for budget in budgets
    ]
    space = check_input_space(input_space)
    width = 0.0 if space.low is None or space.high is None else space.high - space.low
    if width >= 255 and budgets[-1] < width / 255:
        rank_zero_warn(
            f"All `{prefix}budgets` are below one grey level of inputs in [{space.low:g}, {space.high:g}]: no network "
            f"will look vulnerable. If they are meant for [0, 1], multiply them by {width:g}.",
            stacklevel=1,  # once in a run, not once per caller
        )
        return plan
    try:
        check_budgets(plan[-1].values(), input_space)
    except ValueError as error:
        raise ValueError(f"{error} Change `{prefix}budgets`.") from error
    return plan


def _at_budget(attacks: dict[str, Callable[..., Any]], eps: float, argument: str) -> dict[str, Callable[..., Any]]:
    for name, attack in attacks.items():
        if is_dataclass(attack) and "eps" in (entry.name for entry in fields(attack)):
            attacks[name] = replace(attack, eps=eps)  # type: ignore[type-var]
        budget = budget_of(attacks[name])
        if budget is None or budget.eps != eps:
            raise ValueError(
                f"Expected argument `{argument}` to hold attacks whose budget can be set, by name or as objects such "
                f"as `PGD()`, but got {attack!r}. Leave it out of the sweep."
            )
    return attacks


def describe_sweep(
    plan: Sequence[Mapping[str, Callable[..., Any]]],
    budgets: Sequence[float],
    y: Tensor,
    input_space: InputSpace,
    seed: int,
) -> dict[str, str]:
    """Describe the settings that curves depend on besides the model."""
    low, high = ("none" if bound is None else f"{bound:g}" for bound in (input_space.low, input_space.high))
    mean, std = input_space.mean, input_space.std
    return {
        **{f"{name} at eps = {budgets[0]:g}": write_settings(attack) for name, attack in plan[0].items()},
        "attacked samples": str(len(y)),
        "input range": f"{low} to {high}",
        "normalisation": "none" if mean is None and std is None else f"mean {mean}, std {std}",
        "seed": str(seed),
        "checksum of the labels": f"{zlib.crc32(y.long().cpu().numpy().tobytes()):08x}",
    }


@dataclass(frozen=True)
class SweepMeter(Meter):
    """Attack with one set of attacks per budget, by name.

    Columns, for every attack: the index of the first budget that breaks a sample, -1 if it is wrong anyway; whether it
    is right at each budget; the quality of its images; and seconds.
    """

    size: int
    plan: Sequence[Mapping[str, Callable[..., Any]]]
    warm_starts: bool = True

    name = "sweep"
    title = "sweep"
    label = "the sweep"

    @override
    def measure(self, subject: Subject, batch: Batch) -> Mapping[str, Tensor]:
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        seconds: list[float] = []
        for name in self.plan[0]:
            start = read_clock(subject.device)
            attacks = [attacks[name] for attacks in self.plan]
            found.append(_attack_batch(subject, attacks, batch, self.warm_starts))
            seconds.append((read_clock(subject.device) - start) / len(batch.x))
        first, right, quality = (torch.stack(columns, dim=1) for columns in zip(*found, strict=True))
        return {
            "y": batch.labels(),
            "first": first,
            "right": right,
            "quality": quality,
            "seconds": torch.tensor(seconds, dtype=torch.float64).expand(len(batch.x), -1),
        }


def _attack_batch(
    subject: Subject, attacks: Sequence[Callable[..., Any]], batch: Batch, warm_starts: bool
) -> tuple[Tensor, Tensor, Tensor]:
    forward, input_space = subject.logits_of(batch), subject.input_space
    opened = open_classifier(forward, batch.x, batch.labels(), input_space, subject.seed, positions=batch.positions)
    with opened as (model, x, y):
        with torch.no_grad():
            logits = model.from_normalized(x)
        check_finite(logits)
        is_right = logits.argmax(dim=1) == y
        rights, qualities = [], []
        x, space = model.unnormalize(x), InputSpace(input_space.low, input_space.high)
        for x_adv, right in (_follow if warm_starts else _repeat)(model, attacks, x, y, is_right):
            rights.append(right)
            qualities.append(torch.stack(image_quality(x_adv, x, space), dim=1))
    right = torch.stack(rights, dim=1)
    # The first budget at which a sample is wrong, and the number of budgets where there is none
    first = torch.cat([~right, torch.ones_like(right[:, :1])], dim=1).int().argmax(dim=1)
    return torch.where(is_right, first, -1), right, torch.stack(qualities, dim=1).cpu().double()


def _repeat(
    model: Classifier, attacks: Sequence[Callable[..., Any]], x: Tensor, y: Tensor, is_right: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Attack all samples with each budget anew, to the last step; give the images, and which are right."""
    for attack in attacks:
        x_adv = perturb(_at_full_strength(attack), model, x, y).x_adv
        with torch.no_grad():
            yield x_adv, model(x_adv).argmax(dim=1) == y


def _follow(
    model: Classifier, attacks: Sequence[Callable[..., Any]], x: Tensor, y: Tensor, is_right: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Attack with one budget after the other; give images of full strength, and which samples are not broken yet."""
    x_adv, before, is_right = x, None, is_right.clone()
    for attack in attacks:
        start = x if before is None else _stretch(model, attack, x, x_adv)
        x_adv, active = start.clone(), is_right.nonzero().squeeze(1)
        if len(active):
            x_adv[active] = _advance(model, attack, before, x, y, start, active)
            with torch.no_grad():
                is_right[active] = model(x_adv[active]).argmax(dim=1) == y[active]
        rest = (~is_right).nonzero().squeeze(1)  # which left early, or were not attacked
        if len(rest):
            x_adv[rest] = _advance(model, _at_full_strength(attack), before, x, y, start, rest)
        before = attack
        yield x_adv, is_right.clone()


def _at_full_strength(attack: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(attack, PGD):  # of several starts, one gives an image of full strength
        return replace(attack, all_steps=True, restarts=1, loss=attack.losses[0])
    is_single = isinstance(attack, Attack) and not isinstance(attack, Cascade)
    return replace(attack, all_steps=True) if is_single else attack  # type: ignore[type-var]


def _advance(
    model: Classifier,
    attack: Callable[..., Any],
    before: Callable[..., Any] | None,
    x: Tensor,
    y: Tensor,
    x_adv: Tensor,
    active: Tensor,
) -> Tensor:
    """Attack the active samples, from what is left of the budget before where the attack can start there."""
    if not isinstance(before, PGD) or not isinstance(attack, PGD) or attack.num_restarts > 1:
        return perturb(attack, model, x, y, active).x_adv
    if attack.steps == 1 and attack.start == "clean" and attack.alpha is None:
        return x_adv[active]
    share = min(1.0, max(_WARM_SHARE, 2 * (1 - before.eps / attack.eps)))
    shorter = replace(attack, steps=math.ceil(share * attack.steps), alpha=attack.step_size)
    return shorter.descend(model, x[active], y[active], x_adv[active]).x_adv


def _stretch(model: Classifier, attack: Callable[..., Any], x: Tensor, x_adv: Tensor) -> Tensor:
    """Enlarge perturbations until they use the whole budget."""
    norm, eps = cast(Budget, budget_of(attack, model.input_space))  # `plan_sweep` refuses attacks without a budget
    delta = x_adv - x
    size = torch.linalg.vector_norm(delta.flatten(1), ord=2 if norm == "l2" else torch.inf, dim=1)
    factor = torch.where(size > 0, eps / size, 1.0)
    return model.clamp(x + delta * as_column(factor, x))
