import pytest
import torch

from lightning_robustness.utilities.precision import accumulation_dtype, at_least_float32


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float64), ("cuda", torch.float64), ("mps", torch.float32)])
def test_sums_are_as_wide_as_the_device_can(device, dtype):
    assert accumulation_dtype(torch.device(device)) == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_nothing_is_narrower_than_float32(dtype):
    assert at_least_float32(dtype) == torch.float32
    assert at_least_float32(torch.float64) == torch.float64
