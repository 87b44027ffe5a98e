import math
from typing import Any

from lightning.pytorch import Trainer

from lightning_robustness.callbacks.awaited_keys import ExtremeMode, new_value
from lightning_robustness.callbacks.trainer_access import num_training_batches
from lightning_robustness.utilities.checks import check_name, check_number, check_option
from lightning_robustness.utilities.rank_zero import rank_zero_warn


class Guard:
    """Admit the epochs of a run whose clean accuracy, or another value, is close to the best so far.

    Attack-free values are often best before the network has learnt anything, so that a stop or a checkpoint that looks
    at them alone keeps the first epoch. The best value only ever improves: an epoch that is no longer admitted is never
    admitted again.

    Args:
        key: Key of the value; None admits every epoch.
        tolerance: Distance from the best value within which an epoch is admitted.
        mode: ``"min"`` or ``"max"``, what is better.
        owner: Name of the callback, for warnings.

    Attributes:
        best: The best value so far; NaN before the first.
        has_improved: Whether the best value has improved since ``settle`` was last called.

    Raises:
        ValueError: If the key, the tolerance or the mode is not possible.

    """

    def __init__(self, key: str | None, tolerance: float, mode: ExtremeMode, owner: str) -> None:
        self.key = key if key is None else check_name("guard", key)
        self.tolerance = check_number("tolerance", tolerance)
        check_option("guard_mode", mode, ExtremeMode)
        self.best = math.nan
        self.has_improved = False
        self._sign = 1 if mode == "max" else -1
        self._owner = owner
        self._last: tuple[int, float] | None = None
        self._has_warned = False

    def observe(self, trainer: Trainer) -> None:
        """See what was logged in the validation epoch that ends."""
        value = None if self.key is None else new_value(trainer, self.key)
        if value is None:
            return
        self._last = num_training_batches(trainer), value
        if math.isnan(self.best) or self._sign * value > self._sign * self.best:
            self.best, self.has_improved = value, True

    def settle(self) -> None:
        """Note that an improvement has been taken into account."""
        self.has_improved = False

    def value(self, trainer: Trainer) -> float:
        """Return the value of the network as it is now; NaN if it is not known."""
        is_known = self._last is not None and self._last[0] == num_training_batches(trainer)
        if not is_known and self.key is not None and math.isnan(self.best) and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"{self._owner} is guarded by {self.key!r}, which was not logged, so all epochs are considered. Pass "
                f"another key, or guard=None. Logged were: {', '.join(trainer.callback_metrics)}."
            )
        return self._last[1] if is_known and self._last is not None else math.nan

    def admits(self, value: float) -> bool:
        """Return whether an epoch with this value is close enough to the best; without any value, all are."""
        slack = self.tolerance + 1e-6  # values are logged in float32
        return math.isnan(self.best) or self._sign * (value - self.best) >= -slack

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on as it would have."""
        return {"key": self.key, "best": self.best, "has_improved": self.has_improved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint, unless it was guarded by another key."""
        if state_dict["key"] == self.key:
            self.best, self.has_improved = state_dict["best"], state_dict["has_improved"]
