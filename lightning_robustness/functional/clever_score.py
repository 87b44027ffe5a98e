import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lightning_robustness._arguments import (
    check_classes,
    check_integer,
    check_integer_tensor,
    check_number,
    check_option,
    check_overflow,
)
from lightning_robustness._model.access import check_finite, compute_logits
from lightning_robustness._numbers import at_least_float32
from lightning_robustness.functional._jacobian import InputJacobian, opened
from lightning_robustness.input_space import InputSpace

# Below a shape of 1 the likelihood has no maximum. As the shape grows, the distribution approaches one without an end
# point: fits to fewer than a few hundred values often diverge that way, and the location with them.
_SHAPES = (1.0, 20.0)
# Grid of distances from the largest value to the end point, in standard deviations
_DISTANCES = (1e-4, 1e3, 24)


class ReverseWeibull(NamedTuple):
    r"""Parameters of :math:`F(v) = \exp(-((a - v) / b)^c)` for :math:`v < a`."""

    location: Tensor
    scale: Tensor
    shape: Tensor


def fit_reverse_weibull(values: Tensor) -> ReverseWeibull:
    """Fit the distribution along the last dimension of a tensor, for all others at once, in float64 on the CPU.

    For a given location the likelihood has one maximum over shape and scale, so only the location is searched. The
    shape is kept between 1 and 20. If the values are equal up to rounding, they are the location.
    """
    values = values.detach().cpu().double()
    largest = values.amax(dim=-1, keepdim=True)
    spread = values.std(dim=-1, correction=0, keepdim=True)
    constant = ~(spread > 1e-6 * largest.abs())
    depths = (largest - values) / torch.where(constant, 1.0, spread)

    def likelihood(log_distance: Tensor) -> Tensor:
        return _profile(depths + log_distance.exp())[0]

    start, stop, steps = _DISTANCES
    grid = torch.linspace(math.log(start), math.log(stop), steps, dtype=torch.double)
    candidates = torch.cat([likelihood(g.expand_as(largest)) for g in grid], dim=-1)
    best = grid[candidates.argmax(dim=-1, keepdim=True)]
    width = (grid[1] - grid[0]).item()
    distance = _golden_section(likelihood, best - width, best + width).exp()
    _, scale, shape = _profile(depths + distance)
    location = torch.where(constant, largest, largest + distance * spread)
    scale = torch.where(constant, 0.0, scale * spread)
    return ReverseWeibull(location.squeeze(-1), scale.squeeze(-1), shape.squeeze(-1))


