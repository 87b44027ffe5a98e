"""Train a small network on scikit-learn's digits and watch RDI and ROBY, epoch by epoch.

Takes about 15 seconds on two cores: ``python examples/quickstart.py``.
"""

import argparse
import warnings

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_robustness.metrics import ROBY, RobustnessDifferenceIndex


class DigitsClassifier(L.LightningModule):
    """A convolutional network whose validation loop feeds the metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 64),
            nn.ReLU(),
        )
        self.head = nn.Linear(64, 10)
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")
        self.rdi = RobustnessDifferenceIndex(num_classes=10)
        self.roby = ROBY(num_classes=10)
        self.history: list[dict[str, float]] = []

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.head(self.body(images)), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        embedding = self.body(images)
        logits = self.head(embedding)
        preds = logits.argmax(dim=1)
        self.accuracy.update(preds, labels)
        self.rdi.update(logits, preds)  # RDI is defined on the logits,
        self.roby.update(embedding, preds)  # ROBY on what enters the head; both on predicted labels

    def on_validation_epoch_end(self) -> None:
        metrics = {"val_acc": self.accuracy, "rdi": self.rdi, "roby": self.roby}
        values = {name: metric.compute() for name, metric in metrics.items()}
        for metric in metrics.values():
            metric.reset()
        self.log_dict(values, prog_bar=True)
        self.history.append({name: value.item() for name, value in values.items()})
        self.print(f"epoch {self.current_epoch}: RDI {values['rdi']:.3f}, ROBY {values['roby']:.3f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def digits_loaders() -> tuple[DataLoader, DataLoader]:
    """Digits as images in [0, 1]: 1,200 to train on, shuffled, and 597 to validate."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    dataset = TensorDataset(images, torch.tensor(digits.target))
    train, validation = torch.utils.data.random_split(dataset, [1200, 597], torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size=32, shuffle=True), DataLoader(validation, batch_size=128)


def main() -> None:
    """Train, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    epochs = parser.parse_args().epochs

    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data is in memory
    L.seed_everything(0)
    model = DigitsClassifier()
    trainer = L.Trainer(max_epochs=epochs, num_sanity_val_steps=0, enable_model_summary=False, log_every_n_steps=10)
    trainer.fit(model, *digits_loaders())

    print("\nepoch  accuracy     RDI    ROBY      (more robust: RDI higher, ROBY lower)")
    for epoch, row in enumerate(model.history):
        print(f"{epoch:5d}  {row['val_acc']:8.3f}  {row['rdi']:6.3f}  {row['roby']:6.3f}")
    print("\nSee the curves:  tensorboard --logdir lightning_logs")


if __name__ == "__main__":
    main()
