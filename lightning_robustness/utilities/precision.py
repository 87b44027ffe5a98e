import torch


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating point dtype of a device, for sums that must not depend on the batch size."""
    return torch.float32 if device.type == "mps" else torch.float64


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in, and to return results in: float32 for half precision, else the dtype itself."""
    return torch.promote_types(dtype, torch.float32)