def _profile(depths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Maximise the mean log likelihood of a Weibull distribution, and return it with the scale and shape."""
    logs = depths.log()
    mean = logs.mean(dim=-1, keepdim=True)
    # Newton's method for 1 / c = E_c[log] - E[log], where E_c weights values by their c-th power; the start is the
    # estimate from the standard deviation of the logarithms
    c = (math.pi / math.sqrt(6) / logs.std(dim=-1, correction=0, keepdim=True)).clamp(*_SHAPES)
    for _ in range(6):
        weights = (c * logs).softmax(dim=-1)
        weighted = (weights * logs).sum(dim=-1, keepdim=True)
        variance = (weights * (logs - weighted).square()).sum(dim=-1, keepdim=True)
        c = (c + (1 / c + mean - weighted) / (1 / c.square() + variance)).clamp(*_SHAPES)
    log_power = (c * logs).logsumexp(dim=-1, keepdim=True) - math.log(logs.shape[-1])
    return c.log() - log_power + (c - 1) * mean - 1, (log_power / c).exp(), c


def _golden_section(function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """Find the maximum of a function between two ends."""
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(20):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        at_left, at_right = function(torch.stack([left, right]))
        low, high = torch.where(at_left >= at_right, low, left), torch.where(at_left >= at_right, right, high)
    return (low + high) / 2


CleverNorm = Literal["l1", "l2", "linf"]
_ORDERS: dict[str, float] = {"l1": 1.0, "l2": 2.0, "linf": math.inf}
_DUAL_ORDERS = {1.0: math.inf, 2.0: 2.0, math.inf: 1.0}


def clever_score(
    model: Callable[..., Any],
    x: Tensor,
    radius: float,
    *,
    norm: CleverNorm = "l2",
    targets: Tensor | None = None,
    num_batches: int = 50,
    points_per_batch: int = 128,
    input_space: InputSpace | None = None,
    chunk_size: int = 1024,
    seed: int = 0,
) -> Tensor:
    r"""Estimate the smallest perturbation that changes the prediction by CLEVER scores, higher is more robust.

    .. math::
        \text{CLEVER}(x) = \min_{j \neq c} \min\left(\frac{g_j(x)}{L_j}, R\right) \quad
        g_j = z_c - z_j \quad
        L_j = \max_{\|y - x\|_p \leq R} \|\nabla g_j(y)\|_q

    Where :math:`z` are the logits, :math:`c` the predicted class, :math:`j` a target class, :math:`R` the radius and
    :math:`1/p + 1/q = 1`. If :math:`L_j` is right, no perturbation with a p-norm below :math:`g_j / L_j` reaches class
    :math:`j`. It is estimated as by Weng et al. (2018): take the largest gradient norm over a batch of points drawn
    uniformly from the ball, repeat this for many batches, and fit a reverse Weibull distribution to the maxima; its
    location is the estimate. So the score is an estimate, not a certificate. The points are the same for all samples,
    so scores don't depend on how the data is split into batches.

    Args:
        model: Callable from inputs to logits, or to an output that holds them.
        x: Floating point tensor of shape ``(N, ...)``, as the model sees it.
        radius: Radius R of the ball, in un-normalised units: no score is larger.
        norm: Norm of perturbations: ``"l1"``, ``"l2"`` or ``"linf"``.
        targets: Integer tensor of shape ``(N,)`` or ``(N, T)`` with the target classes of each sample. By default, the
            lowest score over all classes but the predicted one is returned.
        num_batches: Number of maxima to which the distribution is fitted; the paper uses 500.
        points_per_batch: Number of points per maximum; the paper uses 1024.
        input_space: Range and normalisation of the inputs, by default values in [0, 1] that are not normalised. Points
            are clamped to the range.
        chunk_size: Number of points to process at a time, which bounds memory; at least one batch of one sample.
        seed: Seed of the points.

    Returns:
        Tensor of shape ``(N,)``, or of the shape of ``targets``, with values from 0 to the radius; 0 where the target
        is the predicted class. It is float64 for float64 inputs and float32 otherwise.

    Raises:
        TypeError: If the inputs are not floating point, or the targets not integers.
        ValueError: If the logits are not of shape ``(N, K)``, not finite, cannot be differentiated, or depend on other
            samples, inputs are outside the range, or an argument is not as described.

    Example:
        >>> import torch
        >>> from lightning_robustness.functional import clever_score
        >>> model = torch.nn.Linear(2, 3, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 4.0], [0.0, 0.0], [-3.0, 4.0]]))
        >>> x = torch.tensor([[1.0, 0.5], [0.25, 1.0]])
        >>> clever_score(model, x, radius=2.0)
        tensor([1.0000, 0.2500])
        >>> clever_score(model, x, radius=2.0, norm="linf", targets=torch.tensor([1, 0]))
        tensor([0.7143, 0.0000])

    """
    _check_arguments(radius, norm, num_batches, points_per_batch, chunk_size)
    p = _ORDERS[norm]
    with opened(model, x, input_space, seed) as (x, space):
        dtype = at_least_float32(x.dtype)
        if len(x) == 0:
            return torch.zeros(0 if targets is None else targets.shape, dtype=dtype, device=x.device)
        with torch.no_grad():
            logits = compute_logits(model, x)
        check_finite(logits)
        logits = logits.to(dtype)
        preds = logits.argmax(dim=1, keepdim=True)
        classes = _other_classes(preds, logits.shape[1]) if targets is None else _check_targets(targets, logits)
        margins = logits.gather(1, preds) - logits.gather(1, classes)
        maxima = []
        for _ in range(num_batches):
            offsets = radius * _uniform_in_unit_ball((points_per_batch, *x.shape[1:]), p).to(x)
            index = torch.arange(len(x), device=x.device).split(max(1, chunk_size // points_per_batch))
            norms = [_largest_gradients(model, x[i], preds[i], classes[i], offsets, p, space) for i in index]
            maxima.append(torch.cat(norms))
    constants = fit_reverse_weibull(check_overflow(torch.stack(maxima, dim=-1))).location.to(margins)
    scores = torch.where(constants > 0, margins / constants, math.inf).clamp(max=radius)
    scores = torch.where(margins > 0, scores, 0.0)
    return scores.amin(dim=1) if targets is None else scores.reshape(targets.shape)


def _check_arguments(radius: float, norm: CleverNorm, num_batches: int, points_per_batch: int, chunk_size: int) -> None:
    check_number("radius", radius, exclusive=True)
    check_option("norm", norm, CleverNorm)
    counts = {"num_batches": num_batches, "points_per_batch": points_per_batch, "chunk_size": chunk_size}
    for name, value in counts.items():
        check_integer(name, value, minimum=1)


def _check_targets(targets: Tensor, logits: Tensor) -> Tensor:
    """Return targets in the shape ``(N, T)``."""
    check_integer_tensor("targets", targets)
    if targets.ndim not in (1, 2) or len(targets) != len(logits) or targets.numel() == 0:
        raise ValueError(
            f"Expected `targets` to have shape ({len(logits)},) or ({len(logits)}, T), target classes for each sample, "
            f"but got {tuple(targets.shape)}."
        )
    check_classes("targets", int(targets.min()), int(targets.max()), logits.shape[1])
    return targets.reshape(len(logits), -1).long().to(logits.device)


def _other_classes(preds: Tensor, num_classes: int) -> Tensor:
    """List all classes but the predicted one for each sample, shape ``(N, num_classes - 1)``."""
    classes = torch.arange(num_classes - 1, device=preds.device)
    return classes + (classes >= preds)


def _uniform_in_unit_ball(shape: tuple[int, ...], p: float) -> Tensor:
    """Draw points uniformly from the unit ball of the p-norm; the first dimension counts the points."""
    num_points, num_dims = shape[0], math.prod(shape[1:])
    if p == math.inf:
        return torch.empty(shape).uniform_(-1, 1)
    if p == 1:
        # Exponential variables, divided by their sum with one more, are uniform in the positive part of the ball
        lengths = torch.empty(num_points, num_dims + 1).exponential_()
        signs = torch.randint(2, (num_points, num_dims)) * 2 - 1
        return (signs * lengths[:, :-1] / lengths.sum(dim=1, keepdim=True)).reshape(shape)
    directions = functional.normalize(torch.randn(num_points, num_dims), dim=1)
    return (directions * torch.rand(num_points, 1) ** (1 / num_dims)).reshape(shape)


def _largest_gradients(
    model: Callable[..., Any], x: Tensor, preds: Tensor, classes: Tensor, offsets: Tensor, p: float, space: InputSpace
) -> Tensor:
    """Compute the largest gradient norm of each margin over the points around each sample, shape ``(N, T)``."""
    points = (x.unsqueeze(1) + offsets / space.scale(x)).flatten(0, 1)
    if space.low is not None or space.high is not None:
        points = space.normalize(space.unnormalize(points).clamp(space.low, space.high))
    jacobian = InputJacobian(model, points, space)
    preds, classes = (labels.repeat_interleave(len(offsets), dim=0) for labels in (preds.squeeze(1), classes))
    norms = [
        torch.linalg.vector_norm(jacobian.margin_gradient(preds, target), ord=_DUAL_ORDERS[p], dim=1)
        for target in classes.unbind(dim=1)
    ]
    return torch.stack(norms, dim=1).unflatten(0, (len(x), len(offsets))).amax(dim=1)
