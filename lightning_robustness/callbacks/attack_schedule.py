from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch import Trainer

from lightning_robustness.callbacks.trainer_access import num_training_batches
from lightning_robustness.utilities.checks import check_integer

# PGD is the cheapest of the default attacks, and what trust is measured by
_DEFAULTS = {"pgd": 1}
_DEFAULT = 5


class AttackSchedule:
    """Decide which attacks run in a validation epoch: all in the first and last one, each every few epochs between.

    Args:
        names: Names of the attacks.
        every_n_epochs: Number of epochs from one run of an attack to the next, for all of them or by name. Attacks
            without a number run every fifth epoch, the one called ``pgd`` in every epoch.

    Attributes:
        every_n_epochs: The number for each attack.

    Raises:
        ValueError: If a number is not a positive integer, or belongs to no attack.

    """

    def __init__(self, names: Iterable[str], every_n_epochs: int | Mapping[str, int] | None = None) -> None:
        names = list(names)
        given = every_n_epochs if isinstance(every_n_epochs, Mapping) else {}
        unknown = [name for name in given if name not in names]
        if unknown:
            raise ValueError(
                f"Expected argument `attack_every_n_epochs` to name attacks of {names} but got {', '.join(unknown)}."
            )
        numbers = {name: _DEFAULTS.get(name, _DEFAULT) for name in names} | dict(given)
        if every_n_epochs is not None and not isinstance(every_n_epochs, Mapping):
            check_integer("attack_every_n_epochs", every_n_epochs, minimum=1)
            numbers = dict.fromkeys(names, every_n_epochs)
        self.every_n_epochs = {
            name: check_integer("attack_every_n_epochs", number, minimum=1) for name, number in numbers.items()
        }
        self._last_epoch: dict[str, int] = {}
        self._last_batch: dict[str, int] = {}

    def due(self, trainer: Trainer) -> list[str]:
        """Return the names of the attacks that run in this validation epoch."""
        if trainer.state.fn != "fit" or self._is_at_the_end(trainer):
            return list(self.every_n_epochs)
        last, epoch = self._last_epoch, trainer.current_epoch
        return [
            name for name, number in self.every_n_epochs.items() if name not in last or epoch - last[name] >= number
        ]

    def missing(self, trainer: Trainer) -> list[str]:
        """Return the names of all attacks if one of them has not seen the network as it is at the end of training.

        All of them run, since the worst case is that of attacks in the same evaluation.
        """
        names, batch = list(self.every_n_epochs), num_training_batches(trainer)
        return [] if all(self._last_batch.get(name) == batch for name in names) else names

    def record(self, trainer: Trainer, epoch: int, names: Iterable[str]) -> None:
        """Note that attacks have run in this epoch."""
        if trainer.state.fn == "fit":
            for name in names:
                self._last_epoch[name], self._last_batch[name] = epoch, num_training_batches(trainer)

    def reset(self) -> None:
        """Begin anew, for another run."""
        self._last_epoch, self._last_batch = {}, {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on as it would have."""
        return {"last_epoch": dict(self._last_epoch)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._last_epoch = dict(state_dict["last_epoch"])

    @staticmethod
    def _is_at_the_end(trainer: Trainer) -> bool:
        if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
            return True
        is_last_epoch = trainer.max_epochs == trainer.current_epoch + 1
        return is_last_epoch and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
