from collections.abc import Callable, Iterable
from typing import Any

from lightning_robustness.attacks import Budget, budget_of
from lightning_robustness.functional.boundary_distance import BoundaryNorm
from lightning_robustness.functional.fisher_spectral_norm import FisherMethod
from lightning_robustness.measurement.clever_meter import CleverMeter
from lightning_robustness.measurement.fisher_meter import FisherMeter
from lightning_robustness.measurement.meter import SampleMeter
from lightning_robustness.utilities.checks import check_integer, check_number, check_option
from lightning_robustness.utilities.input_space import InputSpace


def make_sample_meters(
    input_space: InputSpace,
    seed: int = 0,
    fim_samples: int = 256,
    fim_method: FisherMethod = "auto",
    clever_samples: int = 0,
    clever_radius: float = 2.0,
    budget: Budget | None = None,
) -> list[SampleMeter]:
    """Make the meters of a fixed sample, in the order in which they run; those of size 0 are not to be used.

    Args:
        input_space: Range and normalisation of the inputs.
        seed: Seed of everything that is drawn.
        fim_samples: Number of samples for the Fisher information and the distance to the boundary.
        fim_method: How to compute the Fisher information.
        clever_samples: Number of samples for CLEVER.
        clever_radius: Radius of the ball in which CLEVER looks.
        budget: Norm of the distance to the boundary, and the budget of robust accuracy to first order.

    Raises:
        ValueError: If an argument is out of range.

    """
    for name, value in {"fim_samples": fim_samples, "clever_samples": clever_samples, "seed": seed}.items():
        check_integer(name, value, minimum=0)
    check_option("fim_method", fim_method, FisherMethod)
    check_number("clever_radius", clever_radius, exclusive=True)
    norm: BoundaryNorm = "l2" if budget is not None and budget.norm == "l2" else "linf"
    eps = None if budget is None else budget.eps
    return [
        FisherMeter(fim_samples, fim_method, input_space, seed, norm, eps),
        CleverMeter(clever_samples, clever_radius, input_space, seed),
    ]


def common_budget(
    attacks: Iterable[Callable[..., Any]],
    eps: float | None,
    input_space: InputSpace | None = None,
    first: BoundaryNorm = "linf",
) -> Budget | None:
    """Return the budget of a run, so that what has no budget can be compared with attacks that do.

    It is the largest budget of the attacks in the first norm or, where none of them has one, in the other.

    Args:
        attacks: The attacks.
        eps: Size of the l-infinity budget where the attacks have neither; None for no budget then.
        input_space: Range of the inputs.
        first: Norm that comes first: l-infinity for values without attacks, l2 for attacks that minimise that norm.

    Example:
        >>> from lightning_robustness.attacks import CW, PGD
        >>> from lightning_robustness.measurement.sample_meters import common_budget
        >>> common_budget([CW(), PGD(eps=0.5, norm="l2")], eps=0.1)
        Budget(norm='l2', eps=0.5)
        >>> common_budget([CW()], eps=0.1)
        Budget(norm='linf', eps=0.1)

    """
    budgets = [budget for attack in attacks if (budget := budget_of(attack, input_space)) is not None]
    for norm in ("linf", "l2") if first == "linf" else ("l2", "linf"):
        sizes = [budget.eps for budget in budgets if budget.norm == norm]
        if sizes:
            return Budget(norm, max(sizes))
    return None if eps is None else Budget("linf", eps)
