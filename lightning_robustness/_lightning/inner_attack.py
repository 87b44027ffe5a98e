"""The attack of adversarial training, from the arguments of a user."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from lightning_robustness._arguments import check_number
from lightning_robustness.attacks import PGD, Attack, Cascade, get_attack
from lightning_robustness.attacks.attack import budgets_of, check_budgets
from lightning_robustness.input_space import InputSpace


def make_inner_attack(
    attack: str | Callable[..., Any],
    eps: float | None,
    steps: int | None,
    alpha: float | None,
    all_steps: bool,
    input_space: InputSpace,
) -> Callable[..., Any]:
    """Get an attack to train against.

    Example:
        >>> from lightning_robustness import InputSpace
        >>> from lightning_robustness._lightning.inner_attack import make_inner_attack
        >>> attack = make_inner_attack("fast", 0.08, None, None, True, InputSpace())
        >>> attack.steps, attack.start, attack.alpha
        (1, 'uniform', 0.1)

    """
    given = {"eps": eps, "steps": steps, "alpha": alpha}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if isinstance(attack, str) and attack == "fast":
        options = {"steps": 1, "eps": PGD.eps} | options
        made = get_attack("pgd", **{"alpha": 1.25 * options["eps"]} | options)
    else:
        made = get_attack(attack, **options) if isinstance(attack, str) else _change(get_attack(attack), options)
    made = _prepare(made, all_steps)
    if eps is not None and not any(budgets_of(made, input_space)):
        raise ValueError(f"Expected an attack that has a budget, for `eps`, but got {made!r}. Leave `eps` out.")
    check_budgets([made], input_space)
    return made


def make_inner_attacks(
    attack: str | Callable[..., Any],
    eps: float | Sequence[float] | None,
    steps: int | None,
    alpha: float | None,
    all_steps: bool,
    input_space: InputSpace,
) -> list[Callable[..., Any]]:
    """Get an attack for each budget in a list, or for the only one."""
    budgets = eps if isinstance(eps, Sequence) and not isinstance(eps, str) else [eps]
    if len(budgets) == 0:
        raise ValueError(
            "Expected argument `eps` to hold at least one number but got none. Leave it out for the budget of the "
            "attack."
        )
    if eps is not None:
        for budget in budgets:
            check_number("eps", budget)
    return [make_inner_attack(attack, budget, steps, alpha, all_steps, input_space) for budget in budgets]


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
