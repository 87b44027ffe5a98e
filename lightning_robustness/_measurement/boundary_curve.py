from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor
from typing_extensions import Self

from lightning_robustness._measurement.assisted import Assisted, Estimate

_NUM_POINTS = 33
# The largest budget of a curve, relative to the one that attacks have
REACH = 4


class BoundaryCurve(NamedTuple):
    """Robust accuracy to first order over perturbation budgets."""

    norm: str
    eps: list[float]
    share: list[float]
    low: list[float]
    high: list[float]

    @property
    def budget(self) -> float:
        """The budget that the curve was made for."""
        return self.eps[-1] / REACH

    @property
    def values(self) -> dict[str, float]:
        """Robust accuracy to first order at that budget, with its interval."""
        place = (_NUM_POINTS - 1) // REACH
        names = {"boundary_acc": self.share, "boundary_acc_low": self.low, "boundary_acc_high": self.high}
        return {name: column[place] for name, column in names.items()}

    @classmethod
    def of(cls, distances: Tensor, norm: str, eps: float, estimate: Callable[[Tensor], Assisted]) -> Self:
        """Make it from distances to the boundary, up to four times a budget; it never rises."""
        budgets = [REACH * eps * number / (_NUM_POINTS - 1) for number in range(_NUM_POINTS)]
        shares = falling([estimate(distances > budget).estimate() for budget in budgets])
        return cls(norm, budgets, *([getattr(share, end) for share in shares] for end in ("value", "low", "high")))


def falling(shares: list[Estimate]) -> list[Estimate]:
    """Let estimates over increasing budgets never rise: what is robust at one is robust at smaller ones."""
    return list(accumulate(shares, _lower))


def _lower(before: Estimate, own: Estimate) -> Estimate:
    value, low, high = (min(ends) for ends in zip(before[:3], own[:3], strict=True))
    return own._replace(value=value, low=low, high=high)
