import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from lightning_robustness.functional._spectral_propagation import propagate
from tests.functional import dense
from tests.functional.models import Function, dense_block


def follow(network, x, scale=1.0):
    with torch.no_grad():
        return propagate(network.eval(), x[:1], scale)


def residual_block(layers, x):
    return functional.gelu(layers[0](x)) + x


def test_feed_forward_is_a_product():
    network = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Dropout(), nn.Linear(5, 3), nn.Sigmoid())
    result = follow(network, torch.randn(7, 4))
    first, second = dense.matrix_norm(network[0].weight), dense.matrix_norm(network[3].weight)
    assert result.bound == pytest.approx(first * second / 4)
    assert [row.name for row in result.rows] == ["0", "1", "2", "3", "4"]
    assert [row.kind for row in result.rows] == ["Linear", "ReLU", "Dropout", "Linear", "Sigmoid"]
    assert [row.norm for row in result.rows] == pytest.approx([first, 1, 1, second, 0.25])
    assert [row.bound for row in result.rows] == pytest.approx([first, first, first, first * second, result.bound])
    assert {row.rule for row in result.rows} == {"exact"}
    assert result.missing == []


def test_residual_block_adds_the_branches():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    network = nn.Sequential(first, Function(residual_block, second))
    expected = dense.matrix_norm(first.weight) * (1 + dense.matrix_norm(second.weight) * 1.1289041452)
    result = follow(network, torch.randn(1, 4))
    assert result.bound == pytest.approx(expected, rel=1e-6)
    assert result.rows[-1].rule == "sum of branches"
    assert result.rows[-1].norm is None


def test_dense_block_takes_the_root_of_the_sum_of_squares():
    network = Function(dense_block, nn.Linear(3, 2), nn.Linear(5, 4))
    first, second = (dense.matrix_norm(layer.weight) for layer in network.layers)
    one = math.sqrt(1 + first**2)
    assert follow(network, torch.randn(1, 3)).bound == pytest.approx(one * math.sqrt(1 + second**2))


CONSTANT = torch.tensor([[1.0, -3.0], [0.5, 2.0]])


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda _, x: x + x, 2),
        (lambda _, x: 1 - x, 1),
        (lambda _, x: x + CONSTANT[0], 1),
        (lambda _, x: x.sub(x.abs()), 2),
        (lambda _, x: x[:, :1] + torch.zeros(6), math.sqrt(6)),  # one number, six times
        (lambda _, x: x * CONSTANT[0], 3),
        (lambda _, x: 4 * x, 4),
        (lambda _, x: x / CONSTANT[1], 2),
        (lambda _, x: x.div(4), 0.25),
        (lambda _, x: x @ CONSTANT, dense.matrix_norm(CONSTANT)),
        (lambda _, x: functional.linear(x, CONSTANT), dense.matrix_norm(CONSTANT)),
        (lambda _, x: (CONSTANT @ x.unsqueeze(2)).squeeze(2), dense.matrix_norm(CONSTANT)),
        (lambda _, x: -x, 1),
        (lambda _, x: x * torch.tensor([True, False]), 1),
        (lambda _, x: torch.cat([x, torch.zeros_like(x)], dim=1), 1),
        (lambda _, x: torch.stack([x, 2 * x], dim=1).flatten(1), math.sqrt(5)),
        (lambda _, x: torch.maximum(x, 2 * x), math.sqrt(5)),
        (lambda _, x: x.mean(dim=1, keepdim=True), 1 / math.sqrt(2)),
        (lambda _, x: x.sum(dim=1, keepdim=True), math.sqrt(2)),
        (lambda _, x: x.amax(dim=1, keepdim=True), 1),
        (lambda _, x: x.unsqueeze(2).expand(-1, -1, 3).flatten(1), math.sqrt(3)),
        (lambda _, x: x.repeat(1, 3), math.sqrt(3)),
        (lambda _, x: [halves := x.chunk(2, dim=1), torch.cat([halves[0], halves[1]])][1], math.sqrt(2)),
        (lambda _, x: x.chunk(2, dim=1)[0], 1),
        (lambda _, x: x.view(x.shape[0], -1).t().T.reshape(x.size(0), 2)[..., :1], 1),
        (lambda _, x: functional.leaky_relu(x.double().float(), -2.0), 2),
        (lambda _, x: x.softmax(dim=1), 0.5),
        (lambda _, x: torch.log_softmax(x, dim=1), math.sqrt(2)),
        (lambda _, x: functional.pad(x, (1, 1), mode="circular"), math.sqrt(2)),
        (lambda _, x: functional.dropout(x, training=False), 1),
        (lambda _, x: functional.layer_norm(x, (2,), eps=0.25), 2),
        (lambda _, x: functional.batch_norm(x, torch.zeros(2), torch.tensor([3.0, 0.25]), eps=0.0), 2),
        (lambda _, x: functional.max_pool1d(x.unsqueeze(1), 2).squeeze(1), 1),
        (lambda _, x: functional.avg_pool1d(x.unsqueeze(1), 2).squeeze(1), 1 / math.sqrt(2)),
        (lambda _, x: functional.adaptive_avg_pool1d(x.unsqueeze(1), 1).squeeze(1), 1 / math.sqrt(2)),
        (lambda _, x: functional.conv1d(x.unsqueeze(1), torch.tensor([[[2.0]]]), padding="same").squeeze(1), 2),
        (lambda _, x: functional.conv1d(x.unsqueeze(1), torch.tensor([[[3.0]]]), None, 1, 0).squeeze(1), 3),
    ],
)
def test_functions(function, expected):
    result = follow(Function(function), torch.randn(3, 2))
    assert result.bound == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda _, x: functional.relu(3 * x, inplace=True), 3),
        (lambda _, x: (3 * x).add_(x), 4),
        (lambda layers, x: [y := 2 * x, layers[0](y), y + y][-1], 4),  # after an in-place ReLU
    ],
)
def test_in_place_operations(function, expected):
    assert follow(Function(function, nn.ReLU(inplace=True)), torch.randn(1, 2)).bound == expected


