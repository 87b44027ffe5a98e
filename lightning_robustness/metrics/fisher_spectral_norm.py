from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_robustness.functional.boundary_distance import BoundaryNorm
from lightning_robustness.functional.fisher_estimators import FisherComponents
from lightning_robustness.functional.fisher_spectral_norm import (
    Distribution,
    FisherMethod,
    _check_arguments,
    fisher_spectral_norm,
)
from lightning_robustness.metrics.robustness_metric import RobustnessMetric
from lightning_robustness.utilities.checks import check_integer, check_number
from lightning_robustness.utilities.input_space import InputSpace, check_input_space

# Components that only some methods have
_PARTS = ("trace", "jacobian_norm", "lipschitz")


class FisherSpectralNorm(RobustnessMetric):
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
    - ``y`` (:class:`~torch.Tensor`, optional): An integer tensor of shape ``(N,)`` with the true labels, for the
      distance to the decision boundary alone.

    As output of ``forward`` and ``compute`` the metric returns the following output:

    - ``fim`` (:class:`~torch.Tensor`): A scalar, the mean of lambda.

    ``compute_components`` returns a dictionary with

    - ``mean`` of lambda; ``inverse``, the mean of 1 / lambda (higher is more robust, dominated by saturated samples);
      ``geometric``, the geometric mean, which no sample dominates; ``max``;
    - ``saturated``, the share of samples whose lambda is below ``floor`` and counts as ``floor`` in the two means;
      ``count``, the number of samples; ``products``, the mean number of Jacobian products per sample;
    - with the method ``"exact"``, means of ``trace``, ``jacobian_norm`` and ``lipschitz``, the local Lipschitz
      constant, all lower when more robust.

    ``last_values`` holds lambda of each sample of the last update and ``last_boundary``, with the argument
    ``boundary``, their distances to the decision boundary, from the same Jacobian; see
    :func:`~lightning_robustness.functional.boundary_distance`.

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
        boundary: Norm of perturbations, ``"linf"`` or ``"l2"``, for the distance to the decision boundary; None to
            leave it out.
        num_rivals: Number of rival classes for this distance; by default all with ``"exact"``.
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

    total: Tensor
    inverse_total: Tensor
    log_total: Tensor
    largest: Tensor
    saturated: Tensor
    count: Tensor
    products: Tensor
    part_totals: Tensor
    part_counts: Tensor

    def __init__(
        self,
        method: FisherMethod = "auto",
        input_space: InputSpace | None = None,
        tolerance: float = 1e-6,
        max_steps: int = 100,
        num_directions: int = 20,
        distribution: Distribution = "gaussian",
        rayleigh_ritz: bool = True,
        chunk_size: int | None = None,
        seed: int = 0,
        floor: float = 1e-12,
        boundary: BoundaryNorm | None = None,
        num_rivals: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        counts = {
            "max_steps": max_steps,
            "num_directions": num_directions,
            "chunk_size": chunk_size,
            "num_rivals": num_rivals,
        }
        _check_arguments(method, tolerance, counts, distribution, boundary, rayleigh_ritz)
        check_number("floor", floor, exclusive=True)
        self.method: FisherMethod = method
        self.floor = floor
        self.last_values = torch.zeros(0)
        self.last_boundary: Tensor | None = None
        self.options = {
            "input_space": check_input_space(input_space),
            "tolerance": tolerance,
            "distribution": distribution,
            "rayleigh_ritz": rayleigh_ritz,
            "seed": check_integer("seed", seed, minimum=0),
            "boundary": boundary,
            **counts,
        }
        for name in ("total", "inverse_total", "log_total"):
            self._add_float_state(name, torch.zeros(()))
        self._add_float_state("largest", torch.zeros(()), "max")
        self._add_counts("saturated", "count", "products")
        self._add_float_state("part_totals", torch.zeros(len(_PARTS)))
        self.add_state("part_counts", default=torch.zeros(len(_PARTS), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, model: Callable[..., Any], x: Tensor, y: Tensor | None = None) -> None:
        """Add the samples of a batch."""
        components: FisherComponents = fisher_spectral_norm(
            model, x, self.method, return_components=True, y=y, **self.options
        )
        self.last_values = components.spectral_norm
        self.last_boundary = components.boundary
        values = self.last_values.to(self.total)
        floored = values.clamp(min=self.floor)
        self.total = self.total + values.sum()
        self.inverse_total = self.inverse_total + floored.reciprocal().sum()
        self.log_total = self.log_total + floored.log().sum()
        self.largest = torch.cat([values, self.largest.unsqueeze(0)]).max()
        self.saturated = self.saturated + (values < self.floor).sum()
        self.count = self.count + len(values)
        self.products = self.products + components.products.sum()
        parts = [getattr(components, name) for name in _PARTS]
        zero = self.total.new_zeros(())
        self.part_totals = self.part_totals + torch.stack([zero if p is None else p.to(zero).sum() for p in parts])
        self.part_counts = self.part_counts + self.part_counts.new_tensor([0 if p is None else len(p) for p in parts])

    def compute(self) -> Tensor:
        """Compute the mean over all batches."""
        count = self.count.clamp(min=1)
        means = {
            "mean": self.total / count,
            "inverse": self.inverse_total / count,
            "geometric": (self.log_total / count).exp() if self.count else self.log_total,
            "max": self.largest,
            "saturated": self.saturated / count,
            "products": self.products / count,
        }
        for name, total, number in zip(_PARTS, self.part_totals, self.part_counts, strict=True):
            if number:
                means[name] = total / number
        self._components = {name: value.float() for name, value in means.items()} | {"count": self.count.clone()}
        return self._components["mean"]
