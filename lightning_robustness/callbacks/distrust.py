from collections.abc import Mapping

from lightning.pytorch import Trainer

from lightning_robustness.callbacks.monitor_run import MonitorRun
from lightning_robustness.callbacks.trainer_access import kinds_of
from lightning_robustness.measurement.keys import tag
from lightning_robustness.measurement.trust import Trust

# Evaluations from which on a negative coefficient deserves a warning
_MIN_EVALUATIONS = 6


def warn_of_distrust(trainer: Trainer, run: MonitorRun, trust: Mapping[str, Trust]) -> None:
    """Warn if a callback stops training, or keeps checkpoints, by a value that contradicts the attacks of this run.

    Args:
        trainer: The Trainer.
        run: The run.
        trust: Agreement with the attacks, by the name of the value.

    """
    names = {tag(run.prefix, name): name for name in trust}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not kinds_of(callback) & {"EarlyStopping", "ModelCheckpoint"} or callback.monitor not in names:
            continue
        tau, number, reference = trust[names[callback.monitor]]
        if tau < 0 and number >= _MIN_EVALUATIONS:
            run.faults.warn(
                f"{type(callback).__name__} goes by {callback.monitor!r}, which contradicts the attacks of this run: "
                f"its Kendall's tau with {tag(run.prefix, reference)!r} is {tau:.2f} over {number} evaluations. Use "
                f"RobustModelCheckpoint and RobustEarlyStopping with {tag(run.prefix, reference)!r} instead.",
                key=f"trust in {callback.monitor}",
            )
