import copy
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from lightning_robustness.utilities.head import HeadTap, find_head
from lightning_robustness.utilities.module_state import is_lazy
from tests.utilities.test_sandbox import assert_same, snapshot, trained_once


class Network(nn.Module):
    """Embedding by ``embed``, head by name: what a tap should return is written down once more in ``expected_call``."""

    head_name = "head"

    def __init__(self, num_classes):
        super().__init__()
        self.build(num_classes)

    def build(self, num_classes):
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, num_classes)

    def embed(self, x):
        return self.body(x.flatten(1)).relu()

    def forward(self, x):
        return self.head(self.embed(x))

    def pooled(self, x):
        return self.embed(x)


class NestedHead(Network):
    head_name = "parts.out.1.0"

    def build(self, num_classes):
        self.body = nn.Linear(6, 8)
        out = nn.ModuleList([nn.Identity(), nn.Sequential(nn.Linear(8, num_classes))])
        self.parts = nn.ModuleDict({"unused": nn.Linear(8, num_classes), "out": out})

    def forward(self, x):
        return self.parts["out"][1](self.embed(x))


class VisionTransformer(Network):
    """The head sees the class token, behind a LayerNorm."""

    head_name = "mlp_head.linear"

    def build(self, num_classes):
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.patches = nn.Conv2d(1, 8, 2, stride=2)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(8)
        self.mlp_head = nn.ModuleDict({"linear": nn.Linear(8, num_classes)})

    def embed(self, x):
        tokens = self.patches(x.reshape(-1, 1, 2, 3).repeat(1, 1, 2, 2)).flatten(2).transpose(1, 2)
        return self.norm(self.encoder(torch.cat([self.token.expand(len(x), -1, -1), tokens], dim=1)))[:, 0]

    def forward(self, x):
        return self.mlp_head["linear"](self.embed(x))


class PooledTokens(Network):
    """The mean over tokens comes behind the head."""

    def build(self, num_classes):
        self.body = nn.Linear(2, 8)
        self.head = nn.Linear(8, num_classes)

    def embed(self, x):
        return self.body(x.reshape(len(x), 3, 2)).relu()

    def forward(self, x):
        return self.head(self.embed(x)).mean(dim=1)

    def pooled(self, x):
        return self.embed(x).sum(dim=1) / 3


class PooledMap(PooledTokens):
    """Channels behind the positions, as in networks of windows."""

    def embed(self, x):
        return super().embed(x).reshape(len(x), 3, 1, 8)

    def forward(self, x):
        return self.head(self.embed(x)).flatten(1, 2).mean(dim=1)

    def pooled(self, x):
        return super().pooled(x).squeeze(1)


class DenseNet(Network):
    head_name = "classifier"

    def build(self, num_classes):
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.classifier = nn.Linear(8, num_classes)

    def embed(self, x):
        return F.adaptive_avg_pool2d(F.relu(self.features(x.reshape(-1, 1, 2, 3))), 1).flatten(1)

    def forward(self, x):
        return self.classifier(self.embed(x))


class FullyConvolutional(Network):
    def build(self, num_classes):
        self.body = nn.Conv2d(1, 8, 3, padding=1)
        self.head = nn.Conv2d(8, num_classes, 1)

    def embed(self, x):
        return self.body(x.reshape(-1, 1, 2, 3)).relu()

    def forward(self, x):
        return F.adaptive_avg_pool2d(self.head(self.embed(x)), 1).flatten(1)

    def pooled(self, x):
        return self.embed(x).sum(dim=(2, 3)) / 6


class FullyConvolutional1d(Network):
    def build(self, num_classes):
        self.body = nn.Conv1d(1, 8, 3, padding=1)
        self.head = nn.Conv1d(8, num_classes, kernel_size=1)

    def embed(self, x):
        return self.body(x.reshape(-1, 1, 6)).relu()

    def forward(self, x):
        return self.head(self.embed(x)).mean(dim=2)

    def pooled(self, x):
        return self.embed(x).sum(dim=2) / 6


