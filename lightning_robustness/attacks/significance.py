"""Whether counts of successful attacks differ by more than what is left to the choice of samples and random starts."""

import math
from statistics import NormalDist

import torch

# Probability of a false alarm of each test
LEVEL = 0.01


def binomial_tail(successes: int, trials: int, probability: float) -> float:
    """Compute the probability of at least this many successes in independent trials.

    Example:
        >>> from lightning_robustness.attacks.significance import binomial_tail
        >>> round(binomial_tail(7, 7, 0.5), 4)
        0.0078

    """
    if successes <= 0 or probability >= 1:
        return float(successes <= trials)
    if successes > trials or probability <= 0:
        return 0.0
    k = torch.arange(successes, trials + 1, dtype=torch.float64)
    n = torch.tensor(float(trials), dtype=torch.float64)
    ways = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    log_terms = ways + k * math.log(probability) + (n - k) * math.log1p(-probability)
    return min(1.0, log_terms.logsumexp(dim=0).exp().item())


def is_more_than(successes: int, trials: int, share: float) -> bool:
    """Tell whether successes are more frequent than a share, and more than a handful (a sign test against none)."""
    return max(binomial_tail(successes, trials, share), 0.5**successes) < LEVEL


def is_more_often(only_first: int, only_second: int, trials: int, tolerance: float) -> bool:
    """Tell whether one attack succeeds more often than another on the same samples, by McNemar's exact test.

    Args:
        only_first: Number of samples that only the first attack breaks.
        only_second: Number of samples that only the second attack breaks.
        trials: Number of all samples.
        tolerance: Difference of the rates that does not count, however certain it is.

    """
    is_larger = only_first - only_second > tolerance * trials
    return is_larger and binomial_tail(only_first, only_first + only_second, 0.5) < LEVEL


def is_higher_rate(first: tuple[int, int], second: tuple[int, int], tolerance: float) -> bool:
    """Tell whether a rate is higher than another by more than a tolerance, from successes and trials of two samples.

    By the normal approximation, with one success and one failure added to each sample.
    """
    rates = [(successes + 1) / (trials + 2) for successes, trials in (first, second)]
    variances = [rate * (1 - rate) / (trials + 2) for rate, (_, trials) in zip(rates, (first, second), strict=True)]
    bound = NormalDist().inv_cdf(1 - LEVEL) * math.sqrt(sum(variances))
    return rates[0] - rates[1] - tolerance > bound
