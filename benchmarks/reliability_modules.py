"""Modules whose training something that watches could disturb, for ``reliability.py``."""

import random
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


class Classifier(L.LightningModule):
    """Any network for digits, trained with Adam and a schedule; notes a checksum of each training batch."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def on_train_batch_start(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.seen.append(batch[0].double().sum().item())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]).float(), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_acc", (self(batch[0]).argmax(dim=1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=2e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)]


class ManualClassifier(Classifier):
    """Manual optimization by the raw optimizer, which leaves ``global_step`` at 0."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class SecondOrderClassifier(Classifier):
    """Training by L-BFGS, which evaluates the loss several times a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Averaged(nn.Linear):
    """A head with a moving average of its weights, a parameter without gradient that every forward pass updates."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.average = nn.Parameter(self.weight.detach().clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.lerp_(self.weight, 0.1)
        return super().forward(x) + 0.1 * nn.functional.linear(x, self.average)


class Queue(nn.Module):
    """The last features in a list, as MoCo keeps them, from which each pass subtracts the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        mean = torch.stack([entry.mean(dim=0) for entry in self.queue]).mean(dim=0) if self.queue else 0.0
        self.queue = [*self.queue[-3:], x.detach()]
        return x - mean


class Centered(nn.Module):
    """A running mean of features as a plain attribute, neither parameter nor buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.center = torch.zeros(width)

    def forward(self, x: Tensor) -> Tensor:
        self.center = self.center.lerp(x.detach().float().mean(dim=0), 0.1)
        return x - self.center


class Recurrent(nn.Module):
    """An LSTM over the rows of an image that begins with the state in which the last batch ended."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 10)
        self.state: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        start = None
        if self.state is not None:
            start = tuple(s.mean(dim=1, keepdim=True).repeat(1, len(x), 1) for s in self.state)
        outputs, last = self.lstm(x.squeeze(1), start)
        self.state = tuple(s.detach() for s in last)
        return self.head(outputs[:, -1])


class Noise(nn.Module):
    """Noise in every forward pass from generators that the module holds: of torch, NumPy and Python."""

    def __init__(self) -> None:
        super().__init__()
        self.torch_generator = torch.Generator().manual_seed(0)
        self.numpy_generator = np.random.default_rng(0)
        self.python_generator = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        shift = 0.01 * self.numpy_generator.standard_normal() + 0.01 * self.python_generator.random()
        return x + 0.01 * torch.randn(x.shape, generator=self.torch_generator) + shift


GENERATOR = torch.Generator()
RANDOM = {"numpy": np.random.default_rng(0)}
NETWORKS_IN_USE: list[nn.Module] = []
CALLS: list[int] = []
NUMBER = 0


def _draw() -> float:
    return RANDOM["numpy"].standard_normal()


class SharedNoise(nn.Module):
    """Noise from generators of the file, directly and through a function, and of the class."""

    generator = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        shift = 0.01 * _draw() + 0.01 * self.generator.random()
        return x + 0.01 * torch.randn(x.shape, generator=GENERATOR) + shift


def shared_noise() -> nn.Sequential:
    """Noise from generators that the module does not hold, seeded anew."""
    GENERATOR.manual_seed(0)
    RANDOM["numpy"] = np.random.default_rng(0)
    SharedNoise.generator.seed(0)
    return perceptron(SharedNoise())


class InGlobal(nn.Module):
    """Runs networks of a list of the file."""

    def forward(self, x: Tensor) -> Tensor:
        return sum(network(x) for network in NETWORKS_IN_USE)


class InList(nn.Module):
    """Runs networks of a list, which are not its children."""

    def __init__(self, networks: list[nn.Module]) -> None:
        super().__init__()
        self.networks, self.scale = networks, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * sum(network(x) for network in self.networks)


class Remembering(nn.Module):
    """Changes something in each pass: what, is given as a callable."""

    rows: list[int] = []  # noqa: RUF012
    count = 0

    def __init__(self, state: Any, change: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.state, self.change = nn.Linear(4, 3), state, change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x.detach())
        return self.layer(x)


class InClass(Remembering):
    """Changes attributes of its class."""

    def forward(self, x: Tensor) -> Tensor:
        type(self).count += 1
        self.rows.append(1)
        return super().forward(x)


class InFile(Remembering):
    """Changes variables of the file."""

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(1)
        _count()
        return super().forward(x)


def _count() -> None:
    global NUMBER
    NUMBER += 1


def _in_closure() -> nn.Module:
    rows: list[int] = []

    class InClosure(Remembering):
        def forward(self, x: Tensor) -> Tensor:
            rows.append(1)
            return super().forward(x)

    return InClosure(None, _nothing)


def _nothing(module: nn.Module, x: Tensor) -> None:
    pass


class Notes:
    """An object that is no module."""

    count = 0


def _long_list(module: Any, x: Tensor) -> None:
    module.state[10_500] += 1


# What a pass changes for good, and the ends of the names to expect
LEAKS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a parameter with gradient, written in place": (
        lambda: Remembering(None, lambda module, x: module.layer.weight.data.mul_(0.9)),
        ["layer.weight"],
    ),
    "an object": (lambda: Remembering(Notes(), lambda m, x: setattr(m.state, "count", m.state.count + 1)), ["count"]),
    "a long list": (lambda: Remembering([0] * 20_000, _long_list), ["state"]),
    "attributes of the class": (lambda: InClass(None, _nothing), ["count", "rows"]),
    "variables of the file, also through a function": (lambda: InFile(None, _nothing), ["CALLS", "NUMBER"]),
    "a variable of a closure": (_in_closure, ["rows"]),
}


class Edges(nn.Module):
    """Magnitude of the gradient of an image, whose derivative is infinite where the image is flat."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        kernel = torch.tensor([[1.0, 0.0, -1.0], [2.0, 0.0, -2.0], [1.0, 0.0, -1.0]]) / 4
        self.register_buffer("kernels", torch.stack([kernel, kernel.T]).unsqueeze(1))

    def forward(self, x: Tensor) -> Tensor:
        return (nn.functional.conv2d(x, self.kernels, padding=1).square().sum(1, keepdim=True) + self.epsilon).sqrt()


