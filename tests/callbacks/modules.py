"""LightningModules, loaders and Trainers for the tests of callbacks."""

import random

import lightning as L
import numpy as np
import torch
from jsonargparse import ArgumentParser
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


def digits_data(start, stop):
    data = load_digits()
    images = torch.tensor(data.images / 16, dtype=torch.float32).unsqueeze(1)
    return TensorDataset(images[start:stop], torch.tensor(data.target)[start:stop])


class Augmented(Dataset):
    """Data with noise from every random number generator; remembers what was asked for."""

    def __init__(self, data):
        self.data, self.order = data, []

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.order.append(index)
        x, y = self.data[index]
        noise = 0.1 * torch.rand_like(x) + 0.1 * np.random.rand() + 0.1 * random.random()
        return (x + noise).clamp(0, 1), y


class Classifier(L.LightningModule):
    """A network with everything that watching could disturb: dropout, batch normalisation, frozen and not."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(128, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Linear(32, num_classes),
        )
        self.seen = []

    def on_train_batch_start(self, batch, batch_idx):
        self.net[7].eval()  # frozen
        self.seen.append(batch[0].sum().item())

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_acc", (self(batch[0]).argmax(dim=1) == batch[1]).float().mean())

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)]


def train_loader(batch_size=32, size=320, **kwargs):
    return DataLoader(digits_data(0, size), batch_size=batch_size, shuffle=True, **kwargs)


def val_loader(batch_size=32, size=101, **kwargs):
    return DataLoader(digits_data(1200, 1200 + size), batch_size=batch_size, **kwargs)


def make_trainer(path, *callbacks, **kwargs):
    defaults = {
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "log_every_n_steps": 1,
    }
    return L.Trainer(callbacks=list(callbacks), default_root_dir=path, **{**defaults, **kwargs})


class Scripted(L.Callback):
    """Logs given values in the validation epochs that have one; a list has one for every epoch."""

    def __init__(self, **values):
        self.values = {key: dict(enumerate(v)) if isinstance(v, list) else v for key, v in values.items()}

    def keys_under(self, trainer):
        return list(self.values)

    def on_validation_epoch_end(self, trainer, pl_module):
        for key, values in self.values.items():
            if trainer.current_epoch in values and not trainer.sanity_checking:
                pl_module.log(key, values[trainer.current_epoch])


def from_yaml(kind, **arguments):
    """Make a callback as LightningCLI does, from what YAML can say."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(kind, "callback")
    config = parser.parse_object({"callback": {"class_path": kind.__name__, "init_args": arguments}})
    return getattr(parser, "instantiate", parser.instantiate_classes)(config).callback
