import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from lightning_robustness._model.access import pick_entry
from lightning_robustness._model.head import HeadTap
from lightning_robustness._model.route import find_route
from tests import zoo
from tests._model.heads import assert_call, count_hooks, expected_call, find_head, inputs, inputs_of, tap_of
from tests.test_any_classifier import KINDS

UNTRACED = "no layer returns the logits themselves, and no graph of autograd leads back to one"


class AuxiliaryAtZero(zoo.Auxiliary):
    """At first, the outputs of both heads are equal."""

    def build(self):
        super().build()
        for p in (*self.head.parameters(), *self.auxiliary.parameters()):
            nn.init.zeros_(p)


class SharedBody(zoo.Zoo):
    """A layer that is used twice is as wide as the head."""

    def build(self):
        self.input, self.body, self.head = nn.Linear(8, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def embed(self, x):
        return self.body(self.body(self.input(x)).relu()).relu()


class PooledMap(zoo.PooledTokens):
    """Channels behind the positions, as in networks of windows."""

    def embed(self, x):
        return super().embed(x).reshape(len(x), 2, 2, 6)

    def forward(self, x):
        return self.head(self.embed(x)).flatten(1, 2).mean(dim=1)


class SoftmaxLayer(zoo.SoftmaxEnd):
    def build(self):
        super().build()
        self.softmax = nn.Softmax(dim=1)

    def forward(self, x):
        return self.softmax(zoo.Zoo.forward(self, x))


class LinearFeatures(zoo.FeaturesAndLogits):
    """Features are the output of a layer, too."""

    def embed(self, x):
        return self.body(x)


class CutGraph(zoo.Zoo):
    def forward(self, x):
        return super().forward(x).detach()


class NormalizedFeatures(zoo.FeaturesAndLogits):
    def forward(self, x):
        e, logits = super().forward(x)
        return F.normalize(e), logits


OTHERS = [
    *(zoo.NestedHead, zoo.HeadCalledTwice, zoo.Distillation),
    *(AuxiliaryAtZero, SharedBody, PooledMap, SoftmaxLayer, LinearFeatures, CutGraph, NormalizedFeatures),
]


@pytest.mark.parametrize("number", [1, 5])
@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_the_head_is_found_and_what_passes_through_it(kind, number):
    network = kind()
    x, hooks = inputs_of(network, number), count_hooks(network)
    expected = expected_call(network, x)
    assert find_head(network, x) == (network.head_name if network.has_embedding else None)
    for head in (network.head_name, network.get_submodule(network.head_name)) if network.has_embedding else ():
        assert find_head(network, x, head=head) == network.head_name
    with tap_of(network, x) as tap, torch.no_grad():
        tap.listen(x)
        network(x)
        assert_call(tap.take(), expected)
        assert_call(tap.run(pick_entry(network, tap.entry), x), expected)
    assert count_hooks(network) == hooks


# Pooling and softmax round differently from the network
@pytest.mark.parametrize(
    "kind", [zoo.Zoo, zoo.PooledTokens, zoo.PointwiseConvolution, zoo.LogSoftmaxEnd, zoo.SoftmaxEnd]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_head_is_found_in_half_precision(kind, dtype):
    network = kind().to(dtype)
    assert find_head(network, inputs_of(network)) == "head"


@pytest.mark.parametrize("kind", [zoo.Zoo, zoo.PooledTokens, zoo.LogSoftmaxEnd, zoo.SoftmaxEnd, zoo.Auxiliary])
def test_the_head_is_found_where_logits_are_tiny(kind):
    """Networks whose outputs are nearly zero, or nearly uniform, at first."""
    network = kind()
    with torch.no_grad():
        for name, p in network.named_parameters():
            p.mul_(1e-4 if name.startswith(("head", "auxiliary")) else 1)
    assert find_head(network, inputs_of(network)) == "head"


@pytest.mark.parametrize(
    ("kind", "transform"), [(zoo.LogSoftmaxEnd, "log_softmax"), (zoo.SoftmaxEnd, "softmax"), (zoo.Zoo, "identity")]
)
def test_the_layer_before_a_softmax_gives_the_logits_too(kind, transform):
    assert find_route(kind(), inputs()).sources == {"": "identity", "head": transform}


def test_a_network_that_is_its_own_head():
    network, x = nn.Linear(8, 3), inputs().flatten(1)
    assert find_head(network, x) == ""
    call = HeadTap(network, "").run(network, x)
    assert torch.equal(call.embedding, x)
    with HeadTap(network, "") as tap:
        tap.listen(x)
        network(1 - x)
        logits = network(x)
        assert_call(tap.take(), (x, logits), rtol=0, atol=0)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    *(st.integers(low, 5) for low in (1, 1, 2)),
    st.booleans(),
)
def test_logits_are_those_of_the_pooled_embedding(positions, number, width, num_classes, channels_first):
    """A linear map of the mean is the mean of the linear map, whatever the shape."""
    generator = torch.Generator().manual_seed(0)
    if channels_first:
        head = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(positions) - 1](width, num_classes, 1).double()
        x = torch.randn(number, width, *positions, generator=generator, dtype=torch.double)
        network = nn.Sequential(nn.Identity(), head, nn.Flatten(2), _Mean(2))
        mean = x.flatten(2).mean(dim=2)
    else:
        head = nn.Linear(width, num_classes).double()
        x = torch.randn(number, *positions, width, generator=generator, dtype=torch.double)
        network = nn.Sequential(nn.Identity(), head, nn.Flatten(1, -2), _Mean(1))
        mean = x.flatten(1, -2).mean(dim=1)
    assert find_head(network, x) == "1"
    call = HeadTap(network, "1").run(network, x)
    torch.testing.assert_close(call.embedding, mean)
    torch.testing.assert_close(call.logits, F.linear(mean, head.weight.flatten(1), head.bias).detach())


