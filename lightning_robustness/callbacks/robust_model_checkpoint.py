import math
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from typing_extensions import override

from lightning_robustness.callbacks.awaited_keys import (
    DEFAULT_GUARD,
    ExtremeMode,
    came_late,
    check_awaited,
    check_guard,
    last_value,
    mode_of,
    new_value,
)
from lightning_robustness.callbacks.guard import Guard
from lightning_robustness.utilities.checks import check_name
from lightning_robustness.utilities.rank_zero import rank_zero_warn


class RobustModelCheckpoint(ModelCheckpoint):
    """Keep the checkpoints of the most robust epochs.

    It differs from Lightning's ``ModelCheckpoint`` in two ways.

    It considers only epochs with a new finite value. Lightning scores an epoch without one with the value of an earlier
    epoch, and gives up when the value is missing in the first epoch.

    It is guarded by clean accuracy. Attack-free values are often best before the network has learnt anything. An epoch
    is a candidate only if its clean accuracy is within ``tolerance`` of the best so far. When the best accuracy rises,
    the checkpoints that are kept are judged again: one that is no longer a candidate has the worst possible score from
    then on, so that the next candidate is the best, and replaces it where ``save_top_k`` are kept.

    Checkpoints are saved at the end of validation, and at the end of training if attacks run once more there.

    Args:
        monitor: Key of the value, ``"robustness/adv_acc/worst"`` for instance.
        mode: ``"min"`` or ``"max"``, what is better; by default, for values of this package, what is more robust.
        guard: Key of the clean accuracy, or of any other value that is logged in validation; None for no guard.
        tolerance: Distance from the best value of the guard within which an epoch is a candidate.
        guard_mode: ``"min"`` or ``"max"``, what is better for the guard.
        **kwargs: Other arguments of ``ModelCheckpoint``, such as ``dirpath``, ``filename``, ``save_top_k`` and
            ``save_last``; all but ``save_on_train_epoch_end``.

    Raises:
        ValueError: If ``mode`` is missing for a key of unknown direction, or the tolerance is negative.

    Example:
        >>> from lightning_robustness import RobustModelCheckpoint
        >>> checkpoint = RobustModelCheckpoint("robustness/adv_acc/worst", save_top_k=3)
        >>> checkpoint.mode
        'max'

    """

    def __init__(
        self,
        monitor: str,
        mode: ExtremeMode | None = None,
        guard: str | None = DEFAULT_GUARD,
        tolerance: float = 0.02,
        guard_mode: ExtremeMode = "max",
        **kwargs: Any,
    ) -> None:
        check_name("monitor", monitor)
        super().__init__(monitor=monitor, mode=mode_of(monitor, mode), save_on_train_epoch_end=False, **kwargs)
        self._guard = Guard(guard, tolerance, guard_mode, type(self).__name__)
        self._guard_value = math.nan
        # Values of the guard by the path of the checkpoint
        self._guard_values: dict[str, float] = {}
        self._has_seen_value = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            assert self.monitor is not None
            check_awaited(trainer, self, self.monitor)
            check_guard(trainer, self, self._guard.key)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "guard": self._guard.state_dict(), "guard_values": dict(self._guard_values)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._guard.load_state_dict(state_dict["guard"])
        self._guard_values = dict(state_dict["guard_values"])

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._guard.observe(trainer)
        super().on_validation_end(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judge the last epoch where the value came after validation, as that of attacks does after an early stop."""
        if came_late(trainer, str(self.monitor)) and not self._should_skip_saving_checkpoint(trainer):
            candidates = self._monitor_candidates(trainer)
            candidates["epoch"] = torch.tensor(max(trainer.current_epoch - 1, 0))  # it is one ahead by now
            self._judge(trainer, candidates, last_value(trainer, str(self.monitor)))
        super().on_train_end(trainer, pl_module)
        if not self._has_seen_value and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_warn(
                f"RobustModelCheckpoint never saw {self.monitor!r}, so it kept no checkpoint. Logged were: "
                f"{', '.join(trainer.callback_metrics)}."
            )

    @override
    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        self._judge(trainer, monitor_candidates, new_value(trainer, str(self.monitor)))

    @override
    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if filepath in self.best_k_models:  # the state that is saved must have it
            self._guard_values[filepath] = self._guard_value
        self._guard_values = {path: self._guard_values.get(path, math.nan) for path in self.best_k_models}
        super()._save_checkpoint(trainer, filepath)

    def _judge(self, trainer: Trainer, monitor_candidates: dict[str, Tensor], score: float | None) -> None:
        """Save a checkpoint if the epoch is a candidate and among the best."""
        if score is None:
            return
        self._has_seen_value, self._guard_value = True, self._guard.value(trainer)
        if self.save_top_k != 0 and self._guard.admits(self._guard_value):
            self._demote()
            self._save_monitor_checkpoint(trainer, monitor_candidates)

    def _demote(self) -> None:
        """Give checkpoints that are no longer candidates the worst possible score, so that Lightning replaces them."""
        worst = torch.tensor(-math.inf if self.mode == "max" else math.inf)
        for path in self.best_k_models:
            if not self._guard.admits(self._guard_values.get(path, math.nan)):
                self.best_k_models[path] = worst
                self.kth_best_model_path, self.kth_value = path, worst
