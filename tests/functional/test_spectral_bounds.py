import dataclasses

import lightning as L
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from lightning_robustness import InputSpace
from lightning_robustness.functional import lipschitz_constant, spectral_bounds
from tests.functional import dense
from tests.functional.models import UNBOUNDED, Function, dense_block

# The bound holds


def convolutional_network(generator_seed, width, mode):
    torch.manual_seed(generator_seed)
    network = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, padding_mode=mode),
        nn.BatchNorm2d(width),
        nn.SiLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
        Function(lambda layers, x: functional.relu(layers[0](x) + x), nn.Conv2d(width, width, 3, padding=1)),
        Function(dense_block, nn.Conv2d(width, 2, 3, padding=1)),
        nn.Conv2d(width + 2, 3, 3, stride=2, padding=1),
        nn.GroupNorm(1, 3, eps=0.5),
        nn.AvgPool2d(2, ceil_mode=True),
        nn.Flatten(),
        nn.Linear(3, 4),
    )
    network[1].running_var.uniform_(0.5, 2)
    return network.double().eval()


@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 1000),
    width=st.integers(1, 4),
    mode=st.sampled_from(["zeros", "circular", "reflect"]),
    scale=st.floats(0.01, 10),
)
def test_is_never_below_a_jacobian(seed, width, mode, scale):
    network = convolutional_network(seed, width, mode)
    x = scale * torch.randn(2, 1, 6, 6, dtype=torch.double)
    bound = spectral_bounds(network, x).bound
    assert bound >= dense.jacobian_norm(network, x[:1])
    assert bound / 2 >= lipschitz_constant(network, x, input_space=UNBOUNDED).max()  # softmax halves it


def test_units_are_those_of_the_input_space():
    network, x = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), torch.rand(1, 3, 2, 2)
    plain = spectral_bounds(network, x)
    space = InputSpace(std=(0.5, 0.25, 1.0))
    assert spectral_bounds(network, x, input_space=space).bound == pytest.approx(4 * plain.bound)
    assert spectral_bounds(network, 100 * x, input_space=InputSpace()).rows == plain.rows  # values don't matter


# Without a rule


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        embedded = self.embed(x)
        return self.head(self.attention(embedded, embedded, embedded)[0])


def test_a_layer_without_a_rule_is_named_and_the_bound_unknown():
    network = Attention()
    table = spectral_bounds(network, torch.randn(1, 4))
    assert table.bound is None
    assert table.missing == ("attention (MultiheadAttention)",)
    assert [row.rule for row in table.rows] == ["exact", "no rule", "exact"]
    assert table.rows[0].bound == pytest.approx(dense.matrix_norm(network.embed.weight))
    assert table.rows[2].norm == pytest.approx(dense.matrix_norm(network.head.weight))
    assert table.rows[2].bound is None
    assert str(table).endswith("Bound of the network: unknown: no rule for attention (MultiheadAttention)")


@dataclasses.dataclass
class Output:
    logits: torch.Tensor


def test_logits_are_found_in_the_output():
    for make in (lambda z: (z.sum(), z), lambda z: {"logits": z}, lambda z: Output(logits=z)):
        assert spectral_bounds(Function(lambda _, x, make=make: make(3 * x)), torch.ones(1, 2)).bound == 3


def test_a_single_layer_and_a_module_of_lightning():
    layer = nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular")
    table = spectral_bounds(layer, torch.randn(1, 1, 5, 5))
    assert [(row.kind, row.rule) for row in table.rows] == [("Conv2d", "exact")]

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, x):
            return self.head(x.flatten(1))

    module = Module()
    assert spectral_bounds(module, torch.randn(1, 3)).bound == pytest.approx(dense.matrix_norm(module.head.weight))


def flows(layers, x):
    return layers[0](x) if x.sum() > 0 else layers[1](x)


def test_a_network_that_cannot_be_traced_has_the_norms_of_its_layers():
    network = Function(flows, nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.GLU()))
    table = spectral_bounds(network, -torch.ones(1, 2))
    assert table.bound is None
    assert [(row.name, row.rule) for row in table.rows] == [("layers.1.0", "exact"), ("layers.1.1", "no rule")]
    assert table.rows[0].norm == pytest.approx(dense.matrix_norm(network.layers[1][0].weight))
    assert "a network that torch.fx cannot trace (symbolically traced variables" in str(table)
    assert table.missing[1] == "layers.1.1 (GLU)"
    assert not network.layers[1][0]._forward_hooks