class FullyConvolutional3d(FullyConvolutional):
    def build(self, num_classes):
        self.body = nn.Conv3d(1, 8, 1)
        self.head = nn.Conv3d(8, num_classes, (1, 1, 1))

    def embed(self, x):
        return self.body(x.reshape(-1, 1, 1, 2, 3)).relu()

    def forward(self, x):
        return self.head(self.embed(x)).mean(dim=(2, 3, 4))

    def pooled(self, x):
        return self.embed(x).sum(dim=(2, 3, 4)) / 6


class LogSoftmaxEnd(Network):
    def forward(self, x):
        return super().forward(x).log_softmax(dim=1)


class SoftmaxEnd(Network):
    def build(self, num_classes):
        super().build(num_classes)
        self.softmax = nn.Softmax(dim=1)

    def forward(self, x):
        return self.softmax(super().forward(x))


class DictionaryOutput(Network):
    def forward(self, x):
        return {"loss": torch.zeros(()), "logits": super().forward(x)}


class TupleOutput(Network):
    def forward(self, x):
        return super().forward(x), self.embed(x)


class ObjectOutput(Network):
    def forward(self, x):
        return SimpleNamespace(logits=super().forward(x), hidden_states=None)


class SpecialLinear(nn.Linear):
    pass


class SubclassedLinear(Network):
    def build(self, num_classes):
        super().build(num_classes)
        self.head = SpecialLinear(8, num_classes)


class WeightNorm(Network):
    def build(self, num_classes):
        super().build(num_classes)
        self.head = parametrizations.weight_norm(self.head)


class SpectralNorm(Network):
    def build(self, num_classes):
        super().build(num_classes)
        self.head = parametrizations.spectral_norm(self.head)


class AuxiliaryHead(Network):
    """Another head of the same width comes last."""

    start_at_zero = False

    def build(self, num_classes):
        super().build(num_classes)
        self.auxiliary = nn.Linear(8, num_classes)
        if self.start_at_zero:
            for p in (*self.head.parameters(), *self.auxiliary.parameters()):
                nn.init.zeros_(p)

    def forward(self, x):
        embedding = self.embed(x)
        return self.head(embedding), self.auxiliary(embedding)


class AuxiliaryHeadAtZero(AuxiliaryHead):
    """At first, the outputs of both are equal."""

    start_at_zero = True


class Distillation(Network):
    """Holds two networks, of which the teacher runs last; both are equal at first."""

    head_name = "student.head"

    def build(self, num_classes):
        self.student = Network(num_classes)
        self.teacher = copy.deepcopy(self.student)

    def embed(self, x):
        return self.student.embed(x)

    def forward(self, x):
        logits = self.student(x)
        with torch.no_grad():
            self.distance = (logits - self.teacher(x)).square().mean()
        return logits


class SharedBody(Network):
    """A layer that is used twice is as wide as the head."""

    def build(self, num_classes):
        self.input = nn.Linear(6, num_classes)
        self.body = nn.Linear(num_classes, num_classes)
        self.head = nn.Linear(num_classes, num_classes)

    def embed(self, x):
        return self.body(self.body(self.input(x.flatten(1))).relu()).relu()


class HeadCalledTwice(Network):
    """The logits are those of the second call."""

    def forward(self, x):
        self.early = self.head(0.5 * self.embed(x))
        return self.head(self.embed(x))


NETWORKS = [
    *(Network, NestedHead, VisionTransformer, PooledTokens, PooledMap, DenseNet),
    *(FullyConvolutional, FullyConvolutional1d, FullyConvolutional3d, LogSoftmaxEnd, SoftmaxEnd),
    *(DictionaryOutput, TupleOutput, ObjectOutput, SubclassedLinear, WeightNorm, SpectralNorm),
    *(AuxiliaryHead, AuxiliaryHeadAtZero, Distillation, SharedBody, HeadCalledTwice),
]


def inputs(number=5, dtype=torch.float32, seed=0):
    return torch.rand(number, 1, 2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.double).to(dtype)


def count_hooks(network):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in network.modules())


