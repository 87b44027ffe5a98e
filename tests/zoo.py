"""Small LightningModules of many kinds, each with its logits written down once more, in plain algebra of the weights.

``reference`` never calls a module: it is what the monitor and ``evaluate`` are compared with.
"""

import copy
from collections import namedtuple
from types import SimpleNamespace

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

Outputs = namedtuple("Outputs", ["scores", "features"])


def wide(parameter):
    return parameter.detach().double()


def affine(layer, x):
    """A linear layer, or a 1x1 convolution of vectors, by its weights."""
    out = x @ wide(layer.weight).flatten(1).T
    return out if layer.bias is None else out + wide(layer.bias)


def pair(z):
    """The two classes of one logit."""
    return torch.stack([torch.zeros_like(z), z], dim=1)


def patches(x):
    """The 3x3 neighbourhoods of an image with a border of zeros: (N, C, H, W) to (N, H, W, 9 C)."""
    n, c, h, w = x.shape
    padded = torch.zeros(n, c, h + 2, w + 2, dtype=x.dtype)
    padded[:, :, 1:-1, 1:-1] = x
    rows = [padded[:, :, i : i + 3, j : j + 3].reshape(n, 9 * c) for i in range(h) for j in range(w)]
    return torch.stack(rows, dim=1).reshape(n, h, w, 9 * c)


class Zoo(L.LightningModule):
    """A perceptron; the others change a part of it."""

    shape = (8,)
    num_classes = 3
    has_embedding = True
    head_name = "head"
    is_differentiable = True

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.build()
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(3)
        self.eval()

    def build(self):
        self.body, self.head = nn.Linear(8, 6), nn.Linear(6, self.num_classes)

    def embed(self, x):
        return self.body(x.reshape(-1, *self.shape)).relu()

    def pooled(self, x):
        """What enters the head, averaged over positions."""
        e = self.embed(x)
        if e.ndim == 2:
            return e
        e = e.flatten(1, -2) if isinstance(self.head, nn.Linear) else e.flatten(2).transpose(1, 2)
        return e.sum(dim=1) / e.shape[1]

    def forward(self, x):
        return self.head(self.embed(x))

    def embed_reference(self, x):
        return affine(self.body, x).clamp(min=0)

    def reference(self, x):
        return affine(self.head, self.embed_reference(x))

    def read(self, output):
        """The logits in what the forward pass returns."""
        return output

    def decide(self, output):
        return self.read(output).argmax(dim=1)

    def own(self, x):
        """What the validation step computes."""
        return self(x)

    def unpack(self, batch):
        return (batch[0], batch[1]) if len(batch) > 1 else (batch[0], None)

    def validation_step(self, batch, batch_idx):
        x, y = self.unpack(batch)
        preds = self.decide(self.own(x))
        if y is not None:
            right = (preds == y.reshape(-1).long()).float()
            self.log("val_acc", right.mean(), batch_size=len(x))


class Trained(L.LightningModule):
    """A module around a network, as its author would write it."""

    def __init__(self, network, lr=0.1):
        super().__init__()
        self.network, self.lr = network, lr

    def forward(self, x):
        return self.network(x)

    def training_step(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch):
        self(batch[0])

    def test_step(self, batch):
        return None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


# Binary classifiers
class OneLogit(Zoo):
    num_classes = 1

    def reference(self, x):
        return pair(super().reference(x)[:, 0])

    def decide(self, output):
        return (self.read(output).reshape(-1) > 0).long()


class OneLogitFlat(OneLogit):
    def forward(self, x):
        return super().forward(x).squeeze()


class OneLogitInDictionary(OneLogit):
    def forward(self, x):
        return {"logits": super().forward(x), "loss": x.sum()}

    def read(self, output):
        return output["logits"]


class TwoLogits(Zoo):
    num_classes = 2


# What follows the last layer
class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.7))

    def forward(self, x):
        return x / self.temperature


class Temperature(Zoo):
    def build(self):
        super().build()
        self.scale = Scale()

    def forward(self, x):
        return self.scale(super().forward(x))

    def reference(self, x):
        return super().reference(x) / 1.7


class TemperatureInline(Temperature):
    def build(self):
        Zoo.build(self)
        self.temperature = nn.Parameter(torch.tensor(1.7))

    def forward(self, x):
        return Zoo.forward(self, x) / self.temperature


