"""Adversarial training of a ResNet-18 on CIFAR-10, with the most robust epoch kept. Meant for a GPU.

``python examples/cifar10_resnet18.py --data DIRECTORY`` reads the data set's Python version, ``data_batch_1`` to
``data_batch_5`` and ``test_batch``; without ``--data``, torchvision downloads it. ``--tiny`` takes seconds: one epoch
of a narrow network on random images.
"""

import argparse
from pathlib import Path

import lightning as L
import torch
from cifar10_data import SPACE, cifar10, random_images
from resnet18 import resnet18
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_robustness import AdversarialTraining, RobustModelCheckpoint, RobustnessMonitor


class Classifier(L.LightningModule):
    """A ResNet-18 with the usual augmentation and schedule; nothing in it concerns robustness."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = resnet18(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def on_after_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
        if not self.trainer.training:
            return batch
        x = nn.functional.pad(batch[0], (4, 4, 4, 4), mode="reflect")
        row, column = torch.randint(9, (2,)).tolist()  # one crop per batch, and a flip per image
        x = x[:, :, row : row + 32, column : column + 32]
        return [torch.where(torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5, x, x.flip(3)), batch[1]]

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    """Train, and say what was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="directory of the data set's Python version")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--tiny", action="store_true", help="one epoch of a narrow network on random images")
    arguments = parser.parse_args()
    L.seed_everything(0)
    train, validation = random_images() if arguments.tiny else cifar10(arguments.data)

    sizes = {"attacks": ("pgd",), "attack_samples": 8, "fim_samples": 8} if arguments.tiny else {}
    checkpoint = RobustModelCheckpoint("robustness/adv_acc/pgd")
    monitor = RobustnessMonitor(eps=8 / 255, input_space=SPACE, **sizes)
    training = AdversarialTraining("pgd", eps=8 / 255, steps=7, alpha=2 / 255, input_space=SPACE)
    trainer = L.Trainer(max_epochs=1 if arguments.tiny else arguments.epochs, callbacks=[training, monitor, checkpoint])
    loaders = DataLoader(train, batch_size=128, shuffle=True), DataLoader(validation, batch_size=256)
    trainer.fit(Classifier(width=4 if arguments.tiny else 64), *loaders)
    print(f"\nThe most robust epoch is in {checkpoint.best_model_path}")


if __name__ == "__main__":
    main()