def expected_call(network, x):
    """What enters the head, and a matrix product of it with the head's weights."""
    head = network.get_submodule(network.head_name)
    with torch.no_grad():
        embedding = network.pooled(x)
        return embedding, embedding @ head.weight.flatten(1).T + head.bias


def assert_call(call, expected, **tolerance):
    torch.testing.assert_close(tuple(call), tuple(expected), **tolerance)


@pytest.mark.filterwarnings("ignore:The model returns matrices of widths")
@pytest.mark.parametrize(
    ("kind", "number", "num_classes", "dtype"),
    [
        *((kind, 5, 4, torch.float32) for kind in NETWORKS),
        *((kind, 1, 2, torch.float32) for kind in (Network, PooledTokens, FullyConvolutional, SharedBody)),
        (Network, 5, 4, torch.float64),
    ],
)
def test_the_head_is_found_and_what_passes_through_it(kind, number, num_classes, dtype):
    network, x = kind(num_classes).to(dtype).eval(), inputs(number, dtype)
    hooks = count_hooks(network)
    assert find_head(network, x) == network.head_name
    expected = expected_call(network, x)
    assert_call(HeadTap(network, network.head_name).run(network, x), expected)
    with HeadTap(network, network.head_name) as tap, torch.no_grad():
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
    """A ReLU between the 1x1 convolution and the pooling, so that the convolution alone is not the head."""

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
    assert find_head(network, x) == "classifier"
    with torch.no_grad():
        expected = network.features(x.reshape(network.shape)).flatten(2).sum(dim=2) / 6, network(x)
    assert_call(HeadTap(network, "classifier").run(network, x), expected)


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


@pytest.mark.parametrize("by_name", [False, True])
def test_custom_heads_are_given(by_name):
    network, x = CosineNetwork(4), inputs()
    head = "head" if by_name else network.head
    assert find_head(network, x, head=head) == "head"
    embedding = network.embed(x).detach()
    cosine = torch.stack([F.cosine_similarity(embedding, row[None]) for row in network.head.weight], dim=1)
    assert_call(HeadTap(network, "head").run(network, x), (embedding, 16 * cosine.detach()))
    with pytest.raises(ValueError, match=r"of width 4, but found none\. Pass the name .* run: 'body' \(width 8\)"):
        find_head(network, x)


def test_a_head_with_pooling_is_given():
    """As in ConvNeXt: pooled features with positions of size 1 enter the head."""
    head = nn.Sequential(nn.LayerNorm((8, 1, 1)), nn.Flatten(), nn.Linear(8, 4))
    network = nn.Sequential(nn.Conv2d(1, 8, 1), nn.AdaptiveAvgPool2d(1), head)
    x = inputs()
    assert find_head(network, x, head="2") == "2"
    expected = network[:2](x).flatten(1).detach(), network(x).detach()
    assert_call(HeadTap(network, "2").run(network, x), expected)


class LargerKernel(FullyConvolutional):
    def build(self, num_classes):
        super().build(num_classes)
        self.head = nn.Conv2d(8, num_classes, 3, padding=1)


def test_convolutions_with_larger_kernels_are_given():
    """Their mean over positions is not what they make of the mean."""
    network, x = LargerKernel(4), inputs()
    with pytest.raises(ValueError, match=r"found none\. .* Layers that were run: none\."):
        find_head(network, x)
    assert find_head(network, x, head="head") == "head"
    expected = network.pooled(x).detach(), network(x).detach()
    assert_call(HeadTap(network, "head").run(network, x), expected)


def test_a_module_with_two_names_is_found_by_both():
    network = Network(4)
    network.alias = network.head
    assert find_head(network, inputs(), head="alias") == "alias"
    assert find_head(network, inputs(), head="head") == "head"
    assert find_head(network, inputs(), head=network.alias) in ("alias", "head")
    assert find_head(network, inputs()) in ("alias", "head")
    assert_call(HeadTap(network, "alias").run(network, inputs()), expected_call(network, inputs()))


def test_forward_chooses_among_networks():
    network, x = Distillation(4), inputs()
    assert find_head(network, x, forward=lambda x: network.teacher(x)) == "teacher.head"
    assert find_head(network, x, forward=network.student) == "student.head"
    assert find_head(network, x, head="teacher.head") == "teacher.head"


