"""Train against an attack until RDI, which needs none, stops rising, and keep the checkpoint with the highest RDI.

Takes about half a minute on two cores: ``python examples/early_stopping.py``.
"""

import argparse
import warnings

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from quickstart import DigitsClassifier, digits_loaders

from lightning_robustness import AdversarialTraining, RobustnessMonitor


def main() -> None:
    """Train, say why training ended, and validate the best checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=60, help="maximum number of epochs")
    parser.add_argument("--patience", type=int, default=4)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data is in memory
    L.seed_everything(0)

    monitor = RobustnessMonitor(attacks=("pgd",), eps=0.1)
    # RDI is logged after every epoch; for metrics of attacks, logged every few epochs, use RobustEarlyStopping
    stopping = EarlyStopping("robustness/rdi", mode="max", patience=arguments.patience)
    checkpoint = ModelCheckpoint(monitor="robustness/rdi", mode="max")

    trainer = L.Trainer(
        max_epochs=arguments.epochs,
        callbacks=[AdversarialTraining(eps=0.1, steps=5), monitor, stopping, checkpoint],
        enable_model_summary=False,
        log_every_n_steps=10,
    )
    model, (train_loader, validation_loader) = DigitsClassifier(learning_rate=4e-3), digits_loaders()
    trainer.fit(model, train_loader, validation_loader)

    curve = [row["rdi"] for row in monitor.history if "rdi" in row]
    print("\nRDI, epoch by epoch: " + " ".join(f"{value:.3f}" for value in curve))
    if stopping.stopped_epoch:
        print(f"Stopped after epoch {stopping.stopped_epoch}: RDI did not rise for {stopping.patience} epochs.")
    else:
        print(f"Ran all {arguments.epochs} epochs: RDI did not stop training.")

    [values] = trainer.validate(model, validation_loader, ckpt_path="best", verbose=False)
    print(f"\nThe best checkpoint, {checkpoint.best_model_path}, is from epoch {curve.index(max(curve))}:")
    for name in ("rdi", "acc", "adv_acc/pgd"):
        print(f"  {name:12s} {values[f'robustness/{name}']:.3f}")


if __name__ == "__main__":
    main()
