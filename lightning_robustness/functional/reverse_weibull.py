"""Maximum likelihood fit of the reverse Weibull distribution, the limit of maxima of bounded values."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Below a shape of 1 the likelihood has no maximum. As the shape grows, the distribution approaches one without an end
# point: fits to fewer than a few hundred values often diverge that way, and the location with them.
_SHAPES = (1.0, 20.0)
# Grid of distances from the largest value to the end point, in standard deviations
_DISTANCES = (1e-4, 1e3, 24)


class ReverseWeibull(NamedTuple):
    r"""Parameters of :math:`F(v) = \exp(-((a - v) / b)^c)` for :math:`v < a`.

    Args:
        location: The end point a, which no value exceeds.
        scale: The scale b.
        shape: The shape c.

    """

    location: Tensor
    scale: Tensor
    shape: Tensor


def fit_reverse_weibull(values: Tensor) -> ReverseWeibull:
    """Fit the distribution along the last dimension of a tensor, for all others at once, in float64 on the CPU.

    For a given location the likelihood has one maximum over shape and scale, so only the location is searched: on a
    grid, then by golden sections. The shape is kept between 1 and 20. If the values are equal up to rounding, they are
    the location.

    Args:
        values: Floating point tensor of shape ``(..., n)``.

    Returns:
        Parameters, of shape ``(...)``.

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
