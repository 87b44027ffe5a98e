"""Fine-tune a Vision Transformer of Hugging Face on a folder of images, and watch how robust it is. Meant for a GPU.

``python examples/huggingface_vit.py --data DIRECTORY``, with the folders ``train/CLASS`` and ``validation/CLASS``,
needs ``pip install transformers datasets``. ``--tiny`` takes seconds: a small untrained model, on random images.
"""

import argparse

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from lightning_robustness import InputSpace, RobustModelCheckpoint, RobustnessMonitor


class Classifier(L.LightningModule):
    """A model that takes ``pixel_values`` and ``labels``; the monitor finds both in the batch, and the logits."""

    def __init__(self, model: ViTForImageClassification) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> object:
        return self.model(pixel_values=pixel_values, labels=labels)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return self(**batch).loss

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        self.log("val_loss", self(**batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-5)


def image_folder(directory: str, processor: ViTImageProcessor) -> tuple[object, object]:
    """Training and validation images of a folder, as the processor prepares them."""
    from datasets import load_dataset

    def prepare(rows: dict[str, list]) -> dict[str, object]:
        pixels = processor([image.convert("RGB") for image in rows["image"]], return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels, "labels": rows["label"]}

    data = load_dataset("imagefolder", data_dir=directory).with_transform(prepare)
    return data["train"], data["validation"]


def main() -> None:
    """Fine-tune, and say what was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="directory with the folders train/CLASS and validation/CLASS")
    parser.add_argument("--model", default="google/vit-base-patch16-224-in21k", help="name on the hub, or directory")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="a small untrained model, random images")
    arguments = parser.parse_args()
    if arguments.tiny:
        size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        model = ViTForImageClassification(ViTConfig(**size, image_size=32, patch_size=8, num_labels=arguments.classes))
        space = InputSpace(mean=0.5, std=0.5)
        pixels = space.normalize(torch.rand(40, 3, 32, 32))
        train = validation = [{"pixel_values": image, "labels": index % 10} for index, image in enumerate(pixels)]
    else:
        model = ViTForImageClassification.from_pretrained(arguments.model, num_labels=arguments.classes)
        processor = ViTImageProcessor.from_pretrained(arguments.model)
        space = InputSpace(mean=processor.image_mean, std=processor.image_std)
        train, validation = image_folder(arguments.data, processor)

    sizes = {"attacks": ("pgd",), "attack_samples": 8, "fim_samples": 8} if arguments.tiny else {}
    checkpoint = RobustModelCheckpoint("robustness/adv_acc/pgd")
    monitor = RobustnessMonitor(eps=2 / 255, input_space=space, **sizes)
    trainer = L.Trainer(max_epochs=1 if arguments.tiny else 3, callbacks=[monitor, checkpoint])
    trainer.fit(Classifier(model), DataLoader(train, 32, shuffle=True), DataLoader(validation, 32))
    print(f"\nThe most robust epoch is in {checkpoint.best_model_path}")


if __name__ == "__main__":
    main()