class ReluEnd(Zoo):
    """As Lightning's own example of a classifier of images."""

    def forward(self, x):
        return super().forward(x).relu()

    def reference(self, x):
        return super().reference(x).clamp(min=0)


class LogSoftmaxEnd(Zoo):
    def forward(self, x):
        return super().forward(x).log_softmax(dim=1)

    def reference(self, x):
        z = super().reference(x)
        return z - z.exp().sum(dim=1, keepdim=True).log()


class SoftmaxEnd(LogSoftmaxEnd):
    def forward(self, x):
        return super().forward(x).exp()

    def reference(self, x):
        return super().reference(x).exp()


class LogSoftmaxBesideValidation(LogSoftmaxEnd):
    """Validation stops before the log-softmax that ``forward`` ends in."""

    def own(self, x):
        return self.head(self.embed(x))


class BatchNormEnd(Zoo):
    def build(self):
        super().build()
        self.norm = nn.BatchNorm1d(3)
        self.norm.running_mean.copy_(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, x):
        return self.norm(super().forward(x))

    def reference(self, x):
        return (super().reference(x) - wide(self.norm.running_mean)) / (1 + self.norm.eps) ** 0.5


# Heads that are not linear layers
class CosineClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6))

    def forward(self, x):
        return 8 * F.normalize(x) @ F.normalize(self.weight).T


class Cosine(Zoo):
    def build(self):
        self.body, self.head = nn.Linear(8, 6), CosineClassifier()

    def embed(self, x):
        return self.body(x)

    def embed_reference(self, x):
        return affine(self.body, x)

    def reference(self, x):
        e, w = self.embed_reference(x), wide(self.head.weight)
        return 8 * (e @ w.T) / (e.square().sum(dim=1, keepdim=True) * w.square().sum(dim=1)).sqrt()


class ArcFace(Cosine):
    """The matrix of the head belongs to the module itself."""

    has_embedding = False

    def build(self):
        self.body = nn.Linear(8, 6)
        self.weight = nn.Parameter(torch.randn(3, 6))

    def forward(self, x):
        return 8 * F.linear(F.normalize(self.embed(x)), F.normalize(self.weight))

    def reference(self, x):
        self.head = SimpleNamespace(weight=self.weight)
        return super().reference(x)


class FunctionalHead(Zoo):
    has_embedding = False

    def build(self):
        self.body = nn.Linear(8, 6)
        self.weight = nn.Parameter(torch.randn(3, 6))

    def forward(self, x):
        return F.linear(self.embed(x), self.weight)

    def reference(self, x):
        return self.embed_reference(x) @ wide(self.weight).T


class Prototypes(Zoo):
    class Distances(nn.Module):
        def __init__(self):
            super().__init__()
            self.centers = nn.Parameter(torch.randn(3, 6))

        def forward(self, x):
            return -torch.cdist(x, self.centers).square()

    def build(self):
        self.body, self.head = nn.Linear(8, 6), self.Distances()

    def reference(self, x):
        e = self.embed_reference(x)
        return -(e[:, None] - wide(self.head.centers)[None]).square().sum(dim=2)


class Capsules(Zoo):
    """The logits are the lengths of the capsules of the classes."""

    class Capsule(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4, 6))

        def forward(self, x):
            return torch.einsum("kdm,nm->nkd", self.weight, x)

    def build(self):
        self.body, self.head = nn.Linear(8, 6), self.Capsule()

    def forward(self, x):
        return self.head(self.embed(x)).norm(dim=2)

    def reference(self, x):
        e, w = self.embed_reference(x), wide(self.head.weight)
        return torch.stack([(e @ w[k].T).square().sum(dim=1).sqrt() for k in range(3)], dim=1)


class Maxout(Zoo):
    def build(self):
        self.body, self.head = nn.Linear(8, 6), nn.Linear(6, 6)

    def forward(self, x):
        return super().forward(x).reshape(-1, 3, 2).amax(dim=2)

    def reference(self, x):
        z = super().reference(x)
        return torch.maximum(z[:, ::2], z[:, 1::2])


class PointwiseConvolution(Zoo):
    shape = (1, 4, 4)

    def build(self):
        self.body, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, self.num_classes, 1)

    def forward(self, x):
        return self.head(self.embed(x)).mean(dim=(2, 3))

    def embed_reference(self, x):
        return affine(self.body, patches(x)).clamp(min=0).mean(dim=(1, 2))


class OneLogitConvolution(OneLogit, PointwiseConvolution):
    """Its logit is the mean over positions."""