class Caching(nn.Module):
    """Does something else on its second call: what a trace sees is not what a user gets."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


def test_a_trace_that_gives_another_output_is_not_believed():
    table = spectral_bounds(Caching(), torch.ones(1, 2))
    assert table.bound is None
    assert table.missing == ("a network whose trace by torch.fx gives another output",)


# Text, state, arguments


def test_text_is_a_table():
    network = nn.Sequential(nn.Linear(2, 2, bias=False), Function(lambda layers, x: layers[0](x) + x, nn.ReLU()))
    network[0].weight.data = torch.diag(torch.tensor([3.0, 0.5]))
    assert str(spectral_bounds(network, torch.ones(1, 2))).splitlines() == [
        "layer       type    norm  rule             bound up to here",
        "0           Linear  3     exact            3",
        "1.layers.0  ReLU    1     exact            3",
        "add         add     -     sum of branches  6",
        "Bound of the network: 6",
        "Fisher information: at most 18, measured 0.245978",
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.double])
def test_precision(dtype):
    network = nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(10, 2)).to(dtype)
    bound = spectral_bounds(network, torch.randn(1, 1, 5, dtype=dtype)).bound
    assert bound == pytest.approx(spectral_bounds(network.double(), torch.randn(1, 1, 5).double()).bound)


class NormedAttention(nn.Module):
    def __init__(self, heads=2, bias=True):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, heads, bias=bias, batch_first=True)
        self.head = nn.Linear(24, 3)

    def forward(self, x):
        normed = self.norm(x)
        attended, _ = self.attention(normed, normed, normed, need_weights=False)
        return self.head((x + attended).flatten(1))


def attention_reference(module, radius, tokens):
    """The bound in numpy, with A of each head made explicit."""
    weight, bias = module.in_proj_weight.detach().numpy(), module.in_proj_bias.detach().numpy()
    query, key, value = np.split(weight, 3)
    total, size = 0.0, module.head_dim
    for h in range(module.num_heads):
        rows = slice(h * size, (h + 1) * size)
        a = np.linalg.norm(query[rows].T @ key[rows], 2) / size**0.5
        shift = np.linalg.norm(key[rows].T @ bias[:6][rows]) / size**0.5
        scale = tokens**0.5 + radius**2 * a + tokens**0.5 * radius * (radius * a + shift)
        total += (np.linalg.norm(value[rows], 2) * scale) ** 2
    return total**0.5 * np.linalg.norm(module.out_proj.weight.detach().numpy(), 2)


def test_attention_after_a_layer_norm_is_bounded():
    torch.manual_seed(0)
    model = NormedAttention().double().eval()
    nn.init.normal_(model.attention.in_proj_bias)
    nn.init.normal_(model.norm.bias)
    x = 3 * torch.randn(20, 4, 6, dtype=torch.double)
    bounds = spectral_bounds(model, x[:1])
    row = next(row for row in bounds.rows if row.name == "attention")
    radius = 6**0.5 * model.norm.weight.abs().max().item() + model.norm.bias.norm().item()
    assert row.norm == pytest.approx(attention_reference(model.attention, radius, 4))
    assert bounds.bound is not None
    tokens = model.norm(x).detach()
    attend = lambda t: model.attention(t, t, t, need_weights=False)[0].flatten(1)  # noqa: E731
    assert max(np.linalg.norm(matrix, 2) for matrix in dense.jacobian(attend, tokens).detach().numpy()) <= row.norm


def test_attention_of_unbounded_inputs_has_no_rule():
    model = NormedAttention()
    model.norm = nn.Identity()
    assert "attention (MultiheadAttention)" in spectral_bounds(model, torch.rand(1, 4, 6)).missing


def test_fisher_information_is_below_its_bound():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    x = torch.randn(6, 5, dtype=torch.double)
    bounds = spectral_bounds(model, x)
    expected = dense.largest_eigenvalue(model, x).max().item()
    assert bounds.fisher_norm == pytest.approx(expected)
    norms = [np.linalg.norm(model[i].weight.detach().numpy(), 2) for i in (0, 2)]
    assert bounds.fisher_bound == pytest.approx((norms[0] * norms[1]) ** 2 / 2)
    assert bounds.fisher_norm <= bounds.fisher_bound


class EncoderLayer(nn.Module):
    """An encoder layer that normalises first, written out: the rules of its parts are tested above."""

    def __init__(self, layer):
        super().__init__()
        self.norm1, self.norm2, self.attention = layer.norm1, layer.norm2, layer.self_attn
        activation = nn.ReLU() if layer.activation_relu_or_gelu == 1 else nn.GELU()
        self.dense = nn.Sequential(layer.norm2, layer.linear1, activation, layer.linear2)

    def forward(self, x):
        normed = self.norm1(x)
        attended, _ = self.attention(normed, normed, normed, need_weights=False)
        x = x + attended
        return x + self.dense(x)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_transformer_layer_that_normalises_first_has_the_bound_of_its_parts(activation):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 8, activation=activation, norm_first=True, batch_first=True).eval()
    x, head = torch.randn(3, 4, 6), nn.Sequential(nn.Flatten(), nn.Linear(24, 3))
    whole, parts = nn.Sequential(layer, head), nn.Sequential(EncoderLayer(layer), head)
    torch.testing.assert_close(whole(x), parts(x))
    found, expected = spectral_bounds(whole, x), spectral_bounds(parts, x)
    assert found.missing == ()
    assert found.bound == pytest.approx(expected.bound, rel=1e-6)
    assert found.rows[0].rule == "upper bound"


@pytest.mark.parametrize("options", [{"norm_first": False}, {"norm_first": True, "activation": nn.SiLU()}])
def test_other_transformer_layers_have_no_rule(options):
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, **options)
    table = spectral_bounds(nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 3)), torch.randn(1, 4, 6))
    assert (table.bound, table.missing) == (None, ("0 (TransformerEncoderLayer)",))
