from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Trainer

from lightning_robustness.callbacks.trainer_access import num_training_batches
from lightning_robustness.utilities.checks import check_integer


class AttackSchedule:
    """When attacks run: in the first validation epoch, every few epochs, and at the end of training.

    Args:
        names: Names of the attacks.
        every_n_epochs: Number of epochs from one attack to the next.

    Raises:
        ValueError: If the number is not a positive integer.

    """

    def __init__(self, names: Iterable[str], every_n_epochs: int) -> None:
        self.every_n_epochs = check_integer("attack_every_n_epochs", every_n_epochs, minimum=1)
        self._names = list(names)
        self._last_epoch: int | None = None
        self._last_batch: int | None = None

    def due(self, trainer: Trainer) -> list[str]:
        """Return the names of the attacks that run in this validation epoch."""
        if trainer.state.fn != "fit" or self._last_epoch is None or self._is_at_the_end(trainer):
            return self._names
        return self._names if trainer.current_epoch - self._last_epoch >= self.every_n_epochs else []

    def missing(self, trainer: Trainer) -> list[str]:
        """Return the names of the attacks that have not seen the network as it is at the end of training."""
        return [] if self._last_batch == num_training_batches(trainer) else self._names

    def record(self, trainer: Trainer, epoch: int) -> None:
        """Note that attacks have run in this epoch."""
        if trainer.state.fn == "fit":
            self._last_epoch, self._last_batch = epoch, num_training_batches(trainer)

    def reset(self) -> None:
        """Begin anew, for another run."""
        self._last_epoch = self._last_batch = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on as it would have."""
        return {"last_epoch": self._last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._last_epoch = state_dict["last_epoch"]

    @staticmethod
    def _is_at_the_end(trainer: Trainer) -> bool:
        if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
            return True
        is_last_epoch = trainer.max_epochs == trainer.current_epoch + 1
        return is_last_epoch and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
