"""Train one network in five ways and compare how robust it gets: natural, PGD, fast, TRADES and attack-free.

Draws all curves in ``adversarial_training.png`` and logs them to one board. Takes about a minute on two cores:
``python examples/adversarial_training.py``. ``--data DIRECTORY`` uses part of Fashion-MNIST instead of digits, from a
directory with its four gzipped idx files; that takes about five minutes.
"""

import argparse
import gzip
import warnings
from pathlib import Path

import lightning as L
import matplotlib.pyplot as plt
import numpy as np
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from quickstart import digits_loaders
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_robustness import (
    AdversarialTraining,
    AttackFreeRegularization,
    RobustModelCheckpoint,
    RobustnessMonitor,
)
from lightning_robustness.losses import trades_loss

LOGS = "lightning_logs/adversarial_training"
# Colours that colour-blind readers can tell apart, and dashes for print
STYLES = {
    "natural": ("#000000", "-"),
    "PGD": ("#0072B2", "-"),
    "fast": ("#56B4E9", "--"),
    "TRADES": ("#D55E00", "-"),
    "attack-free": ("#009E73", "-."),
}
PANELS = {
    "acc": ("accuracy", "higher is better"),
    "adv_acc/pgd": ("accuracy under PGD", "higher is more robust"),
    "rdi": ("RDI", "higher is more robust"),
    "fim": ("Fisher information", "lower is more robust"),
}


class Classifier(L.LightningModule):
    """A convolutional network for grey images of any size; nothing in it concerns robustness."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(8),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


class Trades(Classifier):
    """The same network with TRADES as its loss."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return trades_loss(self, *batch, eps=self.eps, alpha=self.eps / 4, steps=5)


def fashion_mnist_loaders(directory: Path) -> tuple[DataLoader, DataLoader]:
    """Load 6,000 images of Fashion-MNIST, in [0, 1], for training, shuffled, and 1,000 for validation."""

    def read(name: str, offset: int) -> np.ndarray:
        return np.frombuffer(gzip.decompress((directory / name).read_bytes()), np.uint8, offset=offset)

    def dataset(name: str, number: int) -> TensorDataset:
        images = read(f"{name}-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28)[:number]
        labels = read(f"{name}-labels-idx1-ubyte.gz", 8)[:number]
        return TensorDataset(torch.tensor(images / 255, dtype=torch.float32), torch.tensor(labels, dtype=torch.long))

    return DataLoader(dataset("train", 6000), batch_size=64, shuffle=True), DataLoader(dataset("t10k", 1000), 128)


def train(
    name: str, model: L.LightningModule, callbacks: list[L.Callback], loaders: list[DataLoader], epochs: int, eps: float
) -> list[dict[str, float]]:
    """Train a version of the network, keep its most robust checkpoint, and return the monitor's history."""
    monitor = RobustnessMonitor(
        attacks=("pgd",), eps=eps, attack_every_n_epochs=2, fim_samples=512, attack_samples=256, log_figures=False
    )
    trainer = L.Trainer(
        max_epochs=epochs,
        callbacks=[*callbacks, monitor, RobustModelCheckpoint("robustness/adv_acc/pgd")],
        logger=TensorBoardLogger(LOGS, name="", version=name),
        num_sanity_val_steps=0,
        enable_model_summary=False,
        log_every_n_steps=10,
    )
    trainer.fit(model, *loaders)
    return monitor.history


def draw(histories: dict[str, list[dict[str, float]]], title: str, path: str) -> None:
    """Draw the histories of all versions."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 6.5), sharex=True, layout="constrained")
    for axis, (key, (label, direction)) in zip(axes.flat, PANELS.items(), strict=True):
        for name, history in histories.items():
            color, dashes = STYLES[name]
            rows = [(row["epoch"] + 1, row[key]) for row in history if key in row]
            axis.plot(*zip(*rows, strict=True), dashes, color=color, label=name, linewidth=1.8)
        axis.set_title(f"{label} ({direction})", fontsize=10)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(bottom=0.0 if key == "fim" else None)
    for axis in axes[1]:
        axis.set_xlabel("epochs")
    figure.suptitle(title)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(STYLES), frameon=False)
    figure.savefig(path, dpi=200)


def main() -> None:
    """Train all versions, and print and draw the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--data", type=Path, help="directory with Fashion-MNIST's idx files")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data is in memory

    eps = 0.15 if arguments.data is None else 0.1
    versions = {
        "natural": (Classifier, []),
        "PGD": (Classifier, [AdversarialTraining("pgd", eps=eps, steps=5)]),
        "fast": (Classifier, [AdversarialTraining("fast", eps=eps)]),
        "TRADES": (lambda: Trades(eps), []),
        "attack-free": (Classifier, [AttackFreeRegularization(rdi_weight=0.1, fisher_weight=0.2)]),
    }
    histories = {}
    for name, (make_model, callbacks) in versions.items():
        L.seed_everything(0)
        loaders = digits_loaders() if arguments.data is None else fashion_mnist_loaders(arguments.data)
        histories[name] = train(name, make_model(), callbacks, loaders, arguments.epochs, eps)

    print("\nversion      accuracy  under PGD     RDI  Fisher information      (after the last epoch)")
    for name, history in histories.items():
        last = history[-1]
        print(f"{name:11s}  {last['acc']:8.3f}  {last['adv_acc/pgd']:9.3f}  {last['rdi']:6.3f}  {last['fim']:18.3f}")
    data = "digits" if arguments.data is None else "Fashion-MNIST"
    draw(histories, f"One network, five ways to train it: {data}, eps {eps}", "adversarial_training.png")
    print(f"\nThe curves are in adversarial_training.png. All runs on one board:  tensorboard --logdir {LOGS}")


if __name__ == "__main__":
    main()
