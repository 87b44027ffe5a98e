import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_robustness._lightning.settings import MonitorSettings
from lightning_robustness._lightning.trainer import has_trained, is_sharded
from lightning_robustness._processes import rank_zero_warn

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Faults:
    """Errors and warnings of a callback that must not end the run it watches.

    Before training has begun, errors are raised, while they cost little. Afterwards they become warnings, one per text,
    and the part that failed is left out. Processes agree on the parts, so none waits for another.
    """

    def __init__(self, trainer: Trainer, owner: str) -> None:
        self.error: str | None = None
        self._trainer = trainer
        self._owner = owner
        self._reported: set[str] = set()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Keep an error in this process for the end of the epoch."""
        try:
            yield
        except FloatingPointError as error:
            self.error = str(error)
        except Exception as error:
            if not has_trained(self._trainer):
                raise MisconfigurationException(f"{self._owner}: {error}") from error
            self.error = _describe(error)

    def agree(self, consequence: str) -> bool:
        """Return whether no process has an error; warn of one in this process together with its consequence."""
        if self._trainer.strategy.reduce_boolean_decision(self.error is None, all=True):
            return True
        self.report(consequence, self.error)
        return False

    def attempt(self, consequence: str, work: Callable[[], object]) -> bool:
        """Run work that needs no other process; return whether it succeeded in all of them."""
        error = None
        try:
            work()
        except Exception as exception:
            error = _describe(exception)
        if self._trainer.strategy.reduce_boolean_decision(error is None, all=True):
            return True
        self.report(consequence, error)
        return False

    def tolerate(self, consequence: str, work: Callable[[], _T]) -> _T | None:
        """Run work of this process alone; return None if it failed after training had begun."""
        try:
            return work()
        except Exception as error:
            if not has_trained(self._trainer):
                raise
            self.report(consequence, _describe(error))
            return None

    def compute(self, consequence: str, work: Callable[[], _T]) -> _T | None:
        """Run work that all processes share; return None if it failed after training had begun.

        With several processes an error is always raised, because the others would wait for this one.
        """
        return work() if self._trainer.world_size > 1 else self.tolerate(consequence, work)

    def warn(self, message: str, key: str) -> None:
        """Warn in the first process, once per key."""
        if key not in self._reported:
            self._reported.add(key)
            self._emit(lambda text: rank_zero_warn(text, stacklevel=4), message)

    def refuse(self, message: str, consequence: str) -> None:
        """Raise before training has begun; afterwards, warn once, together with the consequence."""
        if not has_trained(self._trainer):
            raise MisconfigurationException(f"{self._owner}: {message}")
        self.warn(f"{message} {consequence}", key=message)

    def report(self, consequence: str, error: str | None) -> None:
        """Warn of an error in the process where it occurred, once per text."""
        if error is not None and error not in self._reported:
            self._reported.add(error)
            self._emit(lambda text: warnings.warn(text, stacklevel=4), f"{consequence}: {error}")

    def _emit(self, warn: Callable[[str], None], message: str) -> None:
        text = f"{self._owner}: {message}"
        try:
            warn(text)
        except Warning:  # warnings are turned into errors
            if not has_trained(self._trainer):
                raise
            _log.warning(text)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def warn_of_sharding(trainer: Trainer, settings: MonitorSettings) -> None:
    """Warn of what the monitor leaves out where no process has the whole network."""
    if not is_sharded(trainer):
        return
    left_out = [
        *(["attacks, with them `worst` and trust"] if settings.attacks else []),
        *(["`final_attacks`"] if settings.final else []),
        *(["the Fisher information and the distance to the decision boundary"] if settings.fim_samples else []),
        *(["CLEVER"] if settings.clever_samples else []),
        *(["the projector"] if settings.log_embeddings else []),
    ]
    functions = [name for name in ("forward_fn", "embed_fn") if getattr(settings, name) is not None]
    if not left_out and not functions:
        return
    uncalled = f" {' and '.join(functions)} will not be called: `validation_step` alone runs the network."
    rank_zero_warn(
        f"RobustnessMonitor: {type(trainer.strategy).__name__} shards the parameters, so no process can run or "
        "differentiate the network by itself. RDI, ROBY and accuracy are measured, from hooks; left out are: "
        f"{'; '.join(left_out) or 'none'}.{uncalled if functions else ''} For everything, train with strategy='ddp', "
        "or evaluate a checkpoint afterwards, with `lightning_robustness.evaluation.evaluate`."
    )
