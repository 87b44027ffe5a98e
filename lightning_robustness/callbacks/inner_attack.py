"""The attack of adversarial training, from what a user gives."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from lightning_robustness.attacks import PGD, Attack, Cascade, get_attack
from lightning_robustness.utilities.input_space import InputSpace


def make_inner_attack(
    attack: str | Callable[..., Any],
    eps: float | None,
    steps: int | None,
    alpha: float | None,
    all_steps: bool,
    input_space: InputSpace,
) -> Callable[..., Any]:
    """Get an attack to train against.

    Args:
        attack: ``"fast"``, a name that ``get_attack`` knows, an attack, or any other callable.
        eps: Its budget, or None for what it has.
        steps: Number of its steps, likewise.
        alpha: Size of a step, likewise.
        all_steps: Whether a built-in attack takes all steps for all samples.
        input_space: Range of the inputs.

    Raises:
        TypeError: If the attack is neither a name nor callable.
        ValueError: If the attack is targeted or does not take what is given, or its budget is wider than the range.

    Example:
        >>> from lightning_robustness import InputSpace
        >>> from lightning_robustness.callbacks.inner_attack import make_inner_attack
        >>> attack = make_inner_attack("fast", 0.08, None, None, True, InputSpace())
        >>> attack.steps, attack.start, attack.alpha
        (1, 'uniform', 0.1)

    """
    given = {"eps": eps, "steps": steps, "alpha": alpha}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if attack == "fast":
        options = {"steps": 1, "eps": PGD.eps} | options
        made = get_attack("pgd", **{"alpha": 1.25 * options["eps"]} | options)
    else:
        made = get_attack(attack, **options) if isinstance(attack, str) else _change(get_attack(attack), options)
    made = _prepare(made, all_steps, input_space)
    parts = _parts(made)
    if eps is not None and all(getattr(part, "eps", None) is None for part in parts):
        raise ValueError(f"Expected an attack that has a budget, for `eps`, but got {made!r}. Leave `eps` out.")
    for part in parts:
        _check(part, input_space)
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


def _prepare(attack: Callable[..., Any], all_steps: bool, input_space: InputSpace) -> Callable[..., Any]:
    if not isinstance(attack, Attack):
        return attack
    if isinstance(attack, Cascade):
        parts = tuple(_prepare(part, all_steps, input_space) for part in attack.attacks)
        attack = replace(attack, attacks=parts)
    return replace(attack, all_steps=all_steps, low=input_space.low, high=input_space.high)


def _parts(attack: Callable[..., Any]) -> list[Callable[..., Any]]:
    return [p for part in attack.attacks for p in _parts(part)] if isinstance(attack, Cascade) else [attack]


def _check(attack: Callable[..., Any], input_space: InputSpace) -> None:
    if getattr(attack, "targeted", False):
        raise ValueError(f"Expected an attack that is not targeted, since it gets the true labels, but got {attack!r}.")
    low, high, eps = input_space.low, input_space.high, getattr(attack, "eps", None)
    if low is None or high is None or eps is None or getattr(attack, "norm", None) != "linf":
        return
    if eps > high - low:
        raise ValueError(
            f"Expected `eps` to be at most {high - low:g}, the width of the range of inputs [{low:g}, {high:g}], but "
            f"got {eps:g}. Budgets are in un-normalised units: 8/255 for pixels in [0, 1], or declare another range in "
            "`input_space`."
        )
