import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_robustness.functional._spectral_norms import (
    layer_spectral_norm,
    padding_norm,
)
from lightning_robustness.functional._spectral_propagation import module_kind
from tests.functional import dense


def spectral_norm(layer, shape):
    layer = layer.double().eval()
    x = torch.zeros(1, *shape, dtype=torch.double)
    return layer_spectral_norm(module_kind(layer)[0], layer, x, layer(x))


def batch_norm(layer):
    layer.running_var.uniform_(0.1, 2.0)
    if layer.affine:
        layer.weight.data.uniform_(-2, 2)
    return layer


LINEAR = [
    (nn.Linear(5, 3), (5,)),
    (nn.Linear(3, 5), (2, 3)),
    (batch_norm(nn.BatchNorm1d(4)), (4,)),
    (batch_norm(nn.BatchNorm2d(4)), (4, 2, 2)),
    (batch_norm(nn.BatchNorm2d(4, affine=False)), (4, 2, 2)),
    (batch_norm(nn.InstanceNorm2d(4, track_running_stats=True, affine=True)), (4, 2, 2)),
    (nn.AvgPool1d(3, stride=2, padding=1), (2, 7)),
    (nn.AvgPool2d(2), (2, 6, 6)),
    (nn.AvgPool2d(3, stride=1, padding=1), (1, 5, 6)),
    (nn.AvgPool2d((3, 2), stride=2, padding=1, count_include_pad=False, ceil_mode=True), (1, 6, 5)),
    (nn.AvgPool2d(2, ceil_mode=True), (1, 5, 5)),
    (nn.AvgPool3d(2, stride=1), (1, 3, 4, 3)),
    (nn.AdaptiveAvgPool2d(1), (2, 4, 5)),
    (nn.AdaptiveAvgPool2d((2, 3)), (1, 5, 7)),
    (nn.ZeroPad2d((1, 2, 0, 1)), (1, 3, 4)),
    (nn.ConstantPad1d(2, 1.5), (1, 4)),
    (nn.ReflectionPad2d((1, 2, 2, 0)), (1, 4, 4)),
    (nn.ReplicationPad1d(2), (1, 4)),
    (nn.ReplicationPad3d((1, 0, 0, 2, 1, 1)), (1, 2, 3, 2)),
    (nn.CircularPad2d((1, 2, 0, 3)), (1, 4, 3)),
    (nn.Flatten(), (2, 3)),
    (nn.Identity(), (2, 3)),
    (nn.Dropout(0.4), (3,)),
    (nn.Dropout2d(0.4), (2, 3, 3)),
    (nn.PixelShuffle(2), (4, 2, 2)),
]


@pytest.mark.parametrize(("layer", "shape"), LINEAR, ids=lambda value: type(value).__name__)
def test_linear_layers_equal_their_dense_matrix(layer, shape):
    norm = spectral_norm(layer, shape)
    assert norm.exact
    assert norm.value == pytest.approx(dense.layer_norm(layer, shape), rel=1e-10)


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        *((a, None) for a in (nn.ReLU(), nn.ReLU6(), nn.Hardtanh(), nn.CELU(2.0), nn.Tanh(), nn.Softsign())),
        *((a, None) for a in (nn.Softplus(), nn.LogSigmoid(), nn.Tanhshrink(), nn.Softshrink(), nn.RReLU())),
        *((a, None) for a in (nn.Sigmoid(), nn.Hardsigmoid(), nn.Hardswish(), nn.SELU(), nn.SiLU(), nn.Mish())),
        *((a, None) for a in (nn.GELU(), nn.GELU(approximate="tanh"), nn.ELU(), nn.ELU(2.5), nn.LeakyReLU(0.2))),
        (nn.LeakyReLU(-3.0), 3.0),
        (nn.PReLU(2, init=-1.5), 1.5),
    ],
    ids=repr,
)
def test_activations_have_their_largest_derivative(activation, expected):
    norm = spectral_norm(activation, (2, 4))
    x = torch.linspace(-25, 25, 200_001, dtype=torch.double).repeat(1, 2, 1).requires_grad_()
    (derivative,) = torch.autograd.grad(activation(x).sum(), x)
    assert derivative.abs().max().item() <= norm.value + 1e-8
    assert derivative.abs().max().item() == pytest.approx(norm.value, rel=1e-4)
    if expected is not None:
        assert norm.value == pytest.approx(expected)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda affine: nn.LayerNorm((3, 4), eps=1e-3, elementwise_affine=affine),
        lambda affine: nn.GroupNorm(1, 3, eps=1e-3, affine=affine),
        lambda affine: nn.GroupNorm(3, 3, eps=1e-3, affine=affine),
        lambda affine: nn.InstanceNorm1d(3, eps=1e-3, affine=affine),
        lambda affine: nn.RMSNorm((3, 4), eps=1e-3, elementwise_affine=affine),
    ],
)
def test_normalization_by_the_input_is_bounded_and_nearly_attained_near_zero(make, affine):
    layer = make(affine).double()
    if affine:
        layer.weight.data.fill_(-2.0)
    norm = spectral_norm(layer, (3, 4))
    assert not norm.exact
    assert norm.value == pytest.approx((2 if affine else 1) / math.sqrt(1e-3))
    for scale in (1e-6, 1e-2, 1.0):
        value = dense.jacobian_norm(layer, scale * torch.randn(1, 3, 4, dtype=torch.double))
        assert value <= norm.value * (1 + 1e-9)
        assert scale > 1e-6 or value > 0.99 * norm.value


