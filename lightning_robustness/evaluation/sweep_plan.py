"""Attacks of a sweep, one set per budget."""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from lightning_robustness.attacks import budget_of
from lightning_robustness.attacks.budget import check_budgets
from lightning_robustness.measurement.attack_names import AttackLike, list_attacks, name_attacks
from lightning_robustness.utilities.input_space import InputSpace

# Attacks and budgets of the CMMR paper
SWEEP_ATTACKS = ("fgsm", "bim", "pgd", "mifgsm")
SWEEP_EPS = tuple(number / 100 for number in range(1, 21))


def read_budgets(name: str, eps: Iterable[Any]) -> list[float]:
    """Return budgets as plain numbers, also from arrays and tensors.

    Raises:
        TypeError: If they are not a sequence of numbers.

    """
    try:
        if isinstance(eps, str | Mapping):
            raise TypeError
        return [float(budget) for budget in eps]
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"Expected argument `{name}` to be a sequence of numbers but got {eps!r}. Pass a list, such as [0.1]."
        ) from error


def plan_sweep(
    attacks: Iterable[AttackLike] | Mapping[str, AttackLike],
    eps: Sequence[float],
    input_space: InputSpace | None = None,
    prefix: str = "",
) -> list[dict[str, Callable[..., Any]]]:
    """Return attacks by name, one dictionary per budget.

    Args:
        attacks: Names of attacks, or attacks whose budget can be set; a mapping gives them names.
        eps: Budgets.
        input_space: Range of the inputs, which the largest budget is checked against.
        prefix: Start of the names of the arguments, for messages.

    Raises:
        ValueError: If budgets are not positive and increasing, there is no attack, or the budget of one cannot be set.

    Example:
        >>> from lightning_robustness.attacks import Square
        >>> from lightning_robustness.evaluation.sweep_plan import plan_sweep
        >>> for attacks in plan_sweep([Square(num_queries=100)], eps=[0.1, 0.2]):
        ...     print(attacks)
        {'square': Square(eps=0.1, num_queries=100, norm='linf', p=0.8, loss='margin')}
        {'square': Square(eps=0.2, num_queries=100, norm='linf', p=0.8, loss='margin')}

    """
    if len(eps) == 0 or not all(low < high for low, high in zip([0.0, *eps], eps, strict=False)):
        raise ValueError(f"Expected argument `{prefix}eps` to hold positive, increasing budgets but got {list(eps)}.")
    attacks = list_attacks(attacks, f"{prefix}attacks")
    if len(attacks) == 0:
        raise ValueError(f"Expected argument `{prefix}attacks` to hold at least one attack but got none.")
    plan = [_at_budget(name_attacks(attacks, budget, True, f"{prefix}attacks"), budget) for budget in eps]
    check_budgets(plan[-1].values(), input_space)
    return plan


def _at_budget(attacks: dict[str, Callable[..., Any]], eps: float) -> dict[str, Callable[..., Any]]:
    for name, attack in attacks.items():
        if is_dataclass(attack) and "eps" in (entry.name for entry in fields(attack)):
            attacks[name] = replace(attack, eps=eps)  # type: ignore[type-var]
        budget = budget_of(attacks[name])
        if budget is None or budget.eps != eps:
            raise ValueError(
                f"Expected attacks whose budget can be set, by name or as objects with `eps`, but got {attack!r}. "
                "Leave it out of the sweep."
            )
    return attacks


def describe_sweep(
    plan: Sequence[Mapping[str, Callable[..., Any]]],
    eps: Sequence[float],
    y: Tensor,
    input_space: InputSpace,
    seed: int,
) -> dict[str, str]:
    """Describe the settings that curves depend on besides the model."""
    low, high = ("none" if bound is None else f"{bound:g}" for bound in (input_space.low, input_space.high))
    mean, std = input_space.mean, input_space.std
    return {
        **{f"{name} at eps = {eps[0]:g}": repr(attack) for name, attack in plan[0].items()},
        "attacked samples": str(len(y)),
        "input range": f"{low} to {high}",
        "normalisation": "none" if mean is None and std is None else f"mean {mean}, std {std}",
        "seed": str(seed),
        "checksum of the labels": f"{zlib.crc32(y.long().cpu().numpy().tobytes()):08x}",
    }