class FunctionalHead(Network):
    def build(self, num_classes):
        self.body = nn.Linear(6, 8)
        self.weight = nn.Parameter(torch.randn(num_classes, 8))

    def forward(self, x):
        return F.linear(self.embed(x), self.weight)


def test_a_functional_head_is_not_found():
    network = nn.ModuleDict({"network": FunctionalHead(4)})
    network.forward = lambda x: network["network"](x)
    with pytest.raises(ValueError, match=r"found none\. .* Layers that were run: 'network\.body' \(width 8\)\."):
        find_head(network, inputs())
    with pytest.raises(ValueError, match=r"Layers that were run: none\."):
        find_head(nn.Identity(), inputs().flatten(1))


class LastCallIsAnother(Network):
    def forward(self, x):
        logits = self.head(self.embed(x))
        self.late = self.head(0.5 * self.embed(x))
        return logits


def test_a_head_whose_last_call_is_not_the_logits_is_not_found():
    """Since a tap would return what the last call computed."""
    with pytest.raises(ValueError, match=r"found none\. .* run: 'body' \(width 8\), 'head' \(width 4\)\."):
        find_head(LastCallIsAnother(4), inputs())


def test_logits_that_are_not_finite():
    network = Network(4)
    nn.init.constant_(network.head.bias, torch.nan)
    with pytest.raises(ValueError, match="Expected finite logits but 5 of 5 samples"):
        find_head(network, inputs())


def test_heads_that_are_not_there():
    network = NestedHead(4)
    names = r"1x1 convolutions: body, parts\.unused, parts\.out\.1\.0\."
    with pytest.raises(ValueError, match=rf"`head` to be part of NestedHead but got 'fc', which is not\. .* {names}"):
        find_head(network, inputs(), head="fc")
    with pytest.raises(ValueError, match="part of NestedHead but got Linear, which is not"):
        find_head(network, inputs(), head=nn.Linear(8, 4))
    with pytest.raises(ValueError, match="Linear layers and 1x1 convolutions: none"):
        find_head(nn.Conv2d(1, 4, 2), inputs(), head="fc")


def test_heads_that_take_no_part():
    network = NestedHead(4)
    message = "'parts.unused'.*, with a tensor of one row per sample in and out, but it did not"
    with pytest.raises(ValueError, match=message):
        find_head(network, inputs(), head="parts.unused")
    with pytest.raises(ValueError, match=message):
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
    with pytest.raises(ValueError, match="'pair' to take part in the forward pass, with a tensor of one row"):
        find_head(TupleHead(4), inputs(), head="pair")
    assert find_head(TupleHead(4), inputs()) == "pair.head"


def test_a_given_head_has_to_be_as_wide_as_the_logits():
    with pytest.raises(ValueError, match="whose output is the logits, of width 4, but 'body' has width 8"):
        find_head(Network(4), inputs(), head="body")


def test_hooks_are_removed_if_the_network_fails():
    network = Network(4)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        find_head(network, torch.rand(5, 7))
    assert count_hooks(network) == 0


class Images(nn.Module):
    """A network that takes its inputs in many ways, with modules beside it, as a LightningModule holds them."""

    def __init__(self):
        super().__init__()
        self.network = Network(4)
        self.normalize = nn.BatchNorm2d(1, affine=False)
        self.augment = nn.Dropout(0.5)
        self.loss = nn.MSELoss()
        self.eval()
        self.augment.train()

    def forward(self, mask=None, images=None):
        return self.network(images)

    @property
    def head_name(self):
        return "network.head"

    def pooled(self, x):
        return self.network.embed(x)


