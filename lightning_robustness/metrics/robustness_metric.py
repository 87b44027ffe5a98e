"""Base class of the metrics: a headline value with named parts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.plot import _AX_TYPE, _PLOT_OUT_TYPE


class RobustnessMetric(Metric):
    """Base of the metrics: ``compute`` returns a headline value and stores its parts in ``_components``.

    Args:
        kwargs: Arguments of ``torchmetrics.Metric``.

    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._components: dict[str, Tensor] = {}

    def compute_components(self) -> dict[str, Tensor]:
        """Compute the metric and return it with its parts, by name."""
        self.compute()
        return dict(self._components)

    def plot(self, val: Tensor | Sequence[Tensor] | None = None, ax: _AX_TYPE | None = None) -> _PLOT_OUT_TYPE:
        """Plot one value or several, for instance one per epoch.

        Args:
            val: A result of ``forward`` or ``compute``, or a list of them; by default what ``compute`` returns.
            ax: A matplotlib axis to draw on; by default a new figure.

        Returns:
            Figure and axis.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed; the extra ``plot`` brings it.

        Example:
            >>> import torch
            >>> from lightning_robustness.metrics import ROBY
            >>> metric = ROBY(num_classes=3)
            >>> metric.update(torch.randn(20, 5), preds=torch.arange(20) % 3)
            >>> figure, axis = metric.plot()

        """
        return self._plot(val, ax)

    def _add_float_state(self, name: str, default: Tensor, dist_reduce_fx: str = "sum") -> None:
        """Add a state in float64, or in float32 with Apple GPUs, which do not support float64."""
        dtype = torch.float32 if torch.backends.mps.is_available() else torch.float64
        self.add_state(name, default=default.to(dtype), dist_reduce_fx=dist_reduce_fx)

    def _add_counts(self, *names: str) -> None:
        for name in names:
            self.add_state(name, default=torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")
