"""Watch robust overfitting happen, stop it, and keep the epoch before it.

Adversarial training that runs for too long memorises its images: accuracy under attack on new images rises, and then
falls again, while clean accuracy stays. On data as small as digits this needs some wrong labels to memorise, here every
sixth. Writes ``robust_overfitting.png``, and takes about a minute on two cores:
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


def draw(whole: RobustnessMonitor, stopped: RobustnessMonitor, path: str) -> None:
    """Draw the run to its end, the epoch that was kept with its interval, and where training would have stopped."""
    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axis = figure.subplots()
    rows, end, kept = whole.history, stopped.history[-1]["epoch"], stopped.summary()
    epochs, last = [row["epoch"] for row in rows], rows[-1]
    low, high = ([row[f"adv_acc_{name}/pgd"] for row in rows] for name in ("low", "high"))
    axis.plot(epochs, [row["acc"] for row in rows], color="0.6", linewidth=1.2)
    axis.plot(epochs, [row["adv_acc/pgd"] for row in rows], color="#D55E00", linewidth=1.8)
    axis.fill_between(epochs, low, high, color="#D55E00", alpha=0.12, linewidth=0)
    axis.axvspan(end, last["epoch"], color="0.5", alpha=0.08, linewidth=0)

    bottom, top = kept.interval
    bars = [[kept.accuracy - bottom], [top - kept.accuracy]]
    axis.errorbar([kept.epoch], [kept.accuracy], bars, color="#0072B2", marker="o", capsize=4, linewidth=2, zorder=3)
    note = (
        f"kept: epoch {kept.epoch}, {100 * kept.accuracy:.1f} %\n95 % interval {100 * bottom:.0f} to {100 * top:.0f} %"
    )
    axis.text(kept.epoch, 0.4, note, color="#0072B2", weight="bold", ha="center", va="top")
    for name, key, color in (("clean accuracy", "acc", "0.4"), ("accuracy under PGD", "adv_acc/pgd", "#D55E00")):
        note = f"{name}\n{100 * last[key]:.1f} % at the end"
        axis.text(1.02 * last["epoch"], last[key], note, color=color, va="center")
    axis.text(end, 0.03, f" stopped after epoch {end}", color="0.4")
    axis.set(xlabel="epoch", xlim=(0, last["epoch"]), ylim=(0, 1), yticks=[0, 0.25, 0.5, 0.75, 1])
    axis.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=240)


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

    best, last = max(whole.history, key=lambda entry: entry["adv_acc/pgd"]), whole.history[-1]
    print(f"\nTo the end: accuracy under PGD {best['adv_acc/pgd']:.3f} in epoch {best['epoch']}, ", end="")
    print(f"{last['adv_acc/pgd']:.3f} in epoch {last['epoch']}, the last; clean accuracy {last['acc']:.3f}.")
    end = stopped.history[-1]["epoch"]
    print(f"With RobustEarlyStopping: stopped after epoch {end}. RobustModelCheckpoint kept epoch {kept}: ", end="")
    print(f"accuracy under PGD {checkpoint.best_model_score:.3f}; ", end="")
    print(f"{stopped.summary().accuracy:.3f}, corrected for the choice.")
    draw(whole, stopped, "robust_overfitting.png")
    print("The curves are in robust_overfitting.png.")


if __name__ == "__main__":
    main()
