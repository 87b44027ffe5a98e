from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_robustness._arguments import check_integer, check_number
from lightning_robustness.functional._fisher_estimators import FisherComponents
from lightning_robustness.functional.fisher_spectral_norm import (
    FISHER_PARTS,
    FLOOR,
    Distribution,
    FisherMethod,
    FisherSettings,
    fisher_and_boundary,
    fisher_means,
)
from lightning_robustness.input_space import InputSpace, check_input_space
from lightning_robustness.metrics._base import SampleMetric


class FisherSpectralNorm(SampleMetric):
    r"""Compute the mean spectral norm of the Fisher information of the inputs, lower is more robust.

    .. math::
        \frac{1}{N} \sum_x \lambda(x) \quad \lambda(x) = \|G(x)\|_2 \quad
        G = J^T (\operatorname{diag}(p) - p p^T) J

    Where :math:`p` is the softmax of the logits and :math:`J` their Jacobian with respect to the input. See
    :func:`~lightning_robustness.functional.fisher_spectral_norm` for the methods.

    As input to ``forward`` and ``update`` the metric accepts the following input:

    - ``model``: A callable from inputs to logits of shape ``(N, K)``. It is used in eval mode, left as it was, and
      never stored.
    - ``x`` (:class:`~torch.Tensor`): A floating point tensor of inputs, of any shape ``(N, ...)``.

    As output of ``forward`` and ``compute`` the metric returns the following output:

    - ``fim`` (:class:`~torch.Tensor`): A scalar, the mean of lambda.

    ``compute_components`` returns a dictionary with

    - ``mean`` of lambda; ``inverse``, the mean of 1 / lambda (higher is more robust, dominated by saturated samples);
      ``geometric``, the geometric mean, which no sample dominates; ``max``;
    - ``saturated``, the share of samples whose lambda is below ``floor`` and counts as ``floor`` in the two means;
      ``count``, the number of samples; ``products``, the mean number of Jacobian products per sample;
    - with the method ``"exact"``, means of ``trace``, ``jacobian_norm`` and ``lipschitz``, the local Lipschitz
      constant, all lower when more robust.

    Args:
        method: ``"exact"``, ``"lanczos"``, ``"power"``, ``"rayleigh"``, ``"blackbox"`` or ``"auto"``.
        input_space: Range and normalisation of the inputs, by default values in [0, 1] that are not normalised.
            Results are in un-normalised units.
        tolerance: Relative error at which ``"lanczos"`` and ``"power"`` stop.
        max_steps: Largest number of their steps.
        num_directions: Number of random vectors of ``"rayleigh"`` and ``"blackbox"``.
        distribution: Distribution of the random vectors of ``"rayleigh"``.
        rayleigh_ritz: Whether ``"blackbox"`` takes the largest value on the span of its directions.
        chunk_size: Number of samples to process at a time, which bounds memory.
        seed: Seed of the random vectors.
        floor: Smallest lambda that counts in the inverse and the geometric mean.
        kwargs: Further arguments of ``torchmetrics.Metric``.

    Raises:
        ValueError: If an argument is not as described.

    Example:
        >>> import torch
        >>> from lightning_robustness.metrics import FisherSpectralNorm
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[2.0, 0.0], [0.0, 0.0]]))
        >>> metric = FisherSpectralNorm()
        >>> metric.update(model, torch.tensor([[0.0, 0.0], [1.0, 0.5]]))
        >>> metric.compute()
        tensor(0.7100)
        >>> metric.compute_components()["geometric"]
        tensor(0.6481)

    """

    is_differentiable: bool = False
    higher_is_better: bool = False
    full_state_update: bool = False
    plot_lower_bound: float = 0.0
    plot_upper_bound: None = None

    num_columns = 2 + len(FISHER_PARTS)

    def __init__(
        self,
        method: FisherMethod = "auto",
        *,
        input_space: InputSpace | None = None,
        tolerance: float = 1e-6,
        max_steps: int = 100,
        num_directions: int = 20,
        distribution: Distribution = "gaussian",
        rayleigh_ritz: bool = True,
        chunk_size: int | None = None,
        seed: int = 0,
        floor: float = FLOOR,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_number("floor", floor, exclusive=True)
        self.floor = floor
        self.settings = FisherSettings(
            method,
            check_input_space(input_space),
            tolerance,
            max_steps,
            num_directions,
            distribution,
            rayleigh_ritz,
            chunk_size,
            check_integer("seed", seed, minimum=0),
        )
        self._add_states(floor, self.settings)

    def update(self, model: Callable[..., Any], x: Tensor) -> None:
        """Add the samples of a batch."""
        found = fisher_and_boundary(model, x, self.settings)
        absent = torch.full_like(found.spectral_norm, torch.nan)
        parts = (getattr(found, name) for name in FISHER_PARTS)
        self._add(found.spectral_norm, found.products, *(absent if part is None else part for part in parts))

    def _summarize(self, *columns: Tensor) -> dict[str, Tensor]:
        norms, products, *parts = columns
        present = {name: part[~part.isnan()] for name, part in zip(FISHER_PARTS, parts, strict=True)}
        return fisher_means(FisherComponents(norms, products, **present), self.floor)
