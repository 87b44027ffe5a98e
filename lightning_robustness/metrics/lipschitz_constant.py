from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_robustness._arguments import check_integer, check_option
from lightning_robustness.functional.lipschitz_constant import LipschitzNorm, lipschitz_constant
from lightning_robustness.input_space import InputSpace, check_input_space
from lightning_robustness.metrics._base import SampleMetric, mean


class LipschitzConstant(SampleMetric):
    r"""Compute the mean local Lipschitz constant of the class probabilities, lower is more robust.

    .. math::
        \frac{1}{N} \sum_x \max_k \|\nabla_x p_k(x)\|_2

    Where :math:`p` is the softmax of the logits and :math:`k` runs over the classes. See
    :func:`~lightning_robustness.functional.lipschitz_constant`.

    As input to ``forward`` and ``update`` the metric accepts the following input:

    - ``model``: A callable from inputs to logits of shape ``(N, K)``. It is used in eval mode, left as it was, and
      never stored.
    - ``x`` (:class:`~torch.Tensor`): A floating point tensor of inputs, of any shape ``(N, ...)``.

    As output of ``forward`` and ``compute`` the metric returns the following output:

    - ``lipschitz`` (:class:`~torch.Tensor`): A scalar, the mean over the samples.

    ``compute_components`` returns it in a dictionary, as ``mean``, with ``max``, the largest value of a sample, and
    ``count``, the number of samples; all are 0 without samples.

    Args:
        norm: ``"classes"`` or ``"spectral"``, the spectral norm of the Jacobian of all probabilities.
        input_space: Range and normalisation of the inputs, by default values in [0, 1] that are not normalised.
            Results are in un-normalised units.
        seed: Seed of the random state, for models that draw random numbers even in eval mode.
        kwargs: Further arguments of ``torchmetrics.Metric``.

    Example:
        >>> import torch
        >>> from lightning_robustness.metrics import LipschitzConstant
        >>> model = torch.nn.Linear(3, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
        >>> metric = LipschitzConstant()
        >>> metric.update(model, torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]))
        >>> metric.compute()
        tensor(0.3550)
        >>> metric.compute_components()["max"]
        tensor(0.5000)

    """

    is_differentiable: bool = False
    higher_is_better: bool = False
    full_state_update: bool = False
    plot_lower_bound: float = 0.0
    plot_upper_bound: None = None

    def __init__(
        self,
        *,
        norm: LipschitzNorm = "classes",
        input_space: InputSpace | None = None,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_option("norm", norm, LipschitzNorm)
        self.norm: LipschitzNorm = norm
        self.input_space = check_input_space(input_space)
        self.seed = check_integer("seed", seed, minimum=0)
        self._add_states(norm, self.input_space, seed)

    def update(self, model: Callable[..., Any], x: Tensor) -> None:
        """Add the samples of a batch."""
        self._add(lipschitz_constant(model, x, norm=self.norm, input_space=self.input_space, seed=self.seed))

    def _summarize(self, *columns: Tensor) -> dict[str, Tensor]:
        (values,) = columns
        return {"mean": mean(values), "max": values.amax() if len(values) else mean(values)}
