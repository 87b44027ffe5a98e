import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor
from typing_extensions import override

from lightning_robustness._arguments import check_flag, check_integer, check_name, check_number
from lightning_robustness._lightning.guard import (
    ExtremeMode,
    Guard,
    check_awaited,
    mode_of,
    new_value,
)
from lightning_robustness._processes import rank_zero_warn


class RobustEarlyStopping(EarlyStopping):
    """Stop training when a measure of robustness no longer improves.

    It differs from Lightning's ``EarlyStopping`` in two ways.

    It counts evaluations. Lightning compares the value that was logged last in every epoch, so that a value that is
    logged every five epochs exhausts the patience while it improves, and it stops at the first NaN. Here, epochs
    without a new finite value neither improve nor use up patience.

    It is guarded by clean accuracy, unless the value is robust accuracy or not of this package. Attack-free values,
    success rates and distortions are often best before the network has learnt anything. An epoch is a candidate only if
    its clean accuracy is within ``guard_tolerance`` of the best so far. When the best accuracy rises, earlier epochs
    are judged again: the score to beat is the best of those that are still candidates. Patience starts again whenever
    the guard reaches a new best.

    Args:
        monitor: Key of the value, ``"robustness/adv_acc/worst"`` for instance.
        mode: ``"min"`` or ``"max"``, what is better; by default, for values of this package, what is more robust.
        patience: Number of evaluations without improvement after which training stops.
        min_delta: What counts as an improvement.
        stopping_threshold: Stop as soon as the value of a candidate is better than this.
        divergence_threshold: Stop as soon as the value is worse than this.
        verbose: Whether to say what happens.
        guard: Key of the clean accuracy, or of any other value that is logged in validation; None for no guard. By
            default (``"auto"``) the clean accuracy of the monitor guards all of its values but robust accuracy, which
            is ``adv_acc/*`` and ``boundary_acc``.
        guard_tolerance: Distance from the best value of the guard within which an epoch is a candidate, 0.02 by
            default. If it is given, robust accuracy is guarded too.
        guard_mode: ``"min"`` or ``"max"``, what is better for the guard.

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
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        verbose: bool = False,
        guard: str | None = "auto",
        guard_tolerance: float | None = None,
        guard_mode: ExtremeMode = "max",
    ) -> None:
        check_name("monitor", monitor)
        check_integer("patience", patience, minimum=0)
        check_number("min_delta", min_delta)
        check_flag("verbose", verbose)
        thresholds = {"stopping_threshold": stopping_threshold, "divergence_threshold": divergence_threshold}
        for name, threshold in thresholds.items():
            if threshold is not None:
                check_number(name, threshold, minimum=-math.inf)
        super().__init__(
            monitor=monitor,
            min_delta=min_delta,
            patience=patience,
            verbose=verbose,
            mode=mode_of(monitor, mode),
            strict=False,
            check_finite=False,
            stopping_threshold=stopping_threshold,
            divergence_threshold=divergence_threshold,
            check_on_train_epoch_end=False,
        )
        self._guard = Guard(monitor, guard, guard_tolerance, guard_mode, type(self).__name__)
        self._guard_value = math.nan
        # Score, value of the guard, and whether that was a new best, of each evaluation
        self._evaluations: list[tuple[float, float, bool]] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            check_awaited(trainer, self, self.monitor)
            self._guard.check(trainer, self)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "guard": self._guard.state_dict(), "evaluations": list(self._evaluations)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._guard.load_state_dict(state_dict["guard"])
        self._evaluations = list(state_dict["evaluations"])

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._evaluations and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_warn(
                f"RobustEarlyStopping never saw {self.monitor!r}. Logged were: {', '.join(trainer.callback_metrics)}."
            )

    @override
    def _run_early_stopping_check(self, trainer: Trainer) -> None:
        self._guard.observe(trainer)
        if new_value(trainer, self.monitor) is not None:
            self._guard_value = self._guard.value(trainer)
            super()._run_early_stopping_check(trainer)

    @override
    def _evaluate_stopping_criteria(self, current: Tensor) -> tuple[bool, str | None]:
        self.best_score, self.wait_count = self._replay(current.device)
        has_improved, settings = self._guard.has_improved, dict[str, Any]()
        if not self._guard.admits(self._guard_value):
            never = math.inf if self.mode == "max" else -math.inf
            settings |= {"stopping_threshold": None, "min_delta": never}
        if has_improved:
            settings["patience"] = self.wait_count + 2  # out of reach
        with self._changed(settings):
            should_stop, reason = super()._evaluate_stopping_criteria(current)
        if has_improved:
            self.wait_count = 0
        self._evaluations.append((current.item(), self._guard_value, has_improved))
        self._guard.settle()
        return should_stop, reason

    def _replay(self, device: torch.device) -> tuple[Tensor, int]:
        """Return the best score and the evaluations since then, as if there had been no others than the candidates."""
        best, wait = torch.tensor(-math.inf if self.mode == "max" else math.inf, device=device), 0
        for score, guard_value, has_improved in self._evaluations:
            value, wait = torch.tensor(score, device=device), wait + 1
            is_better = self._guard.admits(guard_value) and bool(self.monitor_op(value - self.min_delta, best))
            best = value if is_better else best
            if is_better or has_improved:
                wait = 0
        return best, wait

    @contextmanager
    def _changed(self, settings: dict[str, Any]) -> Iterator[None]:
        before = {name: getattr(self, name) for name in settings}
        vars(self).update(settings)
        try:
            yield
        finally:
            vars(self).update(before)
