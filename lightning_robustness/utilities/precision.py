"""The precision that results are computed in."""

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
        >>> from lightning_robustness.utilities.precision import full_precision
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