class Scaled(nn.Sequential):
    """Scales pixels from 0 to 255 itself, whatever their type."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float() / 255)


class InPlace(Classifier):
    """Prepares inputs in place in validation."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        batch[0].sub_(0.3).div_(0.2)
        super().validation_step(batch, batch_idx)


class Recomputed(nn.Module):
    """A block whose activations are computed again in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class Attention(nn.Module):
    """A transformer encoder over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x.squeeze(1)).mean(dim=1))


def perceptron(*parts: nn.Module, head: nn.Module | None = None) -> nn.Sequential:
    """Two layers, with parts in between."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), *parts, nn.ReLU(), head or nn.Linear(32, 10))


def convolutional() -> nn.Sequential:
    """Convolution, BatchNorm and dropout."""
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(0.3), nn.Linear(128, 10))


def normalized() -> nn.Sequential:
    """Spectral and weight normalisation."""
    hidden = parametrizations.spectral_norm(nn.Linear(32, 32))
    return perceptron(hidden, head=parametrizations.weight_norm(nn.Linear(32, 10)))


def frozen() -> nn.Sequential:
    """A backbone without gradients, with its BatchNorm in eval mode whatever the rest does."""
    network = convolutional()
    network[:3].requires_grad_(False)
    network[1].train = lambda mode=True: network[1]  # type: ignore[method-assign]
    network[1].training = False
    return network


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "plain": perceptron,
    "dropout and BatchNorm": convolutional,
    "recomputed activations": lambda: perceptron(Recomputed(nn.Sequential(nn.GroupNorm(4, 32), nn.GELU()))),
    "frozen backbone": frozen,
    "spectral and weight normalisation": normalized,
    "lazy layers": lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(32), nn.ReLU(), nn.LazyLinear(10)),
    "transformer with dropout": Attention,
    "moving average of weights in `forward`": lambda: perceptron(head=Averaged(32, 10)),
    "queue of features (MoCo)": lambda: perceptron(Queue()),
    "running mean as a plain attribute": lambda: perceptron(Centered(32)),
    "LSTM that keeps its state": Recurrent,
    "generators held by the module": lambda: perceptron(Noise()),
    "generators of the file and the class": shared_noise,
}
