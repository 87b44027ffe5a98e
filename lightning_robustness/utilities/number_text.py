"""Shares, confidence intervals, perturbation budgets and distances as text."""

import math

# 8-bit pixels have this many steps
_STEPS = 255


def write_share(share: float) -> str:
    """Write a share in percent.

    Example:
        >>> from lightning_robustness.utilities.number_text import write_share
        >>> write_share(0.6129)
        '61.3 %'

    """
    return "unknown" if math.isnan(share) else f"{100 * share:.1f} %"


def write_interval(low: float, high: float) -> str:
    """Write a confidence interval of a share in percent, with a decimal where it is narrow.

    Example:
        >>> from lightning_robustness.utilities.number_text import write_interval
        >>> write_interval(0.57, 0.65), write_interval(0.612, 0.631)
        ('57-65 %', '61.2-63.1 %')

    """
    digits = 0 if high - low >= 0.04 else 1
    return f"{100 * low:.{digits}f}-{100 * high:.{digits}f} %"


def write_budget(eps: float) -> str:
    """Write a perturbation budget, in steps of 8-bit pixels where it is such a fraction and not a short decimal.

    Example:
        >>> from lightning_robustness.utilities.number_text import write_budget
        >>> write_budget(8 / 255), write_budget(0.5 / 255), write_budget(0.11), write_budget(8.0)
        ('8/255', '0.5/255', '0.11', '8')

    """
    steps = 10 * _STEPS * eps
    is_decimal = math.isclose(eps, round(eps, 3), rel_tol=1e-6)
    is_fraction = 0 < eps < 1 and math.isclose(steps, round(steps), rel_tol=1e-6)
    return f"{round(steps) / 10:g}/{_STEPS}" if is_fraction and not is_decimal else f"{eps:.4g}"


def write_distance(distance: float) -> str:
    """Write a distance between images with values in [0, 1], in steps of 8-bit pixels.

    Example:
        >>> from lightning_robustness.utilities.number_text import write_distance
        >>> write_distance(0.0122)
        '3.1/255'

    """
    return f"{_STEPS * distance:.1f}/{_STEPS}" if math.isfinite(distance) else str(distance)
