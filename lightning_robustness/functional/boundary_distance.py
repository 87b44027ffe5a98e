import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_robustness._arguments import check_classes, check_integer, check_labels, check_option
from lightning_robustness._numbers import at_least_float32
from lightning_robustness.functional._jacobian import FEW_CLASSES, InputJacobian, opened
from lightning_robustness.functional.attack_success_rate import wilson_interval
from lightning_robustness.input_space import InputSpace

BoundaryNorm = Literal["linf", "l2"]

# Order of the dual norm, in which gradients are measured
_DUAL_ORDERS = {"linf": 1, "l2": 2}
# Rivals with the highest logits that are looked at where there are many classes; docs/boundary.md says how often the
# nearest one is among them
_NUM_RIVALS = 5


def _check_arguments(norm: BoundaryNorm, num_rivals: int | None, chunk_size: int | None) -> None:
    check_option("norm", norm, BoundaryNorm)
    for name, value in {"num_rivals": num_rivals, "chunk_size": chunk_size}.items():
        if value is not None:
            check_integer(name, value, minimum=1)


def margins_and_slopes(
    jacobian: InputJacobian, y: Tensor | None, norm: BoundaryNorm, num_rivals: int | None
) -> tuple[Tensor, Tensor]:
    """Compute the margins z_c - z_j of a class over its rivals, and the dual norms of their gradients.

    With a Jacobian that creates graphs, both can be differentiated.
    """
    logits = jacobian.logits
    num_classes = logits.shape[1]
    if y is not None and len(y):
        check_classes("y", None, int(y.max()), num_classes)
    classes = logits.argmax(dim=1) if y is None else y.long()
    if num_rivals is None:
        num_rivals = num_classes if jacobian.has_rows or num_classes <= FEW_CLASSES else _NUM_RIVALS
    others = logits.detach().scatter(1, classes.unsqueeze(1), -torch.inf)
    rivals = others.topk(min(num_rivals, num_classes - 1), dim=1).indices
    margins = logits.gather(1, classes.unsqueeze(1)) - logits.gather(1, rivals)
    slopes = [
        torch.linalg.vector_norm(jacobian.margin_gradient(classes, rival), ord=_DUAL_ORDERS[norm], dim=1)
        for rival in rivals.unbind(dim=1)
    ]
    return margins, torch.stack(slopes, dim=1)


def nearest_boundary(
    jacobian: InputJacobian, y: Tensor | None, norm: BoundaryNorm, num_rivals: int | None = None
) -> Tensor:
    """Compute the distance of each sample to the decision boundary, to first order."""
    margins, slopes = margins_and_slopes(jacobian, y, norm, num_rivals)
    # A margin without a slope never vanishes, unless it is zero already
    unreachable = torch.where(margins == 0, 0.0, torch.copysign(torch.full_like(margins, math.inf), margins))
    return torch.where(slopes == 0, unreachable, margins / slopes).amin(dim=1)


def boundary_distance(
    model: Callable[..., Any],
    x: Tensor,
    y: Tensor | None = None,
    norm: BoundaryNorm = "linf",
    *,
    num_rivals: int | None = None,
    input_space: InputSpace | None = None,
    chunk_size: int | None = None,
    seed: int = 0,
) -> Tensor:
    r"""Compute the distance of each sample to the decision boundary, to first order, higher is more robust.

    .. math::
        d(x) = \min_{j \neq c} \frac{z_c(x) - z_j(x)}{\|\nabla_x (z_c - z_j)(x)\|_q}
        \quad \frac{1}{p} + \frac{1}{q} = 1

    Where :math:`z` are the logits, :math:`c` is the label, :math:`j` a rival class and :math:`p` the norm of
    perturbations: it is the size of the smallest perturbation that changes the prediction of the model's
    linearisation at :math:`x`, which is the first step of DeepFool. It is exact for a linear model. It is a local
    estimate, not a bound, and too high where gradients are masked. Where all gradients are zero it is infinite.
    Derivatives that are not finite count as zero, with a warning.

    It takes one forward pass and one backward pass per rival, for the whole batch at once, in eval mode. The model is
    left as it was. :func:`~lightning_robustness.functional.fisher_spectral_norm` returns the same values from the
    Jacobian that it computes anyway.

    Args:
        model: Callable from inputs to logits, or to an output that holds them.
        x: Floating point tensor of shape ``(N, ...)``, as the model sees it.
        y: Integer tensor of shape ``(N,)`` with the true labels. By default the predicted ones.
        norm: Norm of the perturbations, ``"linf"`` or ``"l2"``.
        num_rivals: Number of rival classes to look at, those with the highest logits; fewer can only raise the
            distance. By default all of up to 12 classes, and 5 rivals where there are more classes.
        input_space: Range and normalisation of the inputs, by default values in [0, 1] that are not normalised.
            Results are in un-normalised units.
        chunk_size: Number of samples to process at a time, which bounds memory; by default all.
        seed: Seed of the random state, for models that draw random numbers even in eval mode.

    Returns:
        Tensor of shape ``(N,)``, negative where ``y`` is not the predicted class; float64 for float64 inputs and
        float32 otherwise.

    Raises:
        TypeError: If the inputs are not floating point, or the labels not integers.
        ValueError: If the logits are not of shape ``(N, K)`` with at least 2 classes, not finite, cannot be
            differentiated or depend on other samples, inputs are outside the range, labels do not fit, or an argument
            is not as described.

    Example:
        >>> import torch
        >>> from lightning_robustness.functional import boundary_distance
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
        >>> x = torch.tensor([[1.0, 0.5], [0.25, 1.0]])
        >>> boundary_distance(model, x, y=torch.tensor([0, 0]))
        tensor([ 0.1429, -0.4643])
        >>> boundary_distance(model, x, norm="l2")
        tensor([0.2000, 0.6500])

    """
    _check_arguments(norm, num_rivals, chunk_size)
    with opened(model, x, input_space, seed) as (x, space):
        dtype = at_least_float32(x.dtype)
        if y is not None:
            check_labels("y", y, len(x))
            y = y.to(x.device)
        if len(x) == 0:
            return torch.zeros(0, dtype=dtype, device=x.device)
        distances = [
            nearest_boundary(InputJacobian(model, x[i], space), None if y is None else y[i], norm, num_rivals)
            for i in torch.arange(len(x), device=x.device).split(chunk_size or len(x))
        ]
    return torch.cat(distances).to(dtype)


def quantile(values: Tensor, position: float) -> Tensor:
    """Compute a quantile as NumPy does, by linear interpolation, of values that may be infinite; 0 without any.

    Where the interpolation is between infinities of both signs, it is the lower one.
    """
    if len(values) == 0:
        return values.new_zeros(())
    ordered, place = values.sort().values, position * (len(values) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    share = place - math.floor(place)
    if low == high or share == 0 or low == -math.inf:
        return low
    return low * (1 - share) + high * share


def share_beyond(
    distances: Tensor, budgets: Sequence[float], confidence: float = 0.95
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the share of distances above each budget, with its Wilson confidence interval."""
    limits = torch.tensor(budgets, dtype=distances.dtype, device=distances.device)
    beyond = (distances.unsqueeze(0) > limits.unsqueeze(1)).sum(dim=1)
    count = torch.full_like(beyond, len(distances))
    return beyond / count.clamp(min=1), *wilson_interval(beyond, count, confidence)