OWN = {
    "alone": lambda model, x: model.network(x),
    "first": lambda model, x: (model.network(x), model.network(1 - x)),
    "last": lambda model, x: (model.network(1 - x), model.network(x)),
    "between": lambda model, x: (model.network(1 - x), model.network(x), model.network(x + 0.1)),
    "twice": lambda model, x: (model.network(x), model.network(x), model.network(1 - x)),
    "keyword": lambda model, x: (model(images=1 - x), model(images=x)),
    "mask": lambda model, x: (model(torch.ones_like(x, dtype=torch.bool), images=x), model(None, 1 - x)),
    "forward": lambda model, x: (model.forward(images=x), model.forward(images=1 - x)),
    "flattened": lambda model, x: (model.network(x.flatten(1)), model.network((1 - x).flatten(1))),
    "copy": lambda model, x: (model.network(1 - x), model.network(x.clone()), model.network(1 - x)),
    "flattened copy": lambda model, x: model.network(x.clone().flatten(1)),
    "other layout": lambda model, x: model.network(x.expand(-1, 1, 2, 3).contiguous(memory_format=torch.channels_last)),
    "by parts": lambda model, x: model.network.head(model.network.body(x.flatten(1)).relu()),
    "by parts, then another": lambda model, x: (OWN["by parts"](model, x), OWN["by parts"](model, 1 - x)),
    "by parts, after another": lambda model, x: (OWN["by parts"](model, 1 - x), OWN["by parts"](model, x)),
    "after augmentation": lambda model, x: (model.network(model.augment(x)), model.network(x)),
    "after adversarial inputs": lambda model, x: (model.network(attack(model, x)), model.network(x)),
    "before adversarial inputs": lambda model, x: (model.network(x), model.network(attack(model, x))),
    "after a loss": lambda model, x: (model.loss(1 - x, x), model.network(x)),
    "before other features": lambda model, x: (model.network(x), model.network.head(torch.rand(len(x), 8))),
    "larger batch first": lambda model, x: (model.network(torch.cat([x, x])), model.network(x)),
    "smaller batch first": lambda model, x: (model.network(x[:2]), model.network(x)),
    "views of torch.func": lambda model, x: (torch.func.jacrev(model.network)(x), model.network(x)),
}


def attack(model, x):
    """One step up the gradient, from a random start."""
    x_adv = (x + 0.01).requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(model.network(x_adv).logsumexp(dim=1).sum(), x_adv)
    return x_adv.detach() + 0.1 * gradient.sign()


@pytest.mark.parametrize("step", OWN)
def test_the_pass_on_the_announced_inputs_counts(step):
    model, x = Images(), inputs()
    expected = expected_call(model, x)
    with HeadTap(model, model.head_name) as tap:
        for context in (torch.enable_grad, torch.no_grad):
            tap.listen(x)
            with context():
                OWN[step](model, x)
            call = tap.take()
            assert_call(call, expected)
            assert not any(tensor.requires_grad for tensor in call)


def test_listening_in_inference_mode():
    model = Images()
    expected = expected_call(model, inputs())
    with torch.inference_mode(), HeadTap(model, model.head_name) as tap:
        x = inputs()
        tap.listen(x)
        model.network(1 - x), model.network(x)
        assert_call(tap.take(), expected)


OTHER = {
    "nothing": lambda model, x: None,
    "other inputs": lambda model, x: model.network(1 - x),
    "the head alone": lambda model, x: model.network.head(torch.rand(len(x), 8)),
    "more rows": lambda model, x: model.network(torch.cat([x, 1 - x])),
    "fewer rows": lambda model, x: model.network(x[:-1]),
    "other order": lambda model, x: model.network(x.flip(0)),
    "augmentation": lambda model, x: model.network(model.augment(x)),
    "normalization elsewhere": lambda model, x: model.network(model.normalize(x)),
    "features for something else": lambda model, x: (model.network.body(x.flatten(1)), model.network(1 - x)),
    "a loss of the inputs": lambda model, x: (model.loss(1 - x, x), model.network(1 - x)),
    "more rows by parts": lambda model, x: model.network.head(model.network.body(x.flatten(1)).repeat(2, 1)),
    "the body alone": lambda model, x: model.network.body(x.flatten(1)),
    "a mask that looks like them": lambda model, x: model(mask=x.bool(), images=1 - x),
    "one row": lambda model, x: [model.network(row[None]) for row in x],
    "heads in the order of bodies": lambda model, x: [model.network.head(f) for f in features(model, 1 - x, x)],
}