class WideConvolution(PointwiseConvolution):
    """A 3x3 convolution, a ReLU and pooling at the end."""

    def build(self):
        self.body, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x):
        return self.head(self.embed(x)).relu().mean(dim=(2, 3))

    def reference(self, x):
        e = affine(self.body, patches(x)).clamp(min=0).permute(0, 3, 1, 2)
        return affine(self.head, patches(e)).clamp(min=0).mean(dim=(1, 2))


class WeightNorm(Zoo):
    def build(self):
        super().build()
        parametrizations.weight_norm(self.head)


class SpectralNorm(Zoo):
    def build(self):
        super().build()
        parametrizations.spectral_norm(self.head)


class Logistic(Zoo):
    """The network is a single layer."""

    def build(self):
        self.head = nn.Linear(8, 3)

    def embed(self, x):
        return x

    def embed_reference(self, x):
        return x


class NestedHead(Zoo):
    head_name = "parts.out.1.0"

    def build(self):
        self.body = nn.Linear(8, 6)
        out = nn.ModuleList([nn.Identity(), nn.Sequential(nn.Linear(6, 3))])
        self.parts = nn.ModuleDict({"unused": nn.Linear(6, 3), "out": out})

    def forward(self, x):
        return self.parts["out"][1](self.embed(x))


class HeadCalledTwice(Zoo):
    """The logits are those of the second call."""

    def forward(self, x):
        self.early = self.head(0.5 * self.embed(x))
        return super().forward(x)


class LastCallIsAnother(Zoo):
    """The logits are those of the first call."""

    def forward(self, x):
        logits = super().forward(x)
        self.late = self.head(0.5 * self.embed(x))
        return logits


# Several last layers, or none
class Ensemble(Zoo):
    has_embedding = False

    def build(self):
        self.members = nn.ModuleList([nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)) for _ in range(2)])

    def forward(self, x):
        return torch.stack([member(x) for member in self.members]).mean(dim=0)

    def reference(self, x):
        return sum(affine(member[2], affine(member[0], x).clamp(min=0)) for member in self.members) / 2


class EnsembleOfProbabilities(Ensemble):
    def forward(self, x):
        return torch.stack([member(x).softmax(dim=1) for member in self.members]).mean(dim=0).log()

    def reference(self, x):
        logits = [affine(member[2], affine(member[0], x).clamp(min=0)) for member in self.members]
        return (sum(z.exp() / z.exp().sum(dim=1, keepdim=True) for z in logits) / 2).log()


class WideAndDeep(Zoo):
    has_embedding = False

    def build(self):
        super().build()
        self.wide = nn.Linear(8, 3)

    def forward(self, x):
        return super().forward(x) + self.wide(x)

    def reference(self, x):
        return super().reference(x) + affine(self.wide, x)


class MixtureOfExperts(Ensemble):
    def build(self):
        super().build()
        self.gate = nn.Linear(8, 2)

    def forward(self, x):
        gate = self.gate(x).softmax(dim=1)
        return sum(gate[:, i : i + 1] * member(x) for i, member in enumerate(self.members))

    def reference(self, x):
        gate = affine(self.gate, x).exp()
        gate = gate / gate.sum(dim=1, keepdim=True)
        logits = [affine(member[2], affine(member[0], x).clamp(min=0)) for member in self.members]
        return sum(gate[:, i : i + 1] * z for i, z in enumerate(logits))


# What the forward pass returns
class InDictionary(Zoo):
    def forward(self, x):
        return {"loss": x.sum(), "logits": super().forward(x)}

    def read(self, output):
        return output["logits"]


class InObject(Zoo):
    def forward(self, x):
        return SimpleNamespace(logits=super().forward(x), hidden_states=x)

    def read(self, output):
        return output.logits


class LogitsAndFeatures(Zoo):
    entry = 0

    def forward(self, x):
        e = self.embed(x)
        return self.head(e), e

    def read(self, output):
        return output[self.entry]


class FeaturesAndLogits(LogitsAndFeatures):
    entry = 1

    def forward(self, x):
        return super().forward(x)[::-1]


class NamedOutputs(LogitsAndFeatures):
    def forward(self, x):
        return Outputs(*super().forward(x))


class LossAndLogits(LogitsAndFeatures):
    entry = 1

    def forward(self, x):
        return x.sum(), Zoo.forward(self, x)


