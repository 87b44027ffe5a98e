"""Perturbation budgets of attacks of any kind, and how they fit the range of inputs."""

from collections.abc import Callable
from numbers import Real
from typing import Any, Literal, NamedTuple

from lightning_robustness.utilities.input_space import InputSpace
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
    budgets = budgets_of(attack, input_space)
    known = [budget for budget in budgets if budget is not None]
    if len(known) < len(budgets) or len({budget.norm for budget in known}) > 1:
        return None
    return max(known, key=lambda budget: budget.eps)


def budgets_of(attack: Callable[..., Any], input_space: InputSpace | None = None) -> list[Budget | None]:
    """Return the budget of each member of a cascade, or that of any other attack as the only entry."""
    if hasattr(attack, "budgets_in"):  # attacks that have members, or a budget that depends on the range
        return list(attack.budgets_in(input_space or InputSpace()))
    eps = getattr(attack, "eps", None)
    is_number = isinstance(eps, Real) and not isinstance(eps, bool)
    return [Budget(getattr(attack, "norm", None), eps) if is_number else None]  # type: ignore[arg-type]


def check_budget(attack: Callable[..., Any], input_space: InputSpace) -> None:
    """Check that no l-infinity budget of an attack is wider than the range of inputs.

    Raises:
        ValueError: If one is: most likely it is in the units of another range.

    """
    low, high = input_space.low, input_space.high
    if low is None or high is None:
        return
    for budget in budgets_of(attack, input_space):
        if budget is not None and budget.norm == "linf" and budget.eps > high - low:
            raise ValueError(
                f"Expected `eps` to be at most {high - low:g}, the width of the range of inputs [{low:g}, {high:g}], "
                f"but got {budget.eps:g}. Budgets are in un-normalised units: 8/255 for pixels in [0, 1], or declare "
                "another range in `input_space`."
            )


def warn_of_tiny_budget(attack: Callable[..., Any], input_space: InputSpace) -> None:
    """Warn of an l-infinity budget below one grey level, where inputs are pixels from 0 to 255."""
    low, high = input_space.low, input_space.high
    if low is None or high is None or high - low < 100:
        return
    for budget in budgets_of(attack, input_space):
        if budget is not None and budget.norm == "linf" and budget.eps < 1:
            rank_zero_warn(
                f"The budget eps={budget.eps:g} is below one grey level of inputs in [{low:g}, {high:g}]: budgets are "
                "in the units of the inputs. Pass `eps=8` for 8 grey levels."
            )
