import math
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_robustness._arguments import check_flag, check_integer, check_name, check_number
from lightning_robustness._lightning.guard import (
    ExtremeMode,
    Guard,
    agreed_value,
    check_awaited,
    describe_missing,
    mode_of,
    new_value,
    reference_key,
    split_key,
)
from lightning_robustness._lightning.patience import Evaluation, LearningRateWait, Streak
from lightning_robustness._measurement.keys import attack_free_metrics
from lightning_robustness._processes import rank_zero_warn

_ON_BAR = "patience waits for"


class RobustEarlyStopping(EarlyStopping):
    """Stop training when a measure of robustness no longer improves.

    It differs from Lightning's ``EarlyStopping`` in four ways.

    It counts evaluations. Lightning compares the value that was logged last in every epoch, so that a value that is
    logged every five epochs exhausts the patience while it improves, and it stops at the first NaN. Here, epochs
    without a new finite value neither improve nor use up patience.

    Patience waits for the learning rate, since robust accuracy jumps when it falls: an evaluation counts once the rate
    is at most half of its peak, and the count restarts where the rate falls in one step to at most half of the lowest
    that counted. From three quarters of ``max_epochs`` or ``max_steps`` on, every evaluation counts; without a
    scheduler, or without such a limit, all do.

    A value that needs no attack is confirmed by one that does: training stops only when the patience of both is
    exhausted, each counted at its own evaluations.

    It is guarded by clean accuracy, unless the value is robust accuracy or not of this package. Attack-free values,
    success rates and distortions are often best before the network has learnt anything. An epoch is a candidate only if
    its clean accuracy is within ``guard_tolerance`` of the best so far. When the best accuracy rises, earlier epochs
    are judged again: the score to beat is the best of those that are still candidates. Patience starts again whenever
    the guard reaches a new best.

    Args:
        monitor: Key of the value, ``"robustness/adv_acc/worst"`` for instance.
        mode: ``"min"`` or ``"max"``, what is better; by default, for values of this package, what is more robust.
        patience: Number of evaluations without improvement after which training stops; a resumed run goes by its own.
        min_delta: What counts as an improvement.
        start_from_epoch: First epoch that counts towards patience, instead of waiting for the learning rate; 0 for all.
        confirm: Key of the robust accuracy that confirms an attack-free value; None to go by the value alone. By
            default (``"auto"``) of the attack that the monitor runs most often, or of all if they run together.
        stopping_threshold: Stop as soon as the value of a candidate is better than this.
        divergence_threshold: Stop as soon as the value is worse than this.
        verbose: Whether to say what happens.
        strict: Whether a run that never logs the value is an error instead of a warning.
        check_finite: Whether to stop at the first value that is not finite, instead of ignoring it.
        log_rank_zero_only: Whether messages come from the first process only.
        guard: Key of the clean accuracy, or of any other value that is logged in validation; None for no guard. By
            default (``"auto"``) the clean accuracy of the monitor guards all of its values but robust accuracy, which
            is ``adv_acc/*`` and ``boundary_acc``.
        guard_tolerance: Distance from the best value of the guard within which an epoch is a candidate, 0.02 by
            default. If it is given, robust accuracy is guarded too.
        guard_mode: ``"min"`` or ``"max"``, what is better for the guard.

    Attributes:
        waiting: Reason why the run does not stop yet; empty if it is only the patience of the value.

    Raises:
        ValueError: If ``mode`` is missing for a key of unknown direction, or the tolerance is negative.

    Example:
        >>> from lightning_robustness import RobustEarlyStopping
        >>> early_stopping = RobustEarlyStopping("robustness/asr/pgd", patience=2)
        >>> early_stopping.mode
        'min'

    """

    def __init__(
        self,
        monitor: str,
        mode: ExtremeMode | None = None,
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        start_from_epoch: int | None = None,
        confirm: str | None = "auto",
        strict: bool = False,
        check_finite: bool = False,
        log_rank_zero_only: bool = False,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        verbose: bool = False,
        guard: str | None = "auto",
        guard_tolerance: float | None = None,
        guard_mode: ExtremeMode = "max",
    ) -> None:
        thresholds = {"stopping_threshold": stopping_threshold, "divergence_threshold": divergence_threshold}
        for name, threshold in thresholds.items():
            if threshold is not None:
                check_number(name, threshold, minimum=-math.inf)
        super().__init__(
            monitor=check_name("monitor", monitor),
            min_delta=check_number("min_delta", min_delta),
            patience=check_integer("patience", patience, minimum=0),
            verbose=check_flag("verbose", verbose),
            mode=mode_of(monitor, mode),
            strict=False,
            check_finite=False,
            stopping_threshold=stopping_threshold,
            divergence_threshold=divergence_threshold,
            check_on_train_epoch_end=False,
            log_rank_zero_only=check_flag("log_rank_zero_only", log_rank_zero_only),
        )
        self._is_required = check_flag("strict", strict)
        self._stops_at_nan = check_flag("check_finite", check_finite)
        self._wait = LearningRateWait(start_from_epoch)
        self._confirm = confirm if confirm is None else check_name("confirm", confirm)
        self._reference: str | None = None  # key of the robust accuracy that confirms the value
        self.waiting = ""
        self._guard = Guard(monitor, guard, guard_tolerance, guard_mode, type(self).__name__)
        self._evaluations: dict[str, list[Evaluation]] = {}  # of the value and of the reference, by key
        self._new = self.state_dict()

    @property
    def waited(self) -> str:
        """Reason why patience waited, and until which epoch; empty if it has not waited, or still does."""
        return self._wait.past

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            if trainer.current_epoch == 0:  # another run; one that is resumed gets its state after this
                self.load_state_dict(self._new)
            check_awaited(trainer, self, self.monitor)
            self._guard.check(trainer, self)
            self._reference = self._find_reference(trainer)

    @override
    def state_dict(self) -> dict[str, Any]:
        own = {
            "guard": self._guard.state_dict(),
            "evaluations": {key: [tuple(own) for own in series] for key, series in self._evaluations.items()},
            "learning_rate": self._wait.state_dict(),
        }
        return {**super().state_dict(), **own}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = {**self._new, **state_dict}  # that of Lightning's callback lacks what is ours
        super().load_state_dict({**state_dict, "patience": self.patience})  # an argument, which may have changed
        unknown: dict[str, Any] = {} if self._guard.load_state_dict(state_dict["guard"]) else {"guard": math.nan}
        saved = state_dict["evaluations"].items()
        self._evaluations = {key: [Evaluation(*own)._replace(**unknown) for own in series] for key, series in saved}
        self._wait.load_state_dict(state_dict["learning_rate"])

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._wait.observe(trainer)  # a peak may lie between two evaluations

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.progress_bar_metrics.pop(_ON_BAR, None)
        for key in (self.monitor, self._reference) if not trainer.fast_dev_run else ():  # type: ignore[attr-defined]
            if key is None or key in self._evaluations:
                continue
            message = describe_missing(trainer, self, key)
            if self._is_required and key == self.monitor:
                raise RuntimeError(message)
            rank_zero_warn(message)

    @override
    def _run_early_stopping_check(self, trainer: Trainer) -> None:
        self._guard.observe(trainer)
        value = agreed_value(trainer, self.monitor)
        is_finite = value is None or math.isfinite(value)
        if self._stops_at_nan and not is_finite:
            trainer.should_stop = True
            rank_zero_info(f"RobustEarlyStopping: {self.monitor!r} is not finite, so training stops.")
            return
        value = value if is_finite else None
        confirmation = None if self._reference is None else new_value(trainer, self._reference)
        if value is None and confirmation is None:
            return
        count = self._wait.judge(trainer)
        if confirmation is not None:
            self._evaluations.setdefault(str(self._reference), []).append(Evaluation(confirmation, *count))
        if value is not None:
            guard = self._guard.value(trainer), self._guard.has_improved
            self._evaluations.setdefault(self.monitor, []).append(Evaluation(value, *count, *guard))
            self._guard.has_improved = False
            trainer.callback_metrics.setdefault(self.monitor, torch.tensor(value))  # only others may have logged it
            super()._run_early_stopping_check(trainer)
        self._say(trainer, is_counted=count[0])

    @override
    def _evaluate_stopping_criteria(self, current: Tensor) -> tuple[bool, str | None]:
        evaluations = self._evaluations[self.monitor]
        last, value = evaluations[-1], evaluations[-1].value
        current = torch.full_like(current, value)  # of all processes
        # As if only those that are candidates now had ever been candidates
        series = Streak.of(evaluations, self.mode == "max", self.min_delta, self._guard.admits)
        self.best_score, self.wait_count = torch.full_like(current, series.best), series.wait
        threshold, divergence = self.stopping_threshold, self.divergence_threshold
        if threshold is not None and self._guard.admits(last.guard) and self.monitor_op(current, threshold):
            return self._stop("STOPPING_THRESHOLD", f"{value:.3g} is better than `stopping_threshold`")
        if divergence is not None and self.monitor_op(-current, -divergence):
            return self._stop("DIVERGENCE_THRESHOLD", f"{value:.3g} is worse than `divergence_threshold`")
        if last.counts and self._is_confirmed and series.wait >= max(self.patience, 1):
            return self._stop("PATIENCE_EXHAUSTED", f"no better than {series.best:.3g} in {series.wait} evaluations")
        has_improved = series.best == value and series.wait == 0
        return False, f"{self.monitor} improved to {value:.3g}." if has_improved else None

    def _stop(self, kind: str, reason: str) -> tuple[bool, str]:
        known: Any = getattr(self, "stopping_reason", None)  # older releases have none
        if known is not None:
            vars(self)["stopping_reason"] = type(known)[kind]
        return True, f"{self.monitor}: {reason}, so training stops."

    @property
    def _is_confirmed(self) -> bool:
        if self._reference is None:
            return True
        mode = mode_of(self._reference, None if split_key(self._reference)[1] else "max")
        return Streak.of(self._evaluations.get(self._reference, ()), mode == "max").wait >= self.patience

    def _find_reference(self, trainer: Trainer) -> str | None:
        """Find the robust accuracy that has to run out of patience too, for a value that needs no attack."""
        prefix, entry = split_key(self.monitor)
        if entry is None or entry.name not in attack_free_metrics():
            return None
        key = reference_key(trainer, prefix) if self._confirm == "auto" else self._confirm
        if key is None or key == self.monitor:
            rank_zero_warn(
                f"RobustEarlyStopping goes by {self.monitor!r} alone, since no robust accuracy confirms it. Such a "
                "value can mislead: let RobustnessMonitor run an attack, and leave `confirm` out."
            )
            return None
        check_awaited(trainer, self, key)
        return key

    def _say(self, trainer: Trainer, is_counted: bool) -> None:
        """Say what the run waits for, on the progress bar, and in the log when that changes."""
        status, short = "", ""
        if not is_counted:
            status = self._wait.describe()
            short = "learning rate" if self._wait.start_from_epoch is None else f"epoch {self._wait.start_from_epoch}"
        elif self._reference is not None and (self.wait_count >= self.patience) != self._is_confirmed:
            over, short = self._reference, self.monitor
            if self.wait_count >= self.patience:
                over, short = short, over
            status = f"{over} has stopped improving; training continues until {short} has too"
        kind, was = status.partition("(")[0], self.waiting.partition("(")[0]
        if status and kind != was:
            rank_zero_info(f"RobustEarlyStopping: {status}.")
        self.waiting = status
        trainer.progress_bar_metrics.pop(_ON_BAR, None)
        if short:  # bars take texts too
            trainer.progress_bar_metrics[_ON_BAR] = short  # type: ignore[assignment]