class Auxiliary(LogitsAndFeatures):
    """As Inception in training: a second head of the same width."""

    def build(self):
        super().build()
        self.auxiliary = nn.Linear(6, 3)

    def forward(self, x):
        e = self.embed(x)
        return self.head(e), self.auxiliary(e)


# Bodies
class Lightnings(Zoo):
    """As Lightning's demonstration of a backbone: the network is an attribute, and validation calls that."""

    class Backbone(nn.Module):
        def __init__(self):
            super().__init__()
            self.l1, self.l2 = nn.Linear(16, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.l2(self.l1(x.flatten(1)).relu()).relu()

    shape = (1, 4, 4)

    head_name = "backbone.l2"

    def build(self):
        self.backbone = self.Backbone()

    def embed(self, x):
        return self.backbone.l1(x.flatten(1)).relu()

    def forward(self, x):
        return self.backbone(x)

    def own(self, x):
        return self.backbone(x)

    def reference(self, x):
        e = affine(self.backbone.l1, x.flatten(1)).clamp(min=0)
        return affine(self.backbone.l2, e).clamp(min=0)


class Normalized(Zoo):
    """Dropout and batch normalisation in the body."""

    def build(self):
        super().build()
        self.norm, self.dropout = nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.norm.running_var.copy_(torch.arange(1.0, 7.0))

    def embed(self, x):
        return self.dropout(self.norm(self.body(x)).relu())

    def embed_reference(self, x):
        return (affine(self.body, x) / (wide(self.norm.running_var) + self.norm.eps).sqrt()).clamp(min=0)


class Recurrent(Zoo):
    shape = (4, 3)

    def build(self):
        self.body, self.head = nn.LSTM(3, 6, batch_first=True), nn.Linear(6, 3)

    def embed(self, x):
        return self.body(x)[1][0][-1]

    def embed_reference(self, x):
        cell = self.body
        h = c = torch.zeros(len(x), 6, dtype=torch.double)
        for t in range(x.shape[1]):
            gates = x[:, t] @ wide(cell.weight_ih_l0).T + wide(cell.bias_ih_l0)
            gates = gates + h @ wide(cell.weight_hh_l0).T + wide(cell.bias_hh_l0)
            i, f, g, o = gates.split(6, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return h


class PooledTokens(Zoo):
    """Logits of every position, averaged."""

    shape = (4, 8)

    def forward(self, x):
        return super().forward(x).mean(dim=1)

    def reference(self, x):
        return affine(self.head, affine(self.body, x).clamp(min=0)).mean(dim=1)


class Attention(Zoo):
    """A vision transformer in miniature: patches, a class token of the module's own, attention and a head."""

    shape = (1, 4, 4)

    def build(self):
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.patches = nn.Conv2d(1, 6, 2, stride=2)
        self.attention = nn.MultiheadAttention(6, 1, batch_first=True)
        self.head = nn.Linear(6, 3)

    def embed(self, x):
        tokens = torch.cat([self.token.expand(len(x), -1, -1), self.patches(x).flatten(2).transpose(1, 2)], dim=1)
        return (tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0])[:, 0]

    def embed_reference(self, x):
        parts = [x[:, 0, i : i + 2, j : j + 2].reshape(len(x), 4) for i in (0, 2) for j in (0, 2)]
        token = wide(self.token)[0].expand(len(x), -1)
        tokens = torch.stack([token, *(affine(self.patches, part) for part in parts)], dim=1)
        matrix, bias = wide(self.attention.in_proj_weight), wide(self.attention.in_proj_bias)
        q, k, v = (tokens @ matrix.T + bias).split(6, dim=2)
        weights = (q @ k.transpose(1, 2) / 6**0.5).softmax(dim=2)
        return (tokens + affine(self.attention.out_proj, weights @ v))[:, 0]


class Encoder(Zoo):
    """A layer of torch's own transformer, which takes a fused kernel without gradients."""

    shape = (4, 6)

    def build(self):
        self.body = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=True)
        self.head = nn.Linear(6, 3)

    def embed(self, x):
        return self.body(x).mean(dim=1)

    def embed_reference(self, x):
        body = self.body
        parts = (x @ wide(body.self_attn.in_proj_weight).T + wide(body.self_attn.in_proj_bias)).split(6, dim=2)
        q, k, v = (part.unflatten(2, (2, 3)).transpose(1, 2) for part in parts)
        mixed = (q @ k.transpose(2, 3) / 3**0.5).softmax(dim=3) @ v
        x = self._norm(x + affine(body.self_attn.out_proj, mixed.transpose(1, 2).flatten(2)), body.norm1)
        hidden = affine(body.linear1, x).clamp(min=0)
        return self._norm(x + affine(body.linear2, hidden), body.norm2).mean(dim=1)

    @staticmethod
    def _norm(x, norm):
        centered = x - x.mean(dim=-1, keepdim=True)
        return centered / (centered.square().mean(dim=-1, keepdim=True) + norm.eps).sqrt()


