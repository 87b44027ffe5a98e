"""Train a small network on scikit-learn's digits and watch how robust it is, epoch by epoch.

Takes about half a minute on two cores: ``python examples/quickstart.py``.
"""

import argparse
import warnings

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_robustness import RobustnessMonitor


class DigitsClassifier(L.LightningModule):
    """A convolutional network in plain Lightning: nothing in it concerns the monitor."""

    def __init__(self, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.network = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        self.log("val_loss", nn.functional.cross_entropy(self(images), labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


def digits_loaders() -> tuple[DataLoader, DataLoader]:
    """Load digits as images in [0, 1]: 1,200 for training, shuffled, and 597 for validation."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    dataset = TensorDataset(images, torch.tensor(digits.target))
    train, validation = random_split(dataset, [1200, 597], torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size=32, shuffle=True), DataLoader(validation, batch_size=128)


def print_table(history: list[dict[str, float]]) -> None:
    """Print one line per epoch; attacks do not run in every epoch."""
    columns = {
        "accuracy": "acc",
        "RDI": "rdi",
        "ROBY": "roby",
        "Fisher": "fim",
        "PGD": "adv_acc/pgd",
        "Square": "adv_acc/square",
        "C&W": "adv_acc/cw",
        "worst": "adv_acc/worst",
        "distance": "distortion/cw",
    }
    print("epoch  " + "  ".join(f"{title:>8}" for title in columns))
    for row in history:
        cells = (f"{row[key]:.3f}" if key in row else "-" for key in columns.values())
        print(f"{row['epoch']:5d}  " + "  ".join(f"{cell:>8}" for cell in cells))
    print(
        "PGD, Square, C&W, worst: accuracy under each attack and the worst of all; C&W counts up to an l2 size of 0.2."
    )
    print("distance: median l2 size that C&W needs. More robust: ROBY and Fisher lower, everything else higher.")


def main() -> None:
    """Train, and show the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    epochs = parser.parse_args().epochs
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data is in memory
    L.seed_everything(0)

    # This line, and `callbacks=[monitor]` below, are all it takes
    monitor = RobustnessMonitor(eps=0.1, log_combined=True)

    trainer = L.Trainer(max_epochs=epochs, callbacks=[monitor], enable_model_summary=False, log_every_n_steps=10)
    trainer.fit(DigitsClassifier(), *digits_loaders())

    print()
    print_table(monitor.history)
    monitor.plot().savefig("robustness.png", dpi=400)
    print("\nThe curves are in robustness.png. For everything else:  tensorboard --logdir lightning_logs")


if __name__ == "__main__":
    main()
