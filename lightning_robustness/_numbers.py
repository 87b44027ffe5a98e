import math
import re
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating point dtype of a device, for sums that must not depend on the batch size."""
    return torch.float32 if device.type == "mps" else torch.float64


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in, and to return results in: float32 for half precision, else the dtype itself."""
    return torch.promote_types(dtype, torch.float32)


# Size up to which matrices are decomposed on the CPU
_SMALL = 128


def decompose(solver: Callable[[Tensor], Any], matrix: Tensor) -> Any:
    """Solve symmetric eigenvalue problems: small ones in float64 on the CPU.

    Solvers of GPUs fail or stall on tiny and singular matrices. Matrices that are not finite have eigenvalues of NaN.
    """
    is_finite = matrix.isfinite().flatten(-2).all(dim=-1)[..., None, None]
    finite = torch.where(is_finite, matrix, 0.0)
    if matrix.shape[-1] <= _SMALL or matrix.device.type == "mps":
        finite = finite.to("cpu", torch.float64)
    result = solver(finite)
    if isinstance(result, Tensor):
        return torch.where(is_finite[..., 0], result.to(matrix), torch.nan)
    values, vectors = (part.to(matrix) for part in result)
    return torch.where(is_finite[..., 0], values, torch.nan), vectors


def exponents(values: Tensor) -> Tensor:
    """Return the exponents of floating point numbers, which Apple's GPUs cannot take apart."""
    source = values.cpu() if values.device.type == "mps" else values
    return source.frexp().exponent.to(values.device)


def read_clock(device: torch.device) -> float:
    """Return the time in seconds once a device has finished what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return perf_counter()


# Steps of 8-bit pixels, and parts of a step, so that budgets of tenths and quarters are written as such
_STEPS, _PARTS = 255, 20


def write_settings(value: object) -> str:
    """Write an object, or a text of some, without addresses, which differ from run to run."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", value if isinstance(value, str) else repr(value))


def write_share(share: float) -> str:
    """Write a share in percent."""
    return "unknown" if math.isnan(share) else f"{100 * share:.1f} %"


def write_interval(low: float, high: float) -> str:
    """Write a confidence interval of a share in percent, with a decimal where it is narrow."""
    digits = 0 if high - low >= 0.04 else 1
    return f"{100 * low:.{digits}f}-{100 * high:.{digits}f} %"


def write_budget(eps: float, norm: str | None = None) -> str:
    """Write a perturbation budget, in steps of 8-bit pixels where it is such a fraction and not a short decimal."""
    parts = _PARTS * _STEPS * eps
    is_decimal = math.isclose(eps, round(eps, 3), rel_tol=1e-6)
    is_fraction = 0 < eps < 1 and math.isclose(parts, round(parts), rel_tol=1e-6)
    text = f"{round(parts) / _PARTS:g}/{_STEPS}" if is_fraction and not is_decimal else f"{eps:.4g}"
    return f"{text} in l2" if norm == "l2" else text


def write_distance(distance: float, has_pixels: bool = True) -> str:
    """Write a distance between inputs, such as the distance to the decision boundary."""
    if not math.isfinite(distance):
        return "infinite" if distance > 0 else str(distance)
    return f"{_STEPS * distance:.1f}/{_STEPS}" if has_pixels else f"{distance:.3g}"
