from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer

from lightning_robustness.callbacks.attack_schedule import AttackSchedule
from lightning_robustness.callbacks.distrust import warn_of_distrust
from lightning_robustness.callbacks.history import History
from lightning_robustness.callbacks.monitor_run import MonitorRun
from lightning_robustness.callbacks.trainer_access import log_step, num_training_batches
from lightning_robustness.measurement.trust import measure_trust


class RunRecord:
    """Everything that outlives an epoch: the evaluations so far, and when each attack ran last.

    Args:
        attacks: Names of the attacks.
        every_n_epochs: How often they run; see :class:`AttackSchedule`.

    Attributes:
        history: The evaluations.
        schedule: The attacks.

    """

    def __init__(self, attacks: Iterable[str], every_n_epochs: int | Mapping[str, int] | None = None) -> None:
        self.history = History()
        self.schedule = AttackSchedule(attacks, every_n_epochs)

    def begin(self, trainer: Trainer) -> None:
        """Begin a run; one that is resumed goes on with what there is."""
        is_new = trainer.current_epoch == 0
        self.history.begin(anew=is_new)
        if is_new:
            self.schedule.reset()

    def add(
        self, run: MonitorRun, trainer: Trainer, values: dict[str, float], attacks: Sequence[str]
    ) -> dict[str, float]:
        """Add the values of an evaluation, and return them together with what the history then says about trust."""
        if trainer.state.fn != "fit":
            return values
        self.history.add(num_training_batches(trainer), run.epoch, log_step(trainer), values)
        if not attacks:
            return values
        self.schedule.record(trainer, run.epoch, attacks)
        trust = measure_trust(self.history.entries)
        warn_of_distrust(trainer, run, trust)
        measured = {f"trust/{name}": agreement.tau for name, agreement in trust.items()}
        self.history.entries[-1] |= measured
        return values | measured

    def show(self, run: MonitorRun, trainer: Trainer, values: Mapping[str, float]) -> dict[str, float]:
        """Show the run so far, and return the time that all figures of this evaluation took."""
        if trainer.state.fn != "fit":
            return {}
        entries = self.history.entries
        taken = run.board.show_history(entries)
        entries[-1]["seconds/figures"] = entries[-1].get("seconds/figures", 0.0) + taken
        return {"seconds/figures": values.get("seconds/figures", 0.0) + taken}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on as it would have."""
        return {"schedule": self.schedule.state_dict(), "history": self.history.entries}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.schedule.load_state_dict(state_dict["schedule"])
        self.history.entries = list(state_dict["history"])
