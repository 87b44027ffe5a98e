import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_robustness.functional._spectral_norms import (
    convolution_norm,
    padding_norm,
    transposed_convolution_norm,
)
from tests.functional import dense


def norms(layer, shape):
    x = torch.zeros(1, *shape, dtype=torch.double)
    function = transposed_convolution_norm if "Transpose" in type(layer).__name__ else convolution_norm
    value, exact = function(layer, x, layer(x))
    return value, exact, dense.layer_norm(layer, shape)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), (2, 7)),
        (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 5, 6)),
        (nn.Conv2d(3, 2, (3, 5), padding=(1, 2), padding_mode="circular"), (3, 6, 5)),
        (nn.Conv2d(2, 4, 3, stride=2, padding=1, padding_mode="circular"), (2, 6, 4)),
        (nn.Conv2d(2, 4, 3, stride=(1, 3), padding=1, padding_mode="circular"), (2, 5, 6)),
        (nn.Conv2d(4, 6, 3, padding=1, groups=2, padding_mode="circular"), (4, 5, 5)),
        (nn.Conv2d(4, 4, 3, padding=1, groups=4, stride=2, padding_mode="circular"), (4, 6, 6)),
        (nn.Conv2d(2, 2, 3, padding=2, dilation=2, padding_mode="circular"), (2, 6, 7)),
        (nn.Conv2d(2, 2, 4, padding="same", padding_mode="circular"), (2, 6, 5)),
        (nn.Conv2d(1, 1, 5, padding=2, padding_mode="circular"), (1, 3, 3)),  # the kernel wraps around
        (nn.Conv3d(2, 2, 3, padding=1, padding_mode="circular"), (2, 3, 4, 3)),
        (nn.Conv2d(3, 5, 1), (3, 4, 4)),
        (nn.Conv2d(3, 5, 1, stride=2, padding=1, groups=1), (3, 5, 4)),
        (nn.ConvTranspose2d(3, 5, 1, stride=2), (3, 4, 4)),
    ],
)
def test_is_exact_for_circular_padding_and_kernels_of_size_one(layer, shape):
    value, exact, expected = norms(layer.double(), shape)
    assert exact
    assert value == pytest.approx(expected, rel=1e-10)


@settings(deadline=None, max_examples=60)
@given(
    num_dims=st.integers(1, 2),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    padding=st.integers(0, 3),
    dilation=st.integers(1, 2),
    groups=st.sampled_from([1, 2]),
    size=st.integers(3, 7),
    mode=st.sampled_from(["zeros", "circular", "reflect", "replicate"]),
    transposed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_is_never_below_the_dense_matrix(
    num_dims, kernel, stride, padding, dilation, groups, size, mode, transposed, seed
):
    reach = dilation * (kernel - 1)
    assume(size + 2 * padding > reach)
    assume(mode == "zeros" or padding < size)
    torch.manual_seed(seed)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if transposed:
        assume((size - 1) * stride + reach + 1 > 2 * padding)
        layer = (nn.ConvTranspose1d, nn.ConvTranspose2d)[num_dims - 1](2, 4, kernel, **options)
    else:
        layer = (nn.Conv1d, nn.Conv2d)[num_dims - 1](2, 4, kernel, padding_mode=mode, **options)
    value, exact, expected = norms(layer.double(), (2, *[size] * num_dims))
    assert value >= expected * (1 - 1e-10)
    if exact:
        assert value == pytest.approx(expected, rel=1e-10)


def test_zero_padding_is_close_to_the_dense_matrix():
    value, exact, expected = norms(nn.Conv2d(3, 4, 3, padding=1).double(), (3, 10, 10))
    assert not exact
    assert expected < value < 1.1 * expected


def test_stride_is_not_ignored():
    layer = nn.Conv1d(1, 1, 2, stride=2, bias=False).double()
    layer.weight.data.fill_(1.0)
    # Windows that do not overlap: sqrt(2), where a stride of 1 would have 2
    assert norms(layer, (1, 6))[0] == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize(
    ("mode", "pads", "expected"), [("replicate", (2, 1), 3), ("reflect", (2, 2), 3), ("circular", (2, 1), 2)]
)
def test_padding_by_copies(mode, pads, expected):
    # 3 positions; reflected they are 2 1 0 1 2 1 0, and 1 comes three times
    assert padding_norm(3, pads, mode) == pytest.approx(math.sqrt(expected))


def test_chunks_of_frequencies_give_the_same(monkeypatch):
    layer = nn.Conv2d(3, 4, 3, padding=1).double()
    whole = norms(layer, (3, 6, 6))[0]
    monkeypatch.setattr("lightning_robustness.functional._spectral_norms._CHUNK", 40)
    assert norms(layer, (3, 6, 6))[0] == whole
