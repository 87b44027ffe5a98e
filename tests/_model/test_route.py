import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from lightning_robustness._model.access import pick_entry
from lightning_robustness._model.head import HeadTap
from lightning_robustness._model.route import find_route
from tests._model.heads import (
    NETWORKS,
    AuxiliaryHead,
    Distillation,
    FullyConvolutional,
    LastCallIsAnother,
    LogSoftmaxEnd,
    NestedHead,
    Network,
    PooledTokens,
    SharedBody,
    SoftmaxEnd,
    TupleOutput,
    assert_call,
    count_hooks,
    expected_call,
    find_head,
    inputs,
    tap_of,
)

UNTRACED = "no layer returns the logits themselves, and no graph of autograd leads back to one"


class LargerKernel(FullyConvolutional):
    """Its mean over positions is not what it makes of the mean."""

    def build(self, num_classes):
        super().build(num_classes)
        self.head = nn.Conv2d(8, num_classes, 3, padding=1)


class CosineClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        return 16 * F.normalize(x) @ F.normalize(self.weight).T


class CosineNetwork(Network):
    def build(self, num_classes):
        self.body = nn.Linear(6, 8)
        self.head = CosineClassifier()


class CutGraph(Network):
    def forward(self, x):
        return self.head(self.embed(x)).detach()


@pytest.mark.parametrize(
    ("kind", "number", "num_classes", "dtype"),
    [
        *((kind, 5, 4, torch.float32) for kind in [*NETWORKS, LargerKernel, CosineNetwork, CutGraph]),
        *((kind, 1, 2, torch.float32) for kind in (Network, PooledTokens, FullyConvolutional, SharedBody)),
        (Network, 5, 4, torch.float64),
    ],
)
def test_the_head_is_found_and_what_passes_through_it(kind, number, num_classes, dtype):
    network, x = kind(num_classes).to(dtype).eval(), inputs(number, dtype)
    hooks = count_hooks(network)
    for head in (None, network.head_name, network.get_submodule(network.head_name)):
        assert find_head(network, x, head=head) == network.head_name
    expected = expected_call(network, x)
    assert_call(tap_of(network, x).run(pick_entry(network, find_route(network, x).entry), x), expected)
    with tap_of(network, x) as tap, torch.no_grad():
        tap.listen(x)
        network(x)
        assert_call(tap.take(), expected)
    assert count_hooks(network) == hooks


# Pooling and softmax round differently from the network
@pytest.mark.parametrize("kind", [Network, PooledTokens, FullyConvolutional, LogSoftmaxEnd, SoftmaxEnd])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_head_is_found_in_half_precision(kind, dtype):
    assert find_head(kind(4).to(dtype).eval(), inputs(dtype=dtype)) == kind.head_name


@pytest.mark.parametrize("kind", [Network, PooledTokens, LogSoftmaxEnd, SoftmaxEnd, AuxiliaryHead])
def test_the_head_is_found_where_logits_are_tiny(kind):
    """Networks whose outputs are nearly zero, or nearly uniform, at first."""
    network = kind(4)
    with torch.no_grad():
        for name, p in network.named_parameters():
            p.mul_(1e-4 if name.startswith((network.head_name, "auxiliary")) else 1)
    assert find_head(network, inputs()) == network.head_name


def test_a_network_that_is_its_own_head():
    network, x = nn.Linear(6, 3), inputs().flatten(1)
    assert find_head(network, x) == ""
    call = HeadTap(network, "").run(network, x)
    assert torch.equal(call.embedding, x)
    with HeadTap(network, "") as tap:
        tap.listen(x)
        network(1 - x)
        logits = network(x)
        assert_call(tap.take(), (x, logits), rtol=0, atol=0)


class SqueezeNet(nn.Module):
    """A ReLU between the 1x1 convolution and the pooling, so that the logits are not the convolution's output."""

    def __init__(self, dimensions):
        super().__init__()
        convolution, pool = [(nn.Conv1d, nn.AdaptiveAvgPool1d), (nn.Conv2d, nn.AdaptiveAvgPool2d)][dimensions - 1]
        self.shape = (-1, 1, 6) if dimensions == 1 else (-1, 1, 2, 3)
        self.features = nn.Sequential(convolution(1, 8, 3, padding=1), nn.ReLU())
        self.classifier = nn.Sequential(nn.Dropout(0.5), convolution(8, 4, 1), nn.ReLU(), pool(1))

    def forward(self, x):
        return self.classifier(self.features(x.reshape(self.shape))).flatten(1)


@pytest.mark.parametrize("dimensions", [1, 2])
def test_squeezenet(dimensions):
    network, x = SqueezeNet(dimensions).eval(), inputs()
    assert find_head(network, x) == "classifier.1"
    with torch.no_grad():
        expected = network.features(x.reshape(network.shape)).flatten(2).sum(dim=2) / 6, network(x)
    assert_call(tap_of(network, x).run(pick_entry(network, find_route(network, x).entry), x), expected)


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
    network, x = Network(4).eval(), inputs()
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
    network = Network(4)
    network.alias = network.head
    for head in ("alias", "head", network.alias, None):
        assert find_head(network, inputs(), head=head) == "head"
    assert_call(HeadTap(network, "alias").run(network, inputs()), expected_call(network, inputs()))


def test_forward_chooses_among_networks():
    network, x = Distillation(4), inputs()
    assert find_head(network, x, forward=lambda x: network.teacher(x)) == "teacher.head"
    assert find_head(network, x, forward=network.student) == "student.head"


