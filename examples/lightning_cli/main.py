"""Configure everything from a YAML file with LightningCLI, the monitor included.

LightningCLI needs one more package, which the extra ``cli`` brings: ``pip install "jsonargparse[signatures]"``. Takes
about half a minute on two cores:

``python examples/lightning_cli/main.py fit --config examples/lightning_cli/config.yaml``

Any value can be changed on the command line, for instance with ``--trainer.max_epochs 20``. ``fit --print_config``
shows all values, and ``fit --help`` all options.
"""

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

MEAN, STD = 0.3, 0.4


class DigitsClassifier(L.LightningModule):
    """A network with one hidden layer.

    Args:
        width: Number of hidden units.
        learning_rate: Step size of Adam.

    """

    def __init__(self, width: int = 128, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        self.log("val_loss", nn.functional.cross_entropy(self(images), labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams["learning_rate"])


class Digits(L.LightningDataModule):
    """scikit-learn's digits, normalised.

    Args:
        batch_size: Number of images in a batch.

    """

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = (torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1) - MEAN) / STD
        dataset = TensorDataset(images, torch.tensor(digits.target))
        self.parts: list[Subset] = random_split(dataset, [1200, 597], torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.parts[0], batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.parts[1], batch_size=self.batch_size)


if __name__ == "__main__":
    LightningCLI(DigitsClassifier, Digits)
