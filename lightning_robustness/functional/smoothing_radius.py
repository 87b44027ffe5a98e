import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_robustness._arguments import check_integer, check_number, check_share, check_tensor
from lightning_robustness._numbers import at_least_float32

_MOST_DIRECTIONS = 1_000_000_000


class SmoothingRadius(NamedTuple):
    """Certified radius of each sample, and how much noise changes it on average, at most and to first order."""

    radius: Tensor
    change: Tensor | None


def smoothing_radius(probs: Tensor, sigma: float, trace: Tensor | None = None) -> SmoothingRadius:
    r"""Relate the Fisher information to the radius that randomized smoothing certifies, higher is more robust.

    .. math::
        R = \frac{\sigma}{2} \big(\Phi^{-1}(p_A) - \Phi^{-1}(p_B)\big) \qquad
        \mathbb{E} |\Delta R| \lesssim \frac{\sigma}{2}
        \Big(\frac{1}{\varphi(\Phi^{-1}(p_A))} + \frac{1}{\varphi(\Phi^{-1}(p_B))}\Big)
        \frac{\sigma}{2} \sqrt{\operatorname{tr} G}

    Where :math:`p_A \ge p_B` are the two largest probabilities, :math:`\sigma` is the standard deviation of Gaussian
    noise, and :math:`\Phi` and :math:`\varphi` are the distribution and density of the standard normal. The change
    follows from Pinsker's and Jensen's inequalities with the Kullback-Leibler divergence to second order, of mean
    :math:`\sigma^2 \operatorname{tr} G / 2`, and :math:`\Phi^{-1}` to first order. The radius is certified only where
    the probabilities are bounds of the smoothed classifier's; of the network's own it is an indication.

    Args:
        probs: Floating point tensor of shape ``(N, K)``, the class probabilities.
        sigma: Standard deviation of the noise, in the units of the inputs.
        trace: Trace of the Fisher information of each sample, or a bound such as :math:`(K - 1) \|G\|`.

    Raises:
        TypeError: If the probabilities are not floating point.
        ValueError: If they are not of shape ``(N, K)`` with at least two classes, or outside [0, 1], or sigma is not
            positive.

    Example:
        >>> import torch
        >>> from lightning_robustness.functional import smoothing_radius
        >>> smoothing_radius(torch.tensor([[0.9, 0.06, 0.04]]), sigma=0.25).radius
        tensor([0.3545])

    """
    check_tensor("probs", probs)
    check_number("sigma", sigma, exclusive=True)
    if probs.ndim != 2 or probs.shape[1] < 2 or not ((probs >= 0) & (probs <= 1)).all():  # NaN is neither
        raise ValueError(
            "Expected `probs` to hold numbers from 0 to 1 of at least two classes, shape (N, K), but got "
            f"{probs.tolist()[:1]} in shape {tuple(probs.shape)}. Pass the softmax of the logits."
        )
    quantiles = torch.special.ndtri(probs.to(at_least_float32(probs.dtype)).topk(2, dim=1).values)
    radius = sigma / 2 * (quantiles[:, 0] - quantiles[:, 1])
    if trace is None:
        return SmoothingRadius(radius, None)
    check_tensor("trace", trace)
    if trace.shape != radius.shape or not (trace >= 0).all():
        raise ValueError(f"Expected `trace` to hold {len(radius)} non-negative numbers but got {trace.tolist()[:8]}.")
    slopes = ((quantiles.square() / 2).exp() * math.sqrt(2 * math.pi)).sum(dim=1)
    change = sigma**2 / 4 * slopes * trace.to(radius).sqrt()
    return SmoothingRadius(radius, torch.where(trace == 0, 0.0, change))  # also where a slope is infinite


def num_rayleigh_directions(num_classes: int, accuracy: float, confidence: float = 0.95) -> int:
    r"""Compute how many Gaussian vectors the method ``"rayleigh"`` needs, for any network.

    .. math:: M \ge \frac{\ln(1 - c)}{\ln(1 - q)} \quad q = P\big(u_1^2 \ge 1 - a\big)

    Where :math:`a` is the relative error, :math:`c` the confidence and :math:`u` a random unit vector of :math:`K`
    entries: a Rayleigh quotient is at least :math:`u_1^2 \|G\|`, with :math:`u_1` along the principal eigenvector. It
    grows exponentially in :math:`K`, which is why the other methods are better.

    Args:
        num_classes: Number of classes :math:`K`.
        accuracy: Relative error that is accepted, between 0 and 1.
        confidence: Probability of staying within it, between 0 and 1.

    Raises:
        ValueError: If an argument is out of range, or more than a billion vectors are needed.

    Example:
        >>> from lightning_robustness.functional import num_rayleigh_directions
        >>> num_rayleigh_directions(num_classes=3, accuracy=0.1, confidence=0.95)
        57

    """
    check_integer("num_classes", num_classes, minimum=2)
    for name, value in {"accuracy": accuracy, "confidence": confidence}.items():
        check_share(name, value)
    # The angle between u and the eigenvector has a density proportional to sin^(K - 2)
    angles = torch.linspace(0, math.asin(math.sqrt(accuracy)), 100_001, dtype=torch.float64)
    area = torch.trapezoid(angles.sin() ** (num_classes - 2), angles).item()
    log_whole = math.lgamma((num_classes - 1) / 2) - math.lgamma(num_classes / 2) + math.log(math.pi) / 2 - math.log(2)
    log_missed = math.log1p(-area / math.exp(log_whole))
    if math.log1p(-confidence) < _MOST_DIRECTIONS * log_missed:
        raise ValueError(
            f"Expected `num_classes` and `accuracy` that random vectors can reach but got {num_classes} and "
            f"{accuracy}, which take more than {_MOST_DIRECTIONS:,} of them. "
            'Use the method "lanczos", which takes a few products.'
        )
    return math.ceil(math.log1p(-confidence) / log_missed)
