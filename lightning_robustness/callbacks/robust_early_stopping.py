import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_robustness.callbacks.trainer_access import logged_in_this_epoch
from lightning_robustness.utilities.checks import check_integer, check_name, check_number
from lightning_robustness.utilities.rank_zero import rank_zero_warn


class RobustEarlyStopping(EarlyStopping):
    """Stop training when a value that is not logged in every epoch no longer improves.

    Lightning's ``EarlyStopping`` compares what was logged last in every epoch, so that a value which comes every five
    epochs runs out of patience while it improves; and it stops at the first NaN. This one counts evaluations: epochs
    without a new value, and values that are not finite, neither improve nor use up patience.

    Args:
        monitor: Key of the value, ``"robustness/adv_acc/worst"`` for instance.
        mode: ``"min"`` or ``"max"``, what is better.
        patience: Number of evaluations without improvement after which training stops.
        min_delta: What counts as an improvement.
        stopping_threshold: Stop as soon as the value is better than this.
        divergence_threshold: Stop as soon as the value is worse than this.
        verbose: Whether to say what happens.

    Example:
        >>> from lightning_robustness import RobustEarlyStopping
        >>> early_stopping = RobustEarlyStopping("robustness/asr/pgd", mode="min", patience=2)

    """

    def __init__(
        self,
        monitor: str,
        mode: str = "min",
        patience: int = 3,
        min_delta: float = 0.0,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        verbose: bool = False,
    ) -> None:
        check_name("monitor", monitor)
        check_integer("patience", patience, minimum=0)
        check_number("min_delta", min_delta)
        super().__init__(
            monitor=monitor,
            min_delta=min_delta,
            patience=patience,
            verbose=verbose,
            mode=mode,
            strict=False,
            check_finite=False,
            stopping_threshold=stopping_threshold,
            divergence_threshold=divergence_threshold,
            check_on_train_epoch_end=False,
        )
        self._has_seen_value = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        # Callbacks such as the monitor say in `keys` what they will log
        keys = [key for callback in callbacks for key in getattr(callback, "keys", ())]
        prefixes = tuple({f"{key.split('/')[0]}/" for key in keys})
        names = {key.split("/")[-1] for key in keys} - {"acc"}
        # Any other key may be the module's own, unless it looks like one of theirs
        if self.monitor not in keys and (self.monitor.startswith(prefixes) or self.monitor.split("/")[-1] in names):
            raise MisconfigurationException(
                f"RobustEarlyStopping waits for {self.monitor!r}, which will not be logged. These keys will be: "
                f"{', '.join(keys)}."
            )

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._has_seen_value:
            rank_zero_warn(
                f"RobustEarlyStopping never saw {self.monitor!r}. Logged were: {', '.join(trainer.callback_metrics)}."
            )

    @override
    def _validate_condition_metric(self, logs: dict[str, Tensor]) -> bool:
        value = logs.get(self.monitor)
        return value is not None and bool(torch.isfinite(value).all())

    @override
    def _run_early_stopping_check(self, trainer: Trainer) -> None:
        if self.monitor in logged_in_this_epoch(trainer):
            self._has_seen_value = True
            super()._run_early_stopping_check(trainer)
