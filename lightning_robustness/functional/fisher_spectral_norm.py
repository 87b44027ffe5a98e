from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_robustness._arguments import check_flag, check_labels, check_option, check_overflow
from lightning_robustness._model.access import compute_logits
from lightning_robustness._numbers import accumulation_dtype, at_least_float32
from lightning_robustness._processes import rank_zero_warn
from lightning_robustness.functional._fisher_estimators import (
    ESTIMATORS,
    Distribution,
    FisherComponents,
    FisherMethod,
    FisherSettings,
    blackbox,
    input_direction,
)
from lightning_robustness.functional._jacobian import FEW_CLASSES, InputJacobian, opened
from lightning_robustness.functional.boundary_distance import BoundaryNorm, nearest_boundary
from lightning_robustness.input_space import InputSpace

# Components that only some methods have
FISHER_PARTS = ("trace", "jacobian_norm", "lipschitz")
# Smallest norm that counts in the inverse and the geometric mean
FLOOR = 1e-12
# Entries of Jacobians that are held in memory at a time
_JACOBIAN_NUMBERS = 2**25


def fisher_spectral_norm(
    model: Callable[..., Any],
    x: Tensor,
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
    return_components: bool = False,
    return_direction: bool = False,
) -> Tensor | FisherComponents:
    r"""Compute the spectral norm of the Fisher information of each input, lower is more robust.

    .. math::
        \lambda = \|G\|_2 \quad
        G = \sum_k p_k \, \nabla_x \log p_k \, (\nabla_x \log p_k)^T
          = J^T (\operatorname{diag}(p) - p p^T) J

    Where :math:`p` is the softmax of the logits and :math:`J` their Jacobian with respect to the input. To second
    order, a perturbation :math:`d` changes the prediction by a Kullback-Leibler divergence of
    :math:`d^T G d / 2 \le \lambda \|d\|^2 / 2`. The model is evaluated in eval mode and left as it was.

    Args:
        model: Callable from inputs of shape ``(N, ...)`` to logits of shape ``(N, K)``.
        x: Floating point tensor of inputs as the model sees them, of any shape ``(N, ...)``.
        method: ``"exact"`` takes K vector-Jacobian products, for all samples at once, and solves an eigenvalue problem
            of size K. ``"lanczos"`` takes one product with :math:`J` and one with :math:`J^T` per step, and needs few
            steps regardless of K. ``"power"`` is power iteration with the same products, the paper's Algorithm 1.
            ``"rayleigh"`` is the paper's Algorithm 2, the largest Rayleigh quotient of random vectors, a lower bound
            that is often far too low. ``"blackbox"`` is a lower bound from forward passes alone, of a model in
            float32 or wider. ``"auto"`` is exact for up to 12 classes, and Lanczos above.
        input_space: Range and normalisation of the inputs, by default values in [0, 1] that are not normalised.
            Results are in un-normalised units.
        tolerance: Relative error, estimated from the residual, at which ``"lanczos"`` stops for a sample, and relative
            change still to come at which ``"power"`` stops. A loose one may, for a rare sample, stop at a smaller
            eigenvalue.
        max_steps: Largest number of their steps. Where ``"power"`` takes them all without converging, a warning says
            for how many samples, and the component ``converged`` for which.
        num_directions: Number of random vectors of ``"rayleigh"`` and ``"blackbox"``.
        distribution: Distribution of the random vectors of ``"rayleigh"``.
        rayleigh_ritz: Whether ``"blackbox"`` takes the largest value on the span of its directions, instead of the
            largest of their values, from the same forward passes. It is never lower.
        chunk_size: Number of samples to process at a time, which bounds memory. By default, all for the matrix-free
            methods, and for ``"exact"`` as many as have Jacobians of at most 2^25 entries together.
        seed: Seed of the random vectors, which are the same for all samples.
        return_components: Whether to also return the error bound, the number of products and the by-products of the
            method: with ``"exact"``, the trace of G, the norm of J and the local Lipschitz constant.
        return_direction: Whether to return these components with ``direction``, the worst-case perturbation to second
            order: the principal eigenvector of G, or the vector of the method's lower bound, as unit vectors in
            un-normalised units of the shape of ``x``. It points to where the probability of the predicted class falls;
            it is zero where G is.

    Returns:
        Tensor of shape ``(N,)``, float64 for float64 inputs and float32 otherwise; or :class:`FisherComponents` of
        such tensors.

    Raises:
        TypeError: If the inputs are not floating point.
        ValueError: If the logits are not finite, not of shape ``(N, K)`` or depend on other samples, inputs are outside
            the range, or an argument is not as described.
        RuntimeError: If the model can be differentiated neither twice nor in forward mode, which ``"lanczos"`` and
            ``"power"`` need.

    Example:
        >>> import torch
        >>> from lightning_robustness.functional import fisher_spectral_norm
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[2.0, 0.0], [0.0, 0.0]]))
        >>> fisher_spectral_norm(model, torch.tensor([[0.0, 0.0], [1.0, 0.5]]))
        tensor([1.0000, 0.4200])
        >>> fisher_spectral_norm(model, torch.zeros(1, 2), return_components=True).jacobian_norm
        tensor([2.])

    """
    check_flag("return_components", return_components)
    check_flag("return_direction", return_direction)
    settings = FisherSettings(
        method,
        input_space,
        tolerance,
        max_steps,
        num_directions,
        distribution,
        rayleigh_ritz,
        chunk_size,
        seed,
        return_direction,
    )
    components = fisher_and_boundary(model, x, settings)
    return components if return_components or return_direction else components.spectral_norm


