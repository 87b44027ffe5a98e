import math
from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_robustness.callbacks.awaited_keys import (
    ExtremeMode,
    check_awaited,
    check_default_guard,
    new_value,
    split_key,
)
from lightning_robustness.callbacks.trainer_access import num_training_batches
from lightning_robustness.utilities.checks import check_name, check_number, check_option
from lightning_robustness.utilities.rank_zero import rank_zero_warn

DEFAULT_TOLERANCE = 0.02


class Guard:
    """Admit the epochs of a run whose clean accuracy, or another value, is close to the best so far.

    Attack-free values, success rates and distortions are often best before the network has learnt anything, so that a
    stop or a checkpoint that looks at them alone keeps the first epoch. Robust accuracy needs no such veto: it contains
    clean accuracy, which goes on rising after the robust peak. The best value only ever improves: an epoch that is no
    longer admitted is never admitted again.

    Args:
        monitor: Key of the value that is guarded.
        guard: Key of the guard's value; ``"auto"`` for the clean accuracy beside ``monitor``, with a veto if a
            tolerance is given or ``monitor`` is in the table of keys and not robust accuracy; None for no veto.
        tolerance: Distance from the best value within which an epoch is admitted; None for 0.02.
        mode: ``"min"`` or ``"max"``, what is better.
        owner: Name of the callback, for warnings.

    Attributes:
        key: Key of the guard's value; without a veto, of the clean accuracy beside ``monitor``.
        has_veto: Whether epochs may be refused.
        best: The best value so far; NaN before the first, and without a veto.
        has_improved: Whether the best value has improved since ``settle`` was last called.

    Raises:
        ValueError: If the key, the tolerance or the mode is not possible.

    """

    def __init__(self, monitor: str, guard: str | None, tolerance: float | None, mode: ExtremeMode, owner: str) -> None:
        prefix, entry = split_key(monitor)
        self._is_named = guard not in (None, "auto")
        self.key = check_name("guard", guard) if self._is_named else f"{prefix}/acc"
        is_robust_accuracy = entry is not None and entry.name.startswith(("adv_acc/", "boundary_acc"))
        is_guarded = tolerance is not None or (entry is not None and not is_robust_accuracy)
        self.has_veto = self._is_named or (guard == "auto" and is_guarded)
        self.tolerance = DEFAULT_TOLERANCE if tolerance is None else check_number("guard_tolerance", tolerance)
        check_option("guard_mode", mode, ExtremeMode)
        self.best = math.nan
        self.has_improved = False
        self._sign = 1 if mode == "max" else -1
        self._owner = owner
        self._last: tuple[int, float] | None = None
        self._has_warned = False

    def check(self, trainer: Trainer, owner: Callback) -> None:
        """Check, where the callbacks of a Trainer tell, that the value will be logged, if there is a veto.

        Raises:
            MisconfigurationException: If it will not.

        """
        if self.has_veto and not self._is_named:
            check_default_guard(trainer, owner, self.key)
        elif self.has_veto:
            check_awaited(trainer, owner, self.key)

    def observe(self, trainer: Trainer) -> None:
        """See what was logged in the validation epoch that ends."""
        value = new_value(trainer, self.key)
        if value is None:
            return
        self._last = num_training_batches(trainer), value
        if self.has_veto and (math.isnan(self.best) or self.quality(value) > self.quality(self.best)):
            self.best, self.has_improved = value, True

    def settle(self) -> None:
        """Note that an improvement has been taken into account."""
        self.has_improved = False

    def value(self, trainer: Trainer) -> float:
        """Return the value of the network as it is now; NaN if it is not known."""
        is_known = self._last is not None and self._last[0] == num_training_batches(trainer)
        if not is_known and self.has_veto and math.isnan(self.best) and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"{self._owner} is guarded by {self.key!r}, which was not logged, so all epochs are considered. Pass "
                f"another key, or guard=None. Logged were: {', '.join(trainer.callback_metrics)}."
            )
        return self._last[1] if is_known and self._last is not None else math.nan

    def admits(self, value: float) -> bool:
        """Return whether an epoch with this value is close enough to the best; without a veto or any value, all are."""
        slack = self.tolerance + 1e-6  # values are logged in float32
        return math.isnan(self.best) or self._sign * (value - self.best) >= -slack

    def quality(self, value: float) -> float:
        """Return a number that is higher for better values, and lowest for one that is not known."""
        return -math.inf if math.isnan(value) else self._sign * value

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on as it would have."""
        return {"key": self.key, "best": self.best, "has_improved": self.has_improved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint, unless it was guarded by another key or there is no veto any more."""
        if self.has_veto and state_dict["key"] == self.key:
            self.best, self.has_improved = state_dict["best"], state_dict["has_improved"]
