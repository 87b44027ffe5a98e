import math
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from typing_extensions import override

from lightning_robustness._arguments import check_name, check_number
from lightning_robustness._lightning.guard import (
    ExtremeMode,
    Guard,
    came_late,
    check_awaited,
    check_package,
    describe_missing,
    last_value,
    mode_of,
    new_value,
    split_key,
)
from lightning_robustness._lightning.trainer import logged_in_this_epoch
from lightning_robustness._measurement.statistics import TIE_MARGIN, preference
from lightning_robustness._processes import rank_zero_warn


class RobustModelCheckpoint(ModelCheckpoint):
    """Keep the checkpoints of the most robust epochs.

    It differs from Lightning's ``ModelCheckpoint`` in three ways.

    It considers only epochs with a new finite value. Lightning scores an epoch without one with the value of an earlier
    epoch, and gives up when the value is missing in the first epoch.

    Ties go to clean accuracy. Among the epochs whose value is within ``tie_margin`` of the best so far, the one with
    the highest clean accuracy comes first, a later one before an earlier one of the same accuracy; the other epochs
    follow, by their values. The first ``save_top_k`` of this order are kept, ``best_model_path`` is the first of them,
    and ``best_model_score`` its own value. Clean accuracy is what the monitor logs as ``acc`` under the prefix of the
    value, or the value of a guard that is named. Where it is not logged, the best value comes first.

    It is guarded by clean accuracy, unless the value is robust accuracy or not of this package. Attack-free values,
    success rates and distortions are often best before the network has learnt anything. An epoch is a candidate only if
    its clean accuracy is within ``guard_tolerance`` of the best so far; the rule for ties applies to candidates. When
    the best accuracy rises, the checkpoints that are kept are judged again: one that is no longer a candidate comes
    last from then on, so that the next candidate replaces it.

    Checkpoints are saved at the end of validation, and at the end of training if attacks run once more there.

    Args:
        monitor: Key of the value, ``"robustness/adv_acc/worst"`` for instance.
        mode: ``"min"`` or ``"max"``, what is better; by default, for values of this package, what is more robust.
        guard: Key of the clean accuracy, or of any other value that is logged in validation; None for no guard. By
            default (``"auto"``) the clean accuracy of the monitor guards all of its values but robust accuracy, which
            is ``adv_acc/*`` and ``boundary_acc``.
        guard_tolerance: Distance from the best value of the guard within which an epoch is a candidate, 0.02 by
            default. If it is given, robust accuracy is guarded too.
        guard_mode: ``"min"`` or ``"max"``, what is better for the guard.
        tie_margin: Distance from the best value within which the clean accuracy decides, in the units of the value; by
            default 0.005 for values of this package, 0 for others.
        **kwargs: Other arguments of ``ModelCheckpoint``, such as ``dirpath``, ``filename``, ``save_top_k`` and
            ``save_last``; all but ``save_on_train_epoch_end``.

    Raises:
        ValueError: If ``mode`` is missing for a key of unknown direction, or the tolerance or the margin is negative.

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
        *,
        guard: str | None = "auto",
        guard_tolerance: float | None = None,
        guard_mode: ExtremeMode = "max",
        tie_margin: float | None = None,
        **kwargs: Any,
    ) -> None:
        check_name("monitor", monitor)
        super().__init__(monitor=monitor, mode=mode_of(monitor, mode), save_on_train_epoch_end=False, **kwargs)
        self._guard = Guard(monitor, guard, guard_tolerance, guard_mode, type(self).__name__)
        default_margin = 0.0 if split_key(monitor)[1] is None else TIE_MARGIN
        self.tie_margin = default_margin if tie_margin is None else check_number("tie_margin", tie_margin)
        # Values of the guard by the path of the checkpoint
        self._guard_values: dict[str, float] = {}
        # Value, and value of the guard, of every epoch that was a candidate, kept or not; the last is being judged
        self._evaluations: list[tuple[float, float]] = []
        self._best = -math.inf
        self._seen = set[str]()  # finite "key" was logged in validation, "value" when a checkpoint was due
        self._is_due = False

    @property
    def _sign(self) -> int:
        return 1 if self.mode == "max" else -1

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            assert self.monitor is not None
            check_package(trainer, self)
            check_awaited(trainer, self, self.monitor)
            self._guard.check(trainer, self)

    @override
    def state_dict(self) -> dict[str, Any]:
        own = {
            "guard": self._guard.state_dict(),
            "guard_values": dict(self._guard_values),
            "evaluations": list(self._evaluations),
            "is_due": self._is_due,
        }
        return {**super().state_dict(), **own}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if "guard" not in state_dict:  # that of Lightning's callback, which knows no values of the guard
            kept = [(value.item(), math.nan) for value in self.best_k_models.values()]
            own = {"guard": self._guard.state_dict(), "guard_values": {}, "evaluations": kept, "is_due": False}
            state_dict = {**state_dict, **own}
        is_same_guard = self._guard.load_state_dict(state_dict["guard"])
        self._is_due = state_dict["is_due"]
        if not self.best_k_models:  # in another directory, Lightning starts anew
            return
        self._guard_values = dict(state_dict["guard_values"]) if is_same_guard else {}
        self._evaluations = [
            (value, other if is_same_guard else math.nan) for value, other in state_dict["evaluations"]
        ]

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._guard.observe(trainer)
            value = trainer.callback_metrics.get(str(self.monitor))
            if self.monitor in logged_in_this_epoch(trainer) and value is not None and value.isfinite().all():
                self._seen.add("key")
        if self._is_due and not self._should_skip_saving_checkpoint(trainer):
            self._is_due = False
            self._judge(trainer, self._monitor_candidates(trainer), new_value(trainer, str(self.monitor)))
        super().on_validation_end(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The value of the last epoch may come after validation, as from attacks after an early stop
        if came_late(trainer, str(self.monitor)) and not self._should_skip_saving_checkpoint(trainer):
            candidates = self._monitor_candidates(trainer)
            candidates["epoch"] = torch.tensor(max(trainer.current_epoch - 1, 0))  # it is one ahead by now
            self._judge(trainer, candidates, last_value(trainer, str(self.monitor)))
        super().on_train_end(trainer, pl_module)
        has_judged = "value" in self._seen or self._evaluations  # here, or before the run was resumed
        if not has_judged and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            reason = describe_missing(trainer, self, str(self.monitor))
            if "key" in self._seen:
                reason = (
                    f"{type(self).__name__} saw {self.monitor!r} in validation, but no checkpoint was due in this run "
                    "when it was finite. Pass a smaller `every_n_epochs`, `every_n_train_steps` or "
                    "`train_time_interval`."
                )
            rank_zero_warn(f"{reason} No checkpoint was kept.")

    @override
    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        self._is_due = not trainer.validating  # of a step between two validations: the next one tells its value
        if not self._is_due:
            self._judge(trainer, monitor_candidates, new_value(trainer, str(self.monitor)))

    @override
    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        if current is None or not 0 <= self.save_top_k <= len(self.best_k_models):
            return current is not None
        return self._rank(current, self._evaluations[-1][1]) >= self._rank_of(self.kth_best_model_path)

    @override
    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if trainer.interrupted and filepath in self.best_k_models:  # one of `save_on_exception` replaces none
            filepath = f"{filepath.removesuffix(self.FILE_EXTENSION)}-exception{self.FILE_EXTENSION}"
        if filepath in self.best_k_models:  # the state that is saved must have it
            self._guard_values[filepath] = self._evaluations[-1][1]
        self._guard_values = {path: self._guard_values.get(path, math.nan) for path in self.best_k_models}
        self._arrange()
        step = self._last_global_step_saved
        super()._save_checkpoint(trainer, filepath)
        if filepath not in self.best_k_models:  # `last.ckpt` of a trigger, whose value is yet to come
            self._last_global_step_saved = step

    def _judge(self, trainer: Trainer, monitor_candidates: dict[str, Tensor], score: float | None) -> None:
        """Save a checkpoint if the epoch is a candidate and among the best."""
        if score is None:
            return
        self._seen.add("value")
        if self.save_top_k == 0:
            return
        guard_value = self._guard.value(trainer)
        if self._guard.admits(guard_value):
            self._evaluations.append((score, guard_value))
            self._arrange()  # Lightning removes the last
            # All processes go by their mean
            self._save_monitor_checkpoint(trainer, {**monitor_candidates, str(self.monitor): torch.tensor(score)})
        self._arrange()

    def _arrange(self) -> None:
        """Tell Lightning which checkpoint is the best, and which it is to remove next."""
        values = [self._sign * value for value, guard_value in self._evaluations if self._guard.admits(guard_value)]
        self._best = max(values, default=-math.inf)
        if self.best_k_models:
            paths = sorted(self.best_k_models, key=self._rank_of)  # a later one above its equals
            self.kth_best_model_path, self.best_model_path = paths[0], paths[-1]
            self.kth_value, self.best_model_score = (self.best_k_models[paths[end]] for end in (0, -1))

    def _rank_of(self, path: str) -> tuple[bool, bool, float, float]:
        return self._rank(self.best_k_models[path], self._guard_values.get(path, math.nan))

    def _rank(self, score: Tensor, guard_value: float) -> tuple[bool, bool, float, float]:
        """Return what to sort epochs by, the best one last: candidates first."""
        value, accuracy = self._sign * score.item(), self._guard.quality(guard_value)
        return self._guard.admits(guard_value), *preference(value, accuracy, self._best, self.tie_margin)
