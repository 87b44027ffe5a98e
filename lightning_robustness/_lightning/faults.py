import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_robustness._lightning.settings import MonitorSettings
from lightning_robustness._lightning.trainer import has_trained, is_sharded
from lightning_robustness._processes import (
    OtherProcessError,
    ProcessesLostError,
    RobustnessWarning,
    describe_error,
    rank_zero_warn,
)

_log = logging.getLogger(__name__)


class Faults:
    """Errors and warnings of the monitor, which must not end the run it watches.

    Errors are raised before training, while they cost little; later they become warnings, and the part is left out.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.error: Exception | None = None
        self.left_out: list[str] = []
        self._trainer = trainer
        self._reported: set[str] = set()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Keep an error in this process for the end of the epoch; raise it before training has begun."""
        try:
            yield
        except FloatingPointError as error:
            self.error = error
        except Exception as error:
            if not has_trained(self._trainer):
                raise MisconfigurationException(f"RobustnessMonitor: {str(error) or type(error).__name__}") from error
            self.error = error

    @contextmanager
    def skipping(self, consequence: str, is_raised_early: bool = False) -> Iterator[None]:
        """Leave out what fails, which must fail in all processes or in none; warn in the one where it occurred."""
        try:
            yield
        except ProcessesLostError:
            raise
        except Exception as error:
            if is_raised_early and not has_trained(self._trainer):
                raise
            if not isinstance(error, OtherProcessError):
                self.report(consequence, describe_error(error))

    def warn(self, message: str, key: str) -> None:
        """Warn in the first process, once per key."""
        if key not in self._reported:
            self._reported.add(key)
            with self._kept_alive():
                rank_zero_warn(f"RobustnessMonitor: {message}")

    def refuse(self, message: str, consequence: str) -> None:
        """Raise before training has begun; afterwards, warn once, together with the consequence."""
        if not has_trained(self._trainer):
            raise MisconfigurationException(f"RobustnessMonitor: {message}")
        self.warn(f"{message} {consequence}", key=message)

    def report(self, consequence: str, error: str) -> None:
        """Warn of an error in the process where it occurred, once per consequence and kind, whatever the epoch."""
        self.left_out.append(consequence)
        key = re.sub(r"\d+", "", f"{consequence}: {error.partition(':')[0]}")
        if key not in self._reported:
            self._reported.add(key)
            with self._kept_alive():
                warnings.warn(f"RobustnessMonitor: {consequence}: {error}", RobustnessWarning, stacklevel=2)

    @contextmanager
    def _kept_alive(self) -> Iterator[None]:
        """Log a warning that is turned into an error, which must not end the run once it trains."""
        try:
            yield
        except Warning as warning:
            if not has_trained(self._trainer):
                raise
            _log.warning(str(warning))


def warn_of_sharding(trainer: Trainer, settings: MonitorSettings) -> None:
    """Warn of what the monitor leaves out where no process has the whole network."""
    access = settings.access
    uses_network = settings.needs_gradients or settings.log_embeddings or access.forward_fn or access.embed_fn
    if not is_sharded(trainer) or not uses_network:
        return
    rank_zero_warn(
        f"RobustnessMonitor: {type(trainer.strategy).__name__} shards the parameters, so no process can run or "
        "differentiate the network by itself. RDI, ROBY and accuracy are measured, from hooks on `validation_step`. "
        "Left out are attacks, `final_attack`, `worst` and trust, the Fisher information, the distance to the decision "
        "boundary, CLEVER and the projector; `forward_fn` and `embed_fn` are not called. For everything, train with "
        "strategy='ddp', or evaluate a checkpoint afterwards, with `lightning_robustness.evaluation.evaluate`."
    )