def test_normalization_without_eps():
    assert spectral_norm(nn.LayerNorm(4, eps=0.0), (4,)).value == math.inf
    expected = 1 / math.sqrt(torch.finfo(torch.double).eps)
    assert spectral_norm(nn.RMSNorm(4), (4,)).value == pytest.approx(expected)


@pytest.mark.parametrize(
    ("layer", "windows"),
    [
        (nn.MaxPool1d(2), 1),
        (nn.MaxPool1d(3, stride=2, padding=1), 2),
        (nn.MaxPool1d(3, stride=1), 3),
        (nn.MaxPool1d(3, stride=2, dilation=2), 3),
        (nn.MaxPool1d(2, stride=3, dilation=3), 2),
        (nn.AdaptiveMaxPool1d(4), 2),
        (nn.AdaptiveMaxPool1d(3), 1),
    ],
)
def test_max_pooling_counts_overlapping_windows(layer, windows):
    norm = spectral_norm(layer, (1, 9))
    assert norm == (math.sqrt(windows), windows == 1)
    # A spike moves the maximum of every window that it lies in
    largest = max(torch.linalg.vector_norm(layer(unit) - layer(torch.zeros(1, 1, 9))) for unit in torch.eye(9)[:, None])
    assert largest.item() == pytest.approx(math.sqrt(windows))


def test_max_pooling_in_two_dimensions():
    assert spectral_norm(nn.MaxPool2d(3, stride=2, padding=1), (1, 8, 8)).value == 2
    assert spectral_norm(nn.MaxPool2d((3, 2), stride=(1, 2)), (1, 8, 8)).value == pytest.approx(math.sqrt(3))
    assert spectral_norm(nn.MaxPool2d(8, stride=1), (1, 8, 8)).value == 1  # there is only one window


@pytest.mark.parametrize("layer", [nn.Softmax(dim=1), nn.Softmin(dim=1), nn.LogSoftmax(dim=1)])
def test_softmax_is_bounded_and_the_bound_attained(layer):
    norm = spectral_norm(layer, (6,))
    values = [dense.jacobian_norm(layer, scale * torch.randn(1, 6, dtype=torch.double)) for scale in (0.1, 1, 10, 100)]
    even = torch.tensor([[0.0, 0.0, 90.0, 90.0, 90.0, 90.0]], dtype=torch.double)
    pair = even if isinstance(layer, nn.Softmin) else -even  # two classes of probability 1/2
    assert max(values) <= norm.value * (1 + 1e-9)
    if isinstance(layer, nn.LogSoftmax):
        certain = torch.tensor([[90.0, 0, 0, 0, 0, 0]], dtype=torch.double)
        assert dense.jacobian_norm(layer, certain) == pytest.approx(norm.value)
    else:
        assert dense.jacobian_norm(layer, pair) == pytest.approx(norm.value)


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(3, track_running_stats=False),
        nn.AvgPool2d(2, divisor_override=3),
        nn.Hardshrink(),
        nn.Threshold(0.1, 20.0),
        nn.GLU(),
        nn.LPPool2d(2, 2),
        nn.LocalResponseNorm(2),
    ],
)
def test_there_is_no_rule(layer):
    assert layer_spectral_norm(module_kind(layer)[0], layer.eval(), torch.ones(2, 3, 4, 4), torch.ones(1)) is None


def test_dropout_and_batch_norm_in_train_mode_have_no_rule():
    for layer in (nn.Dropout(), nn.BatchNorm1d(3)):
        assert layer_spectral_norm(module_kind(layer)[0], layer, torch.ones(2, 3), torch.ones(2, 3)) is None


def norms(layer, shape):
    return *spectral_norm(layer, shape), dense.layer_norm(layer, shape)


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


def test_a_transposed_convolution_has_the_norm_of_its_adjoint():
    layer = nn.Conv1d(2, 4, 3, stride=2, padding=1).double()
    adjoint = nn.ConvTranspose1d(4, 2, 3, stride=2, padding=1).double()
    adjoint.weight = layer.weight
    assert norms(adjoint, (4, 3))[0] == pytest.approx(norms(layer, (2, 5))[0], rel=1e-12)


def test_zero_padding_is_close_to_the_dense_matrix():
    value, exact, expected = norms(nn.Conv2d(3, 4, 3, padding=1).double(), (3, 10, 10))
    assert not exact
    assert expected < value < 1.1 * expected


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