class _Mean(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        return x.mean(dim=self.dim)


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_networks(in_place):
    network, x = zoo.Zoo().eval(), inputs()
    expected, hooks = expected_call(network, x), count_hooks(network)
    compiled = network if in_place else torch.compile(network, backend="aot_eager")
    if in_place:
        network.compile(backend="aot_eager")
    compiled(x)
    name = find_head(compiled, x)
    assert name == ("head" if in_place else "_orig_mod.head")
    assert_call(HeadTap(compiled, name).run(compiled, x), expected)
    assert count_hooks(network) == hooks


def test_a_head_with_pooling_is_given():
    """As in ConvNeXt: pooled features with positions of size 1 enter the head."""
    head = nn.Sequential(nn.LayerNorm((8, 1, 1)), nn.Flatten(), nn.Linear(8, 4))
    network = nn.Sequential(nn.Conv2d(1, 8, 1), nn.AdaptiveAvgPool2d(1), head)
    x = inputs()
    assert find_head(network, x, head="2") == "2"
    expected = network[:2](x).flatten(1).detach(), network(x).detach()
    assert_call(HeadTap(network, "2").run(network, x), expected)


def test_a_module_with_two_names_is_found_by_both():
    network = zoo.Zoo()
    network.alias = network.head
    for head in ("alias", "head", network.alias, None):
        assert find_head(network, inputs(), head=head) == "head"
    assert_call(HeadTap(network, "alias").run(network, inputs()), expected_call(network, inputs()))


def test_forward_chooses_among_networks():
    network, x = zoo.Distillation(), inputs()
    assert find_head(network, x, forward=lambda x: network.teacher(x)) == "teacher.head"
    assert find_head(network, x, forward=network.student) == "student.head"


def test_a_functional_head_is_not_found():
    network = nn.ModuleDict({"network": zoo.FunctionalHead()})
    network.forward = lambda x: network["network"](x)
    route = find_route(network, inputs())
    assert (route.head, route.num_features, route.num_classes) == (None, 0, 3)
    assert route.reason == "a matrix of weights is applied outside of any module"
    assert find_route(nn.Identity(), inputs().flatten(1)).reason == UNTRACED


def test_a_head_whose_last_call_is_not_the_logits_is_not_found():
    """Since a tap would return what the last call computed."""
    route = find_route(zoo.LastCallIsAnother(), inputs())
    assert (route.head, route.reason) == (None, "'head' runs again after it")


def test_logits_that_are_not_finite():
    network = zoo.Zoo()
    nn.init.constant_(network.head.bias, torch.nan)
    with pytest.raises(ValueError, match="Expected finite logits but 5 of 5 samples"):
        find_head(network, inputs())


def test_a_head_that_does_not_run_has_no_embedding():
    network = zoo.NestedHead()
    with pytest.raises(ValueError, match=r"the head 'parts.unused'"):
        HeadTap(network, "parts.unused").run(network, inputs())
    assert count_hooks(network) == 0


class TupleHead(zoo.Zoo):
    """Its head returns the logits among other things."""

    def build(self):
        super().build()
        self.pair = zoo.LogitsAndFeatures()

    def forward(self, x):
        return self.pair(x)[0]


def test_heads_that_do_not_return_a_tensor():
    assert find_head(TupleHead(), inputs()) == "pair.head"
    assert find_head(TupleHead(), inputs(), head="pair") == "pair"


def test_an_ensemble_has_no_head():
    route = find_route(zoo.Ensemble(), inputs().flatten(1))
    assert (route.head, dict(route.sources)) == (None, {"": "identity"})
    assert route.reason == "the logits come from 2 layers: 'members.0.2', 'members.1.2'"


REFUSED = [
    (zoo.NestedHead(), "fc", r"`head`.* NestedHead .*'fc'.* convolutions: body, parts\.unused, parts\.out\.1\.0\."),
    (zoo.NestedHead(), nn.Linear(8, 4), r"NestedHead .* Linear"),
    (nn.Identity(), "fc", "Linear layers and convolutions: none"),
    (zoo.NestedHead(), "parts.unused", r"'parts.unused'.* does not run it"),
    (zoo.Zoo(), "body", r"`head`.* 'body'.* from 'head'"),
    (zoo.Distillation(), "teacher.head", r"'teacher.head'.* from 'student.head'"),
    (zoo.Ensemble(), "members.0.2", r"'members.0.2'.* 2 layers"),
]


@pytest.mark.parametrize(("network", "head", "match"), REFUSED)
def test_a_given_head_has_to_be_the_last_layer(network, head, match):
    with pytest.raises(ValueError, match=match):
        find_head(network, inputs().flatten(1), head=head)


def test_labels_tell_which_of_two_tasks_is_meant():
    network, x = zoo.TwoTasks(), inputs()
    assert find_route(network, x, highest_label=4).entry == 0
    with pytest.raises(ValueError, match=r"5 \(entry 0\), 3 \(entry 1\).*forward_fn=lambda"):
        find_route(network, x, highest_label=2)
    chosen = find_route(network, x, forward=lambda x: network(x)[0])
    assert (chosen.head, chosen.num_classes) == ("other", 5)


def test_without_a_graph_the_layer_with_the_same_output_is_the_head():
    cut = nn.Sequential(CutGraph(), nn.Sigmoid())
    assert find_route(cut, inputs()).reason == UNTRACED


def test_tokens_have_an_embedding_too():
    network = nn.Sequential(nn.Embedding(7, 6), nn.Flatten(), nn.Linear(18, 4))
    assert find_head(network, torch.randint(7, (5, 3))) == "2"
    bag = nn.Sequential(nn.EmbeddingBag(7, 4))
    assert find_route(bag, torch.randint(7, (5, 3))).reason.startswith("the input of '0' is not a tensor of numbers")


def test_hooks_are_removed_if_the_network_fails():
    network = zoo.Zoo()
    with pytest.raises(RuntimeError, match="shape"):
        find_head(network, torch.rand(5, 7))
    assert count_hooks(network) == 0
