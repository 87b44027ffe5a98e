"""Networks whose heads are found, and helpers, for the tests of the head and of the route to the logits."""

import copy
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from lightning_robustness._model.access import find_logits
from lightning_robustness._model.head import HeadTap
from lightning_robustness._model.route import find_route


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


class LastCallIsAnother(Network):
    def forward(self, x):
        logits = self.head(self.embed(x))
        self.late = self.head(0.5 * self.embed(x))
        return logits


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
    """What enters the head, and what the network returns."""
    with torch.no_grad():
        return network.pooled(x), find_logits(network(x), 0)


def find_head(network, x, forward=None, head=None):
    return find_route(network, x, forward, head).head


def tap_of(network, x):
    route = find_route(network, x)
    return HeadTap(network, route.head, route.sources, route.entry)


def assert_call(call, expected, **tolerance):
    torch.testing.assert_close(tuple(call), tuple(expected), **tolerance)