class FunctionalHead(Network):
    def build(self, num_classes):
        self.body = nn.Linear(6, 8)
        self.weight = nn.Parameter(torch.randn(num_classes, 8))

    def forward(self, x):
        return F.linear(self.embed(x), self.weight)


def test_a_functional_head_is_not_found():
    network = nn.ModuleDict({"network": FunctionalHead(4)})
    network.forward = lambda x: network["network"](x)
    route = find_route(network, inputs())
    assert (route.head, route.num_features, route.num_classes) == (None, 0, 4)
    assert route.reason == "a matrix of weights is applied outside of any module"
    assert find_route(nn.Identity(), inputs().flatten(1)).reason == UNTRACED


def test_a_head_whose_last_call_is_not_the_logits_is_not_found():
    """Since a tap would return what the last call computed."""
    route = find_route(LastCallIsAnother(4), inputs())
    assert (route.head, route.reason) == (None, "'head' runs again after it")


def test_logits_that_are_not_finite():
    network = Network(4)
    nn.init.constant_(network.head.bias, torch.nan)
    with pytest.raises(ValueError, match="Expected finite logits but 5 of 5 samples"):
        find_head(network, inputs())


def test_a_head_that_does_not_run_has_no_embedding():
    network = NestedHead(4)
    with pytest.raises(ValueError, match=r"the head 'parts.unused'"):
        HeadTap(network, "parts.unused").run(network, inputs())
    assert count_hooks(network) == 0


class TupleHead(Network):
    """Its head returns the logits among other things."""

    def build(self, num_classes):
        super().build(num_classes)
        self.pair = TupleOutput(num_classes)

    def forward(self, x):
        return self.pair(x)[0]


def test_heads_that_do_not_return_a_tensor():
    assert find_head(TupleHead(4), inputs()) == "pair.head"
    assert find_head(TupleHead(4), inputs(), head="pair") == "pair"


class Ensemble(nn.Module):
    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList([Network(4), Network(4)])

    def forward(self, x):
        return sum(member(x) for member in self.members) / 2


def test_an_ensemble_has_no_head():
    route = find_route(Ensemble(), inputs())
    assert (route.head, dict(route.sources)) == (None, {"": "identity"})
    assert route.reason == "the logits come from 2 layers: 'members.0.head', 'members.1.head'"


REFUSED = [
    (NestedHead(4), "fc", r"`head`.* NestedHead .*'fc'.* convolutions: body, parts\.unused, parts\.out\.1\.0\."),
    (NestedHead(4), nn.Linear(8, 4), r"NestedHead .* Linear"),
    (nn.Identity(), "fc", "Linear layers and convolutions: none"),
    (NestedHead(4), "parts.unused", r"'parts.unused'.* does not run it"),
    (Network(4), "body", r"`head`.* 'body'.* from 'head'"),
    (Distillation(4), "teacher.head", r"'teacher.head'.* from 'student.head'"),
    (Ensemble(), "members.0.head", r"'members.0.head'.* 2 layers"),
]


@pytest.mark.parametrize(("network", "head", "match"), REFUSED)
def test_a_given_head_has_to_be_the_last_layer(network, head, match):
    with pytest.raises(ValueError, match=match):
        find_head(network, inputs(), head=head)


class FeaturesAndLogits(Network):
    def forward(self, x):
        embedding = self.embed(x)
        return embedding, self.head(embedding)


class NormalizedFeatures(Network):
    def forward(self, x):
        embedding = self.embed(x)
        return F.normalize(embedding), self.head(embedding)


class TwoTasks(Network):
    def build(self, num_classes):
        super().build(num_classes)
        self.other = nn.Linear(8, 3)

    def forward(self, x):
        return self.other(self.embed(x)), self.head(self.embed(x))


@pytest.mark.parametrize("kind", [FeaturesAndLogits, NormalizedFeatures])
def test_features_and_logits_in_a_tuple_are_told_apart(kind):
    network, x = kind(4), inputs()
    route = find_route(network, x)
    assert (route.head, route.entry, route.num_classes) == ("head", 1, 4)
    with tap_of(network, x) as tap, torch.no_grad():
        tap.listen(x)
        network(x)
        assert_call(tap.take(), (network.embed(x), network(x)[1]))


def test_labels_tell_which_of_two_tasks_is_meant():
    network, x = TwoTasks(4), inputs()
    assert find_route(network, x, highest_label=3).entry == 1
    with pytest.raises(ValueError, match=r"3 \(entry 0\), 4 \(entry 1\).*forward_fn=lambda"):
        find_route(network, x, highest_label=2)
    chosen = find_route(network, x, forward=lambda x: network(x)[0])
    assert (chosen.head, chosen.num_classes) == ("other", 3)


def test_without_a_graph_the_layer_with_the_same_output_is_the_head():
    cut = nn.Sequential(CutGraph(4), nn.Sigmoid())
    assert find_route(cut, inputs()).reason == UNTRACED


def test_tokens_have_an_embedding_too():
    network = nn.Sequential(nn.Embedding(7, 6), nn.Flatten(), nn.Linear(18, 4))
    assert find_head(network, torch.randint(7, (5, 3))) == "2"
    bag = nn.Sequential(nn.EmbeddingBag(7, 4))
    assert find_route(bag, torch.randint(7, (5, 3))).reason.startswith("the input of '0' is not a tensor of numbers")


def test_hooks_are_removed_if_the_network_fails():
    network = Network(4)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        find_head(network, torch.rand(5, 7))
    assert count_hooks(network) == 0
