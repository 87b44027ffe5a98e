"""Watch robust overfitting happen, stop it, and keep the epoch before it.

Adversarial training that goes on for long learns its images by heart: accuracy under attack rises on new images, and
falls again, while clean accuracy stays. On data as small as digits this takes some labels that are wrong, here every
sixth, to be learnt by heart. Writes ``robust_overfitting.png``, and takes about a minute on two cores:
``python examples/robust_overfitting.py``.
"""

import argparse
import warnings

import lightning as L
import torch
from matplotlib.figure import Figure
from quickstart import DigitsClassifier, digits_loaders
from torch.utils.data import DataLoader, TensorDataset

from lightning_robustness import AdversarialTraining, RobustEarlyStopping, RobustModelCheckpoint, RobustnessMonitor

EPS = 0.1


def few_images(dataset: torch.utils.data.Dataset, number: int) -> TensorDataset:
    """The first images, every sixth of which has a wrong label."""
    images, labels = (torch.stack(part) for part in zip(*(dataset[index] for index in range(number)), strict=True))
    labels[::6] = (labels[::6] + 1) % 10
    return TensorDataset(images, labels)


def train(epochs: int, num_images: int, patience: int | None) -> tuple[RobustnessMonitor, RobustModelCheckpoint]:
    """Train on a few images, to the end or until accuracy under attack falls."""
    L.seed_everything(0)
    train_loader, validation_loader = digits_loaders()
    few = DataLoader(few_images(train_loader.dataset, num_images), batch_size=32, shuffle=True)
    monitor = RobustnessMonitor(attacks=("pgd",), eps=EPS, fim_samples=0, log_figures=False)
    checkpoint = RobustModelCheckpoint("robustness/adv_acc/pgd")
    stopping = [] if patience is None else [RobustEarlyStopping("robustness/adv_acc/pgd", patience=patience)]
    trainer = L.Trainer(
        max_epochs=epochs,
        callbacks=[AdversarialTraining(eps=EPS, steps=5), monitor, checkpoint, *stopping],
        enable_model_summary=False,
        enable_progress_bar=False,
        log_every_n_steps=1,
    )
    trainer.fit(DigitsClassifier(learning_rate=4e-3), few, validation_loader)
    return monitor, checkpoint


def draw(history: list[dict[str, float]], stopped: int, kept: int, path: str) -> None:
    """Draw accuracy, clean and under attack, and where training was stopped."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    epochs = [row["epoch"] for row in history]
    axis.plot(epochs, [row["acc"] for row in history], color="0.5", label="clean accuracy")
    axis.plot(epochs, [row["adv_acc/pgd"] for row in history], color="#D55E00", label="accuracy under PGD")
    axis.axvline(kept, color="#0072B2", label=f"kept: epoch {kept}")
    axis.axvline(stopped, color="#0072B2", linestyle="--", label=f"stopped: epoch {stopped}")
    axis.set(xlabel="epoch", ylabel="accuracy")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train to the end and with a stop, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--images", type=int, default=200, help="number of images to train on")
    parser.add_argument("--patience", type=int, default=10)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data is in memory

    whole, _ = train(arguments.epochs, arguments.images, patience=None)
    stopped, checkpoint = train(arguments.epochs, arguments.images, arguments.patience)
    kept = torch.load(checkpoint.best_model_path, weights_only=False)["epoch"]

    best, last = whole.summary(), whole.history[-1]
    print(f"\nTo the end: accuracy under PGD {best.accuracy:.3f} in epoch {best.epoch}, ", end="")
    print(f"{last['adv_acc/pgd']:.3f} in epoch {last['epoch']}, the last; clean accuracy {last['acc']:.3f}.")
    end = stopped.history[-1]["epoch"]
    print(f"With RobustEarlyStopping: stopped after epoch {end}. RobustModelCheckpoint kept epoch {kept}: ", end="")
    print(f"accuracy under PGD {checkpoint.best_model_score:.3f}.")
    draw(whole.history, end, kept, "robust_overfitting.png")
    print("The curves are in robust_overfitting.png.")


if __name__ == "__main__":
    main()
