"""Models and data that a command line can name."""

import enum
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUMBER = 3


class Net(nn.Module):
    def __init__(self, width=4, num_classes=3):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, width), nn.ReLU())
        self.head = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.head(self.body(x))


class Raising(Net):
    """A network without gradients."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        if x.requires_grad:
            raise self.error
        return super().forward(x)


class NeedsArgument(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.head = nn.Linear(width, 2)


class Anything(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.arguments = kwargs


class Data:
    """What a data module is to the command."""

    def __init__(self, number=40, dtype="float32"):
        self.number = number
        self.dtype = dtype
        self.stages = []

    def prepare_data(self):
        self.stages.append("prepare")

    def setup(self, stage):
        self.stages.append(stage)

    def _loader(self, number):
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(number, 2, generator=generator)
        y = (x[:, 0] > 0.5).long() + (x[:, 1] > 0.5).long()
        x = x if self.dtype == "float32" else (255 * x).to(getattr(torch, self.dtype))
        return DataLoader(TensorDataset(x, y), batch_size=16)

    def test_dataloader(self):
        self.stages.append("test_dataloader")
        return self._loader(self.number)

    def val_dataloader(self):
        return self._loader(self.number // 2)


class Whole(Net):
    """Takes pixels in bytes."""

    def forward(self, x):
        return super().forward(x / 255)


make_whole = partial(Whole, width=4)
make_net = partial(Net, width=5)
make_interrupted = partial(Raising, KeyboardInterrupt())
make_fragile = partial(Raising, RuntimeError("out of order"))


def make_loader(number=8):
    return Data()._loader(number)


def make_two_loaders():
    return [make_loader(), make_loader()]


def make_unlabelled_loader():
    return DataLoader(TensorDataset(torch.rand(8, 2)))


def make_nothing():
    return None


class Activation(enum.Enum):
    RELU = "relu"
    TANH = "tanh"


@dataclass
class Sizes:
    width: int = 4


class Described(L.LightningModule):
    """Has hyper-parameters that are objects."""

    def __init__(
        self,
        sizes: Sizes | None = None,
        activation: Activation = Activation.RELU,
        layer: type = nn.Linear,
        loss: nn.Module | None = None,
        folder: Path | None = None,
        optimizer: Any = None,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.network = Net((sizes or Sizes()).width)


class Composed(L.LightningModule):
    """Gets its network from a configuration."""

    def __init__(self, network: nn.Module, scale: float = 1.0):
        super().__init__()
        self.save_hyperparameters()
        self.network, self.scale = network, scale

    def forward(self, x):
        return self.network(self.scale * x)

    def training_step(self, batch):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ValidationData(L.LightningDataModule):
    """Has no test loader."""

    def __init__(self, number: int = 40):
        super().__init__()
        self.number = number

    def train_dataloader(self):
        return Data()._loader(self.number)

    def val_dataloader(self):
        return Data()._loader(self.number)


class NoData(L.LightningDataModule):
    """Has no loader at all."""


def run_command(command):
    """Not a class: what a checkpoint must not call."""
    raise AssertionError(command)


def swap(batch):
    return batch[0].flip(1), batch[1]


def double(model, x):
    return model(2 * x)


def halve(model, x):
    return 0.5 * x
