import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Settings of newer versions of torch, parents first: what is "none" has the value of its parent
_SETTINGS = [
    ("generic", "all"),
    *((backend, op) for backend in ("cuda", "mkldnn") for op in ("all", "conv", "matmul", "rnn")),
]


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating point dtype of a device, for sums that must not depend on the batch size."""
    return torch.float32 if device.type == "mps" else torch.float64


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in, and to return results in: float32 for half precision, else the dtype itself."""
    return torch.promote_types(dtype, torch.float32)


@contextmanager
def full_precision() -> Iterator[None]:
    """Let float32 products and convolutions have the precision of float32, whatever torch is set to.

    By default, GPUs convolve in TensorFloat32, whose mantissa has 10 bits instead of 23, and many programs allow it for
    matrix products too. On exit, even by an exception, all settings are what they were, older and newer ones of torch.
    (Where cuDNN was never set, in newer versions, its default of TF32 counts as set from then on.) They are shared by
    all threads of a process.

    Example:
        >>> import torch
        >>> from lightning_robustness._numbers import full_precision
        >>> torch.set_float32_matmul_precision("medium")
        >>> with full_precision():
        ...     torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        ('highest', False)
        >>> torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        ('medium', True)
        >>> torch.set_float32_matmul_precision("highest")

    """
    settings = _take_settings()
    matmul, cudnn = torch.get_float32_matmul_precision(), _cudnn_allows_tf32()
    try:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        _set(dict.fromkeys(settings, "ieee"))
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn
        _set(settings)  # last, since the two before change some of these


def _take_settings() -> dict[tuple[str, str], str]:
    """Read the settings of newer versions of torch and set them to "none", without which parents would show through.

    Older versions have none. The public attributes do not reach each of them.
    """
    settings: dict[tuple[str, str], str] = {}
    if hasattr(torch._C, "_get_fp32_precision_getter"):
        in_force = {key: torch._C._get_fp32_precision_getter(*key) for key in _SETTINGS}
        for key in _SETTINGS:
            own = torch._C._get_fp32_precision_getter(*key)
            torch._C._set_fp32_precision_setter(*key, "none")
            # Convolutions that were never set show TF32 here, even if they have followed their parent
            settings[key] = own if own == in_force[key] else "none"
    return settings


def _set(settings: dict[tuple[str, str], str]) -> None:
    for key, value in settings.items():
        torch._C._set_fp32_precision_setter(*key, value)


def _cudnn_allows_tf32() -> bool:
    """Read the older setting of cuDNN, after the newer ones were taken: torch refuses if it contradicts them."""
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return True


# Steps of 8-bit pixels, and parts of a step, so that budgets of tenths and quarters are written as such
_STEPS, _PARTS = 255, 20


def write_share(share: float) -> str:
    """Write a share in percent.

    Example:
        >>> from lightning_robustness._numbers import write_share
        >>> write_share(0.6129)
        '61.3 %'

    """
    return "unknown" if math.isnan(share) else f"{100 * share:.1f} %"


def write_interval(low: float, high: float) -> str:
    """Write a confidence interval of a share in percent, with a decimal where it is narrow.

    Example:
        >>> from lightning_robustness._numbers import write_interval
        >>> write_interval(0.57, 0.65), write_interval(0.612, 0.631)
        ('57-65 %', '61.2-63.1 %')

    """
    digits = 0 if high - low >= 0.04 else 1
    return f"{100 * low:.{digits}f}-{100 * high:.{digits}f} %"


def write_budget(eps: float, norm: str | None = None) -> str:
    """Write a perturbation budget, in steps of 8-bit pixels where it is such a fraction and not a short decimal.

    Example:
        >>> from lightning_robustness._numbers import write_budget
        >>> write_budget(8 / 255), write_budget(0.25 / 255), write_budget(0.11), write_budget(8.0, "l2")
        ('8/255', '0.25/255', '0.11', '8 in l2')

    """
    parts = _PARTS * _STEPS * eps
    is_decimal = math.isclose(eps, round(eps, 3), rel_tol=1e-6)
    is_fraction = 0 < eps < 1 and math.isclose(parts, round(parts), rel_tol=1e-6)
    text = f"{round(parts) / _PARTS:g}/{_STEPS}" if is_fraction and not is_decimal else f"{eps:.4g}"
    return f"{text} in l2" if norm == "l2" else text


def write_distance(distance: float, has_pixels: bool = True) -> str:
    """Write a distance between inputs, such as that to the decision boundary.

    Example:
        >>> from lightning_robustness._numbers import write_distance
        >>> write_distance(0.0122), write_distance(0.7123, has_pixels=False)
        ('3.1/255', '0.712')

    """
    if not math.isfinite(distance):
        return "infinite" if distance > 0 else str(distance)
    return f"{_STEPS * distance:.1f}/{_STEPS}" if has_pixels else f"{distance:.3g}"