class Distilled(Zoo):
    """A teacher that runs along, and is no part of the logits."""

    def build(self):
        super().build()
        self.teacher = nn.Linear(8, 3)

    def forward(self, x):
        self.gap = self.teacher(x).detach()
        return super().forward(x)


class Distillation(Zoo):
    """Holds two networks, of which the teacher runs last; both are equal at first."""

    head_name = "student.head"

    def build(self):
        self.student = Zoo()
        self.teacher = copy.deepcopy(self.student)

    def embed(self, x):
        return self.student.embed(x)

    def forward(self, x):
        logits = self.student(x)
        with torch.no_grad():
            self.distance = (logits - self.teacher(x)).square().mean()
        return logits


# Inputs of other kinds
class Tokens(Zoo):
    shape, is_differentiable = (5,), False

    def build(self):
        self.words, self.head = nn.Embedding(20, 6), nn.Linear(6, 3)

    def embed(self, x):
        return self.words(x).mean(dim=1)

    def embed_reference(self, x):
        return torch.stack([sum(wide(self.words.weight)[i] for i in row) / len(row) for row in x.long()])


class TokenTransformer(Tokens):
    def build(self):
        self.words, self.body, self.head = nn.Embedding(20, 6), Encoder(), nn.Linear(6, 3)

    def embed(self, x):
        return self.body.embed(self.words(x))

    def embed_reference(self, x):
        return self.body.embed_reference(wide(self.words.weight)[x.long()])


class Pixels(Zoo):
    """Takes values from 0 to 255 and scales them itself."""

    def forward(self, x):
        return super().forward(x / 255)

    def reference(self, x):
        return super().reference(x / 255)


class Double(Zoo):
    def build(self):
        super().build()
        self.double()


class Audio(Zoo):
    """A convolution over a signal in [-1, 1], of width 1 for the sake of a short reference."""

    shape = (1, 8)

    def build(self):
        self.body, self.head = nn.Conv1d(1, 6, 1), nn.Conv1d(6, 3, 1)

    def forward(self, x):
        return self.head(self.embed(x)).mean(dim=2)

    def reference(self, x):
        return affine(self.head, affine(self.body, x.transpose(1, 2)).clamp(min=0)).mean(dim=1)


class InnerGradient(Zoo):
    """Moves its inputs along a gradient, as energy-based models do."""

    def embed(self, x):
        with torch.inference_mode(False):  # within it, gradients are zero in older releases of torch
            gradient = torch.func.grad(lambda x: self.body(x).square().sum())(x.clone())
        return super().embed(x + 0.1 * gradient)

    def embed_reference(self, x):
        gradient = 2 * affine(self.body, x) @ wide(self.body.weight)
        return super().embed_reference(x + 0.1 * gradient)


# Modules that validate by other means than `forward`
class EmbeddingForward(Zoo):
    """``forward`` returns the embedding; validation goes on to the head."""

    def forward(self, x):
        return self.embed(x)

    def own(self, x):
        return self.head(self(x))


class ReluBeforeHead(EmbeddingForward):
    def forward(self, x):
        return self.body(x)

    def own(self, x):
        return self.head(self(x).relu())


class PreparesInputs(Zoo):
    """Validation scales its inputs before the network sees them."""

    def own(self, x):
        return self(4 * x - 2)

    def reference(self, x):
        return super().reference(4 * x - 2)


class NoForward(Zoo):
    def build(self):
        self.net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))

    forward = L.LightningModule.forward

    def own(self, x):
        return self.net(x)

    def reference(self, x):
        return affine(self.net[2], affine(self.net[0], x).clamp(min=0))


class Sigmoid(OneLogitFlat):
    def forward(self, x):
        return super().forward(x).sigmoid()

    def decide(self, output):
        return (output > 0.5).long()


class TwoTasks(LogitsAndFeatures):
    entry = 1

    def build(self):
        super().build()
        self.other = nn.Linear(6, 5)

    def forward(self, x):
        e = self.embed(x)
        return self.other(e), self.head(e)