def features(model, *views):
    """What enters the head, with the bodies of all views before any head."""
    return [model.network.body(view.flatten(1)).relu() for view in views]


@pytest.mark.parametrize("step", OTHER)
def test_what_is_not_on_the_announced_inputs_does_not_count(step):
    model, x = Images(), inputs()
    with HeadTap(model, model.head_name) as tap, torch.no_grad():
        tap.listen(x)
        OTHER[step](model, x)
        assert tap.take() is None
        model.network(x)
        assert tap.take() is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_inputs_in_another_precision(dtype):
    model, x = Images(), inputs()
    model.network.to(dtype)
    with HeadTap(model, model.head_name) as tap, torch.no_grad():
        tap.listen(x)
        model.network((1 - x).to(dtype)), model.network(x.to(dtype))
        assert_call(tap.take(), expected_call(model.network, x.to(dtype)), rtol=0, atol=torch.finfo(dtype).eps)


def test_autocast():
    model, x = Images(), inputs()
    with HeadTap(model, model.head_name) as tap, torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        tap.listen(x)
        model.network(1 - x)
        logits = model.network(x)
        call = tap.take()
        assert logits.dtype == call.logits.dtype == torch.bfloat16
        assert torch.equal(call.logits, logits)


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 3)])
def test_small_inputs(shape):
    """A batch of one, a single feature, and features as many as the inputs have."""
    network, x = nn.Sequential(nn.Linear(shape[1], shape[1]), nn.Tanh(), nn.Linear(shape[1], 2)), torch.rand(shape)
    model = nn.ModuleDict({"network": network, "scale": nn.Identity()})
    with HeadTap(model, "network.2") as tap, torch.no_grad():
        tap.listen(x)
        model["scale"](torch.tensor(2.0)), network(1 - x)
        logits = network(x)
        assert_call(tap.take(), (network[:2](x), logits), rtol=0, atol=0)


def test_features_that_look_like_inputs():
    """Behind augmentation and behind an encoder of the same width, modules see the same: neither is taken for sure."""
    network, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), torch.rand(5, 3)
    with HeadTap(network, "1") as tap, torch.no_grad():
        tap.listen(x)
        network[1](network[0](x))
        assert tap.take() is None


def test_a_head_that_is_called_twice_counts_the_last_time():
    network, x = HeadCalledTwice(4), inputs()
    with HeadTap(network, "head") as tap, torch.no_grad():
        tap.listen(x)
        network(1 - x), network(x), network(1 - x)
        assert_call(tap.take(), expected_call(network, x))
    network = LastCallIsAnother(4)
    network(x)
    assert torch.equal(HeadTap(network, "head").run(network, x).logits, network.late)


def test_the_network_of_a_distillation_that_is_meant():
    network, x = Distillation(4), inputs()
    nn.init.normal_(network.teacher.head.weight)
    for first, second in [("student", "teacher"), ("teacher", "student")]:
        with HeadTap(network, "student.head") as tap, torch.no_grad():
            tap.listen(x)
            network.get_submodule(first)(x), network.get_submodule(second)(x)
            assert_call(tap.take(), expected_call(network, x))


class InPlace(Network):
    def forward(self, x):
        embedding = self.embed(x)
        logits = self.head(embedding)
        embedding.zero_()
        return logits.mul_(100).add_(1)


def test_changes_in_place_do_not_reach_what_was_kept():
    network, x = InPlace(4), inputs()
    expected = expected_call(network, x)
    with HeadTap(network, "head") as tap, torch.no_grad():
        tap.listen(x)
        network(x)
        call = tap.take()
    assert_call(call, expected)
    assert_call(HeadTap(network, "head").run(network, x), expected)


