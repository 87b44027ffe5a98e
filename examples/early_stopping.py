"""Stop a training run on RDI, confirmed by accuracy under PGD, and keep the epoch that is most robust against PGD.

Takes about half a minute on two cores: ``python examples/early_stopping.py``. ``robust_overfitting.py`` has a run that
has to be stopped.
"""

import argparse
import warnings

import lightning as L
from quickstart import DigitsClassifier, digits_loaders

from lightning_robustness import AdversarialTraining, RobustEarlyStopping, RobustModelCheckpoint, RobustnessMonitor


def main() -> None:
    """Train, say why training ended, and look at the best checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=60, help="most epochs that training may take")
    parser.add_argument("--patience", type=int, default=4)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data is in memory
    L.seed_everything(0)

    monitor = RobustnessMonitor(attacks=("pgd",), eps=0.1)
    # Waits until accuracy under PGD has stopped improving too: RDI is often highest in the first epoch
    stopping = RobustEarlyStopping("robustness/rdi", patience=arguments.patience)
    checkpoint = RobustModelCheckpoint("robustness/adv_acc/pgd")

    trainer = L.Trainer(
        max_epochs=arguments.epochs,
        callbacks=[AdversarialTraining(eps=0.1, steps=5), monitor, stopping, checkpoint],
        enable_model_summary=False,
        log_every_n_steps=10,
    )
    model, (train_loader, validation_loader) = DigitsClassifier(learning_rate=4e-3), digits_loaders()
    trainer.fit(model, train_loader, validation_loader)

    print("\nepoch  accuracy    RDI  accuracy under PGD")
    for row in monitor.history:
        print(f"{row['epoch']:5d}  {row['acc']:8.3f}  {row['rdi']:5.3f}  {row['adv_acc/pgd']:18.3f}")
    if stopping.stopped_epoch:
        print(f"Stopped after epoch {stopping.stopped_epoch}: neither RDI nor accuracy under PGD improved any more.")
    else:
        print(f"Took all {arguments.epochs} epochs: RDI and accuracy under PGD did not stop it.")
    print(f"\n{monitor.summary()}")

    [values] = trainer.validate(model, validation_loader, ckpt_path="best", verbose=False)
    print(f"\nThe best checkpoint, {checkpoint.best_model_path}:")
    for name in ("acc", "rdi", "adv_acc/pgd"):
        print(f"  {name:12s} {values[f'robustness/{name}']:.3f}")


if __name__ == "__main__":
    main()