def fisher_and_boundary(
    model: Callable[..., Any],
    x: Tensor,
    settings: FisherSettings,
    boundary: BoundaryNorm | None = None,
    y: Tensor | None = None,
) -> FisherComponents:
    """Compute the spectral norm and, from the same Jacobian, the distance to the decision boundary in a norm."""
    if boundary is not None:
        check_option("boundary", boundary, BoundaryNorm)
    method, chunk_size = settings.method, settings.chunk_size

    def measure(x: Tensor, y: Tensor | None, space: InputSpace) -> FisherComponents:
        if method == "blackbox":
            found = blackbox(model, x, space, settings)
        else:
            jacobian = InputJacobian(model, x, space, twice=method in ("lanczos", "power"))
            found = ESTIMATORS[method](jacobian, settings)
            vector = input_direction(jacobian, found.direction) if settings.direction else None  # type: ignore[arg-type]
            distance = None if boundary is None else nearest_boundary(jacobian, y, boundary, None)
            found = found._replace(boundary=distance, direction=vector, nonfinite_gradients=jacobian.nonfinite)
        return found if found.direction is None else found._replace(direction=found.direction.view_as(x))

    with opened(model, x, settings.input_space, settings.seed) as (x, space):
        if y is not None:
            check_labels("y", y, len(x))
            y = y.to(x.device)
        if len(x) == 0:
            direction = torch.zeros_like(x) if settings.direction else None
            products = torch.zeros(0, dtype=torch.long, device=x.device)
            chunks = [FisherComponents(x.new_zeros(0), products, direction=direction)]
        else:
            if method in ("auto", "exact"):
                num_classes = compute_logits(model, x[:1]).shape[1]
                method = "exact" if method == "exact" or num_classes <= FEW_CLASSES else "lanczos"
                if method == "exact" and chunk_size is None:
                    chunk_size = max(1, _JACOBIAN_NUMBERS // (num_classes * x[0].numel()))
            index = torch.arange(len(x), device=x.device).split(chunk_size or len(x))
            chunks = [measure(x[i], None if y is None else y[i], space) for i in index]
    dtype = at_least_float32(x.dtype)
    components = FisherComponents(*(_join(values, dtype) for values in zip(*chunks, strict=True)))
    check_overflow(components.spectral_norm)
    stuck = 0 if components.converged is None else int((~components.converged).sum())
    if stuck:
        rank_zero_warn(
            f"Power iteration took all {settings.max_steps} steps without converging for {stuck} of {len(x)} samples, "
            'whose values are too low. Raise `max_steps`, or use method="lanczos".',
            stacklevel=3,
        )
    return components


def _join(values: tuple[Any, ...], dtype: torch.dtype) -> Any:
    """Join the chunks of one component, or return None where the method does not have it."""
    if values[0] is None:
        return None
    joined = torch.cat(values)
    return joined.to(dtype) if joined.is_floating_point() else joined


def fisher_means(components: FisherComponents, floor: float = FLOOR) -> dict[str, Tensor]:
    """Compute means over samples, in the widest precision of the device; 0 without samples."""
    values = components.spectral_norm.to(accumulation_dtype(components.spectral_norm.device))
    floored, number, zero = values.clamp(min=floor), max(len(values), 1), values.new_zeros(())
    means = {
        "mean": values.sum() / number,
        "inverse": floored.reciprocal().sum() / number,
        "geometric": (floored.log().sum() / number).exp() if len(values) else zero,
        "max": values.amax() if len(values) else zero,
        "saturated": (values < floor).sum() / number,
        "products": components.products.sum() / number,
    }
    for name in FISHER_PARTS:
        part = getattr(components, name)
        if part is not None and len(part):
            means[name] = part.to(values).sum() / len(part)
    return {name: value.float() for name, value in means.items()}