def test_hooks_are_there_between_attach_and_detach_only():
    network, x = Network(4), inputs()
    own = network.head.register_forward_hook(lambda *args: None)
    tap = HeadTap(network, "head")
    assert count_hooks(network) == 1
    tap.attach()
    attached = count_hooks(network)
    tap.attach()
    assert count_hooks(network) == attached > 1
    tap.run(network, x)
    assert count_hooks(network) == attached
    tap.listen(x)
    network(x)
    tap.detach()
    assert count_hooks(network) == 1
    assert tap.take() is None
    tap.detach()
    tap.run(network, x)
    with pytest.raises(ZeroDivisionError), tap:  # noqa: PT012
        tap.listen(x)
        raise ZeroDivisionError
    assert count_hooks(network) == 1
    assert own.id in network.head._forward_hooks


class Failing(Network):
    fails = True

    def forward(self, x):
        logits = super().forward(x)
        if self.fails:
            raise ZeroDivisionError
        return logits


@pytest.mark.parametrize("is_attached", [False, True])
def test_a_pass_that_fails_leaves_nothing_behind(is_attached):
    network, x = Failing(4), inputs()
    tap = HeadTap(network, "head")
    if is_attached:
        tap.attach()
    hooks = count_hooks(network)
    with pytest.raises(ZeroDivisionError):
        tap.run(network, x)
    assert count_hooks(network) == hooks
    assert tap.take() is None
    with tap:
        tap.listen(x)
        with pytest.raises(ZeroDivisionError):
            network(1 - x)
        network.fails = False
        network(x)
        assert_call(tap.take(), expected_call(network, x))


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_the_model_is_left_alone(context):
    network = trained_once()
    embedding = nn.Sequential(network.body, network.frozen)
    before = snapshot(network)
    with context(), torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
        assert find_head(network, x) == "head"
        call = HeadTap(network, "head").run(network, x)
        # also where nothing shows that the callable uses the network
        hidden = {"network": network}
        again = HeadTap(network, "head").run(lambda x: hidden["network"](x), x)
        assert find_head(network, x, forward=lambda x: hidden["network"](x)) == "head"
    assert_same(before, snapshot(network))
    assert_call(again, call, rtol=0, atol=0)
    network.eval()
    with torch.no_grad():
        assert_call(call, (embedding(x), network.head(embedding(x))))
    assert not any(tensor.requires_grad or tensor.is_inference() for tensor in call)


def test_a_tap_keeps_nothing_alive():
    model = Images()
    tap = HeadTap(model, model.head_name)
    references = []
    gc.disable()  # so that only reference counts free anything
    try:
        for step in [*OWN.values(), *OTHER.values()]:
            x = inputs()
            tap.attach()
            tap.listen(x)
            with torch.no_grad():
                step(model, x)
            call = tap.take()
            references += [weakref.ref(tensor) for tensor in (x, *(call or ()))]
            tap.run(model.network, x)
            tap.listen(x)
            tap.detach()
            del x, call
        assert [reference for reference in references if reference() is not None] == []
        model_reference = weakref.ref(model)
        del model, tap
        assert model_reference() is None
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_scripted_modules_are_left_out():
    network, x = Network(4), inputs()
    network.body = torch.jit.script(network.body)
    assert find_head(network, x) == "head"
    with HeadTap(network, "head") as tap, torch.no_grad():
        tap.listen(x)
        network(1 - x), network(x)
        assert_call(tap.take(), expected_call(network, x))


def test_encoder_layers_keep_their_fused_kernels(monkeypatch):
    calls, fused = [], torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *a: (calls.append(1), fused(*a))[1])
    network, x = VisionTransformer(4).eval(), inputs()
    with HeadTap(network, network.head_name) as tap, torch.no_grad():
        tap.listen(x)
        network(x)
        assert_call(tap.take(), expected_call(network, x))
    assert len(calls) == 2


def test_lazy_networks_are_left_uninitialised():
    network, x = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3)), torch.rand(5, 2)
    assert find_head(network, x) == "3"
    call = HeadTap(network, "3").run(network, x)
    assert (call.embedding.shape, call.logits.shape) == ((5, 4), (5, 3))
    assert is_lazy(network)
    with HeadTap(network, "3") as tap:  # the pass that initialises it, of somebody else
        tap.listen(x)
        logits = network(x)
        call = tap.take()
    assert torch.equal(call.logits, logits)
    assert not is_lazy(network)
