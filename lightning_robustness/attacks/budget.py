"""Perturbation budgets of attacks of any kind, and how they fit the range of inputs."""

from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, Literal, NamedTuple

from lightning_robustness.utilities.checks import check_attack
from lightning_robustness.utilities.input_space import InputSpace, check_input_space
from lightning_robustness.utilities.rank_zero import rank_zero_warn

Norm = Literal["linf", "l2"]


class Budget(NamedTuple):
    """Largest perturbation that an attack may make: a norm, None if it does not say, and a size in its units."""

    norm: str | None
    eps: float


def budget_of(attack: Callable[..., Any], input_space: InputSpace | None = None) -> Budget | None:
    """Return the budget of an attack: built in, adapted from torchattacks, or any other callable.

    Args:
        attack: The attack. A callable that is not built in has a budget if it has an attribute ``eps`` and, where that
            is to be checked, ``norm``. A cascade has the largest budget of its members, if all are in the same norm.
        input_space: Range of the inputs, by default [0, 1]: defaults of torchattacks are in units of its width.

    Returns:
        The budget, or None if there is none, or not one that holds for all members of a cascade.

    Example:
        >>> from lightning_robustness.attacks import CW, PGD, Cascade, budget_of
        >>> budget_of(PGD(eps=0.25, norm="l2")), budget_of(CW())
        (Budget(norm='l2', eps=0.25), None)
        >>> budget_of(Cascade(attacks=(PGD(eps=0.25), PGD(eps=0.5))))
        Budget(norm='linf', eps=0.5)

    """
    check_attack(attack)
    budgets = budgets_of(attack, input_space)
    known = [budget for budget in budgets if budget is not None]
    if len(known) < len(budgets) or len({budget.norm for budget in known}) > 1:
        return None
    return max(known, key=lambda budget: budget.eps)


def budgets_of(attack: Callable[..., Any], input_space: InputSpace | None = None) -> list[Budget | None]:
    """Return the budget of each member of a cascade, or that of any other attack as the only entry."""
    if hasattr(attack, "budgets_in"):  # attacks that have members, or a budget that depends on the range
        return list(attack.budgets_in(check_input_space(input_space)))
    eps = getattr(attack, "eps", None)
    if not isinstance(eps, Real) or isinstance(eps, bool):
        return [None]
    return [Budget(getattr(attack, "norm", None), float(eps))]


def is_minimum_norm(attack: Callable[..., Any], input_space: InputSpace | None = None) -> bool:
    """Return whether an attack looks for the smallest perturbation in l2: it has no ``eps``, and its ``norm`` is l2.

    Example:
        >>> from lightning_robustness.attacks import CW, PGD
        >>> from lightning_robustness.attacks.budget import is_minimum_norm
        >>> is_minimum_norm(CW()), is_minimum_norm(PGD(norm="l2", eps=0.5)), is_minimum_norm(lambda model, x, y: x)
        (True, False, False)

    """
    return getattr(attack, "norm", None) == "l2" and budgets_of(attack, input_space) == [None]


def check_budgets(attacks: Iterable[Callable[..., Any]], input_space: InputSpace | None) -> None:
    """Check that the budgets of attacks are in the units of the range of inputs.

    Warns where a budget is below one grey level of a range of at least 255, as one in the units of [0, 1] is.

    Args:
        attacks: The attacks.
        input_space: Range of the inputs, by default [0, 1].

    Raises:
        ValueError: If an l-infinity budget is wider than the range.

    """
    space = check_input_space(input_space)
    low, high = space.low, space.high
    if low is None or high is None:
        return
    width = high - low
    budgets = [budget for attack in attacks for budget in budgets_of(attack, space) if budget is not None]
    for budget in budgets:
        if budget.norm == "linf" and budget.eps > width:
            raise ValueError(
                f"Expected `eps` to be at most {width:g}, the width of the range of inputs [{low:g}, {high:g}], but "
                f"got {budget.eps:g}. Budgets are in un-normalised units: 8/255 for pixels in [0, 1], or declare "
                "another range in `input_space`."
            )
    small = [budget.eps for budget in budgets if width >= 255 and 0 < budget.eps < width / 255]
    if small:
        rank_zero_warn(
            f"The budget eps={small[0]:g} is below one grey level of inputs in [{low:g}, {high:g}]: no "
            f"network will look vulnerable. Budgets are in the units of this range: if {small[0]:g} is meant for "
            f"[0, 1], pass `eps={small[0] * width:g}`.",
            stacklevel=1,  # attributed to this line, so that Python shows it once in a run, not once per caller
        )
