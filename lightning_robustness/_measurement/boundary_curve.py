from typing import NamedTuple

from torch import Tensor
from typing_extensions import Self

from lightning_robustness.functional.boundary_distance import share_beyond

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

    @classmethod
    def of(cls, distances: Tensor, norm: str, eps: float) -> Self:
        """Make it from distances to the boundary, up to four times a budget.

        Example:
            >>> import torch
            >>> from lightning_robustness._measurement.boundary_curve import BoundaryCurve
            >>> curve = BoundaryCurve.of(torch.tensor([-0.1, 0.1, 0.3, 0.9]), "linf", eps=0.2)
            >>> curve.eps[8], curve.share[8], curve.eps[-1], curve.share[-1]
            (0.2, 0.5, 0.8, 0.25)

        """
        budgets = [REACH * eps * number / (_NUM_POINTS - 1) for number in range(_NUM_POINTS)]
        return cls(norm, budgets, *(part.tolist() for part in share_beyond(distances, budgets)))
