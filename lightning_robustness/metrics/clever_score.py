from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_robustness._arguments import check_integer
from lightning_robustness.functional.clever_score import CleverNorm, _check_arguments, clever_score
from lightning_robustness.input_space import InputSpace, check_input_space
from lightning_robustness.metrics._base import SampleMetric, mean


class CleverScore(SampleMetric):
    r"""Compute the mean CLEVER score, an estimate of the smallest successful perturbation, higher is more robust.

    .. math::
        \frac{1}{N} \sum_x \min_{j \neq c} \min\left(\frac{z_c(x) - z_j(x)}{L_j(x)}, R\right)

    Where :math:`z` are the logits, :math:`c` is the predicted class, right or wrong, and :math:`L_j` the Lipschitz
    constant of the margin in a ball of radius :math:`R`, estimated from gradients at random points. See
    :func:`~lightning_robustness.functional.clever_score`.

    As input to ``forward`` and ``update`` the metric accepts the following input:

    - ``model``: A callable from inputs to logits of shape ``(N, K)``. It is used in eval mode, left as it was, and
      never stored.
    - ``x`` (:class:`~torch.Tensor`): A floating point tensor of inputs, of any shape ``(N, ...)``.

    As output of ``forward`` and ``compute`` the metric returns the following output:

    - ``clever`` (:class:`~torch.Tensor`): A scalar from 0 to the radius, the mean over the samples.

    ``compute_components`` returns it in a dictionary, as ``mean``, with ``min``, the lowest score of a sample, and
    ``count``, the number of samples; all are 0 without samples.

    Args:
        radius: Radius R of the ball, in un-normalised units: no score is larger.
        norm: Norm of perturbations: ``"l1"``, ``"l2"`` or ``"linf"``.
        num_batches: Number of maxima to which the distribution of the largest gradient is fitted.
        points_per_batch: Number of points per maximum.
        input_space: Range and normalisation of the inputs, by default values in [0, 1] that are not normalised. Points
            are clamped to the range.
        chunk_size: Number of points to process at a time, which bounds memory; at least one batch of one sample.
        seed: Seed of the points, which are the same for all samples.
        kwargs: Further arguments of ``torchmetrics.Metric``.

    Raises:
        ValueError: If an argument is not as described.

    Example:
        >>> import torch
        >>> from lightning_robustness.metrics import CleverScore
        >>> model = torch.nn.Linear(2, 3, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 4.0], [0.0, 0.0], [-3.0, 4.0]]))
        >>> metric = CleverScore(radius=2.0)
        >>> metric.update(model, torch.tensor([[1.0, 0.5], [0.25, 1.0]]))
        >>> metric.compute()
        tensor(0.6250)
        >>> metric.compute_components()["min"]
        tensor(0.2500)

    """

    is_differentiable: bool = False
    higher_is_better: bool = True
    full_state_update: bool = False
    plot_lower_bound: float = 0.0
    plot_upper_bound: None = None

    def __init__(
        self,
        radius: float,
        *,
        norm: CleverNorm = "l2",
        num_batches: int = 50,
        points_per_batch: int = 128,
        input_space: InputSpace | None = None,
        chunk_size: int = 1024,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        _check_arguments(radius, norm, num_batches, points_per_batch, chunk_size)
        self.radius = radius
        self.options: dict[str, Any] = {
            "norm": norm,
            "num_batches": num_batches,
            "points_per_batch": points_per_batch,
            "input_space": check_input_space(input_space),
            "chunk_size": chunk_size,
            "seed": check_integer("seed", seed, minimum=0),
        }
        self._add_states(radius, self.options)

    def update(self, model: Callable[..., Any], x: Tensor) -> None:
        """Add the samples of a batch."""
        self._add(clever_score(model, x, self.radius, **self.options))

    def _summarize(self, *columns: Tensor) -> dict[str, Tensor]:
        (scores,) = columns
        return {"mean": mean(scores), "min": scores.amin() if len(scores) else mean(scores)}
