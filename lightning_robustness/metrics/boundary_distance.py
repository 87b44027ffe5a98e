import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_robustness._arguments import check_integer, check_number, check_share
from lightning_robustness.functional.boundary_distance import (
    BoundaryNorm,
    _check_arguments,
    boundary_distance,
    quantile,
    share_beyond,
)
from lightning_robustness.input_space import InputSpace, check_input_space
from lightning_robustness.metrics._base import SampleMetric


class BoundaryDistance(SampleMetric):
    r"""Compute the median distance to the decision boundary, to first order, higher is more robust.

    .. math::
        d(x) = \min_{j \neq c} \frac{z_c(x) - z_j(x)}{\|\nabla_x (z_c - z_j)(x)\|_q}

    Where :math:`z` are the logits, :math:`c` is the label, :math:`j` a rival class and :math:`q` the dual of the norm
    of perturbations. See :func:`~lightning_robustness.functional.boundary_distance`, also for the limits of this
    estimate.

    As input to ``forward`` and ``update`` the metric accepts the following input:

    - ``model``: A callable from inputs to logits of shape ``(N, K)``. It is used in eval mode, left as it was, and
      never stored.
    - ``x`` (:class:`~torch.Tensor`): A floating point tensor of inputs, of any shape ``(N, ...)``.
    - ``y`` (:class:`~torch.Tensor`, optional): An integer tensor of shape ``(N,)`` with the true labels; by default
      the predicted ones.

    As output of ``forward`` and ``compute`` the metric returns the following output:

    - ``boundary`` (:class:`~torch.Tensor`): A scalar, the median of the distances; 0 without samples.

    ``compute_components`` returns a dictionary with

    - ``median``, and the requested ``quantiles``;
    - ``beyond``, the share of samples that are farther from the boundary than each budget, with labels the robust
      accuracy to first order; ``beyond_low`` and ``beyond_high``, its Wilson confidence intervals;
    - ``infinite``, the number of samples without a gradient towards any rival; ``count``, the number of samples.

    The distances of all samples are kept, since quantiles need them.

    Args:
        norm: Norm of the perturbations, ``"linf"`` or ``"l2"``.
        budgets: Perturbation budgets, increasing, in un-normalised units.
        quantiles: Further quantiles, between 0 and 1.
        num_rivals: Number of rival classes to look at, those with the highest logits. By default all of up to 12
            classes, and 5 rivals where there are more classes.
        input_space: Range and normalisation of the inputs, by default values in [0, 1] that are not normalised.
            Results are in un-normalised units.
        confidence: Probability with which a confidence interval contains the share.
        chunk_size: Number of samples to process at a time, which bounds memory; by default all.
        seed: Seed of the random state, for models that draw random numbers even in eval mode.
        kwargs: Further arguments of ``torchmetrics.Metric``.

    Raises:
        ValueError: If an argument is not as described.

    Example:
        >>> import torch
        >>> from lightning_robustness.metrics import BoundaryDistance
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
        >>> metric = BoundaryDistance(budgets=(0.1, 0.2))
        >>> metric.update(model, torch.tensor([[1.0, 0.5], [0.25, 1.0], [0.5, 0.0]]), y=torch.tensor([0, 0, 0]))
        >>> metric.compute()
        tensor(0.1429)
        >>> metric.compute_components()["beyond"]
        tensor([0.6667, 0.3333])

    """

    is_differentiable: bool = False
    higher_is_better: bool = True
    full_state_update: bool = False
    plot_lower_bound: None = None
    plot_upper_bound: None = None

    def __init__(
        self,
        norm: BoundaryNorm = "linf",
        *,
        budgets: Sequence[float] = (2 / 255, 4 / 255, 8 / 255, 16 / 255),
        quantiles: Sequence[float] = (0.1, 0.25, 0.75, 0.9),
        num_rivals: int | None = None,
        input_space: InputSpace | None = None,
        confidence: float = 0.95,
        chunk_size: int | None = None,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        _check_arguments(norm, num_rivals, chunk_size)
        self.budgets = _check_budgets(budgets)
        self.quantiles = _check_numbers("quantiles", quantiles, maximum=1.0)
        check_share("confidence", confidence)
        self.norm: BoundaryNorm = norm
        self.confidence = confidence
        self.options: dict[str, Any] = {
            "num_rivals": num_rivals,
            "input_space": check_input_space(input_space),
            "chunk_size": chunk_size,
            "seed": check_integer("seed", seed, minimum=0),
        }
        self._add_states(norm, self.budgets, self.quantiles, confidence, self.options)

    def update(self, model: Callable[..., Any], x: Tensor, y: Tensor | None = None) -> None:
        """Add the samples of a batch."""
        self._add(boundary_distance(model, x, y, self.norm, **self.options))

    def _summarize(self, *columns: Tensor) -> dict[str, Tensor]:
        (distances,) = columns
        beyond, low, high = share_beyond(distances, self.budgets, self.confidence)
        quantiles = [quantile(distances, position) for position in self.quantiles]
        return {
            "median": quantile(distances, 0.5),
            "quantiles": torch.stack([*quantiles, distances.new_zeros(())])[:-1],
            "beyond": beyond,
            "beyond_low": low,
            "beyond_high": high,
            "infinite": distances.isinf().sum(),
        }


def _check_numbers(name: str, values: Sequence[float], maximum: float = math.inf) -> list[float]:
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"Expected argument `{name}` to be a sequence of numbers but got {values!r}. Pass a list.")
    return [check_number(name, value, maximum=maximum) for value in values]


def _check_budgets(budgets: Sequence[float]) -> list[float]:
    checked = _check_numbers("budgets", budgets)
    if any(first >= second for first, second in pairwise(checked)):
        raise ValueError(f"Expected argument `budgets` to be increasing but got {checked}. Sort them.")
    return checked
