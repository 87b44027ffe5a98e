"""Fine-tune a timm model on a folder of images, adversarially, and watch how robust it gets. Meant for a GPU.

``python examples/timm_model.py --data DIRECTORY``, with the folders ``train/CLASS`` and ``validation/CLASS``. Needs
``pip install timm``. ``--tiny`` takes seconds: a small untrained network, on random images.
"""

import argparse

import lightning as L
import timm
import torch
from timm.data import create_dataset, create_transform, resolve_model_data_config
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_robustness import AdversarialTraining, InputSpace, RobustModelCheckpoint, RobustnessMonitor


class Classifier(L.LightningModule):
    """Any timm model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def main() -> None:
    """Fine-tune, and say what was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="directory with the folders train/CLASS and validation/CLASS")
    parser.add_argument("--model", default="resnet50", help="name of a timm model")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="a small untrained network, random images")
    arguments = parser.parse_args()
    L.seed_everything(0)

    name = "test_resnet" if arguments.tiny else arguments.model
    model = timm.create_model(name, pretrained=not arguments.tiny, num_classes=arguments.classes)
    config = resolve_model_data_config(model)
    space = InputSpace(mean=config["mean"], std=config["std"])  # which create_transform applies
    if arguments.tiny:
        images = space.normalize(torch.rand(40, 3, 64, 64))
        train: Dataset = TensorDataset(images, torch.arange(40) % arguments.classes)
        validation = train
    else:
        augmented, plain = (create_transform(**config, is_training=training) for training in (True, False))
        train = create_dataset("", arguments.data, split="train", transform=augmented)
        validation = create_dataset("", arguments.data, split="validation", transform=plain)

    sizes = {"attacks": ("pgd",), "attack_samples": 8, "fim_samples": 8} if arguments.tiny else {}
    checkpoint = RobustModelCheckpoint("robustness/adv_acc/pgd")
    monitor = RobustnessMonitor(eps=4 / 255, input_space=space, **sizes)
    training = AdversarialTraining("fast", eps=4 / 255, input_space=space)
    epochs = 1 if arguments.tiny else arguments.epochs
    trainer = L.Trainer(max_epochs=epochs, callbacks=[training, monitor, checkpoint])
    trainer.fit(Classifier(model), DataLoader(train, 32, shuffle=True), DataLoader(validation, 64))
    print(f"\nThe most robust epoch is in {checkpoint.best_model_path}")


if __name__ == "__main__":
    main()
