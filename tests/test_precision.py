import functools
import subprocess
import sys

import pytest
import torch

from lightning_robustness._isolation.sandbox import full_precision
from lightning_robustness._numbers import accumulation_dtype, at_least_float32


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float64), ("cuda", torch.float64), ("mps", torch.float32)])
def test_sums_are_as_wide_as_the_device_can(device, dtype):
    assert accumulation_dtype(torch.device(device)) == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_nothing_is_narrower_than_float32(dtype):
    assert at_least_float32(dtype) == torch.float32
    assert at_least_float32(torch.float64) == torch.float64


BACKENDS = torch.backends


@pytest.fixture
def _kept_settings():
    """Start from the defaults, set by hand, and forget what a test sets."""
    set_defaults()
    yield
    set_defaults()


def set_defaults():
    if hasattr(BACKENDS, "fp32_precision"):
        BACKENDS.fp32_precision = BACKENDS.cudnn.fp32_precision = "none"
        for part in (BACKENDS.mkldnn.matmul, BACKENDS.mkldnn.conv, BACKENDS.cuda.matmul):
            part.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    BACKENDS.cudnn.allow_tf32 = True


def set_on(path, value):
    """Set what a dotted path below `torch.backends` leads to, as a user would."""
    *parents, name = path.split(".")
    setattr(functools.reduce(getattr, parents, BACKENDS), name, value)


def try_to_read(read):
    try:
        return read()
    except RuntimeError:  # torch refuses where its older and newer settings contradict each other
        return "refused"


def observe():
    """Read all settings, and how the newer ones follow a change of that above them."""
    found = [
        try_to_read(torch.get_float32_matmul_precision),
        try_to_read(lambda: BACKENDS.cudnn.allow_tf32),
        try_to_read(lambda: BACKENDS.cuda.matmul.allow_tf32),
    ]
    if hasattr(BACKENDS, "fp32_precision"):
        parts = [BACKENDS.cudnn, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn, BACKENDS.cuda.matmul, BACKENDS.mkldnn]
        parts += [BACKENDS.mkldnn.matmul, BACKENDS.mkldnn.conv, BACKENDS.mkldnn.rnn]
        kept = BACKENDS.fp32_precision
        for value in (kept, "ieee", "tf32"):
            BACKENDS.fp32_precision = value
            found += [value, *(part.fp32_precision for part in parts)]
        BACKENDS.fp32_precision = kept
    return found


def medium():
    torch.set_float32_matmul_precision("medium")


OLDER = {
    "nothing": [],
    "medium": [medium],
    "allow_tf32": [("cuda.matmul.allow_tf32", True)],
    "convolutions": [("cudnn.allow_tf32", False)],
}
NEWER = {
    "all": [("fp32_precision", "tf32")],
    "all in bfloat16": [("fp32_precision", "bf16")],
    "products": [("cuda.matmul.fp32_precision", "tf32")],
    "one for cuDNN, another for all": [("fp32_precision", "ieee"), ("cudnn.fp32_precision", "tf32")],
    "convolutions alone": [("cudnn.conv.fp32_precision", "ieee")],
    "a CPU": [("mkldnn.matmul.fp32_precision", "bf16"), ("mkldnn.conv.fp32_precision", "bf16")],
    "both ways": [medium, ("cuda.matmul.fp32_precision", "ieee"), ("fp32_precision", "tf32")],
    "both ways, convolutions": [("cudnn.allow_tf32", False), ("fp32_precision", "tf32")],
}
CHOICES = OLDER | (NEWER if hasattr(BACKENDS, "fp32_precision") else {})


@pytest.mark.usefixtures("_kept_settings")
@pytest.mark.parametrize("choice", CHOICES)
def test_full_precision_inside_and_the_settings_of_before_outside(choice):
    for setting in CHOICES[choice]:
        setting() if callable(setting) else set_on(*setting)
    before = observe()

    def check_inside():
        assert torch.get_float32_matmul_precision() == "highest"
        assert not BACKENDS.cuda.matmul.allow_tf32
        assert not BACKENDS.cudnn.allow_tf32
        if hasattr(BACKENDS, "fp32_precision"):
            parts = (BACKENDS.cuda.matmul, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn, BACKENDS.mkldnn.matmul)
            assert {part.fp32_precision for part in (*parts, BACKENDS.mkldnn.conv, BACKENDS)} == {"ieee"}

    with full_precision():
        check_inside()
        with full_precision():
            check_inside()
        check_inside()
    assert observe() == before
    with pytest.raises(KeyError), full_precision():
        raise KeyError
    assert observe() == before


@pytest.mark.usefixtures("_kept_settings")
def test_the_test_sees_a_setting_that_is_not_put_back():
    before = observe()
    medium()
    assert observe() != before


UNSET = """
import torch
from lightning_robustness._isolation.sandbox import full_precision
from tests.gpu_like import convolves_in_tf32, multiplies_in_tf32

torch.backends.fp32_precision = "ieee"  # nothing but an attribute in older versions
before = convolves_in_tf32(), multiplies_in_tf32()
with full_precision():
    inside = convolves_in_tf32(), multiplies_in_tf32()
print(inside, before == (convolves_in_tf32(), multiplies_in_tf32()))
"""


def test_a_setting_of_everything_where_nothing_else_was_ever_set():
    # In a new process: what was set once cannot be made unset
    result = subprocess.run([sys.executable, "-c", UNSET], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "(False, False) True"