def overwritten(layers, x):
    y = x + 0
    y.mul_(5)
    return y


def overwritten_through_a_view(layers, x):
    y = x + 0
    y.view(-1).mul_(5)
    return y


def overwritten_in_part(layers, x):
    y = x + 0
    y[:, :1].mul_(5)
    return y


def test_what_an_in_place_operation_overwrites_has_its_bound():
    assert follow(Function(overwritten), torch.randn(1, 2)).bound == 5
    assert follow(Function(overwritten_through_a_view), torch.randn(1, 2)).bound == 5
    assert follow(Function(overwritten_in_part), torch.randn(1, 2)).bound is None


class ScaledLinear(nn.Linear):
    def forward(self, x):
        return functional.linear(x, 3 * self.weight)


def test_a_subclass_is_followed_and_a_parametrization_counts():
    layer = ScaledLinear(3, 3)
    assert follow(layer, torch.randn(1, 3)).bound == pytest.approx(3 * dense.matrix_norm(layer.weight))
    normalized = parametrizations.spectral_norm(nn.Linear(3, 3), n_power_iterations=50)
    result = follow(nn.Sequential(normalized), torch.randn(1, 3))
    assert result.rows[0].kind == "Linear"
    assert result.bound == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    ("function", "missing"),
    [
        (lambda _, x: x * x, "mul (mul)"),
        (lambda _, x: 1 / x, "truediv (truediv)"),
        (lambda _, x: torch.div(x, 2, rounding_mode="floor"), "div (div)"),
        (lambda _, x: torch.add(x, x, alpha=3), "add (add)"),
        (lambda _, x: x @ x.t(), "matmul (matmul)"),
        (lambda _, x: functional.linear(CONSTANT, x), "linear (linear)"),
        (lambda _, x: x.exp(), "exp (exp)"),
        (lambda _, x: functional.dropout(x, training=True) * 0, "dropout (dropout)"),
        (lambda _, x: x[:, torch.tensor([0, 0])], "getitem (getitem)"),
        (lambda _, x: functional.normalize(x), "normalize (normalize)"),
        (lambda _, x: x.long().float(), "long (long)"),
    ],
)
def test_a_function_without_a_rule_is_named(function, missing):
    result = follow(Function(function), torch.rand(1, 2))
    assert result.bound is None
    assert result.missing == [missing]


def test_a_layer_without_a_rule_that_the_output_does_not_need_does_no_harm():
    network = Function(lambda _, x: {"auxiliary": x.exp(), "logits": 2 * x})
    result = follow(network, torch.randn(1, 2))
    assert result.bound == 2
    assert result.missing == ["exp (exp)"]


def test_starts_from_the_scale_of_the_input():
    assert follow(Function(lambda _, x: 3 * x), torch.ones(1, 2), scale=2.0).bound == 6
