"""When an evaluation counts towards the patience of early stopping: once the learning rate has come down."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from lightning.pytorch import Trainer

from lightning_robustness._arguments import check_integer

# Share of its peak to which the learning rate must have fallen, or in one step from the lowest so far to count anew
_FALL = 0.5 * (1 + 1e-6)
# Share of the run after which evaluations count in any case
_LATEST = 0.75


class Evaluation(NamedTuple):
    """A value at an evaluation: whether it counts towards patience, and at which learning rate, relative to the peak.

    ``guard`` is the value of the guard, ``restarts`` whether that was a new best, so that patience starts again.
    """

    value: float
    counts: bool = True
    rate: float = math.inf
    guard: float = math.nan
    restarts: bool = False


class Streak(NamedTuple):
    """Best value, infinite if there is none, and for how many evaluations it has not improved."""

    best: float
    wait: int

    @classmethod
    def of(
        cls,
        evaluations: Iterable[Evaluation],
        is_higher_better: bool,
        min_delta: float = 0.0,
        admits: Callable[[float], bool] = lambda guard: True,
    ) -> "Streak":
        """Count from when the learning rate last halved; evaluations that the guard does not admit improve nothing."""
        sign, best, lowest, wait = 1 if is_higher_better else -1, -math.inf, math.inf, 0
        for value, counts, rate, guard, restarts in evaluations:
            is_better = admits(guard) and sign * value - abs(min_delta) > best
            best = sign * value if is_better else best
            if not counts:  # but it sets the value to beat
                continue
            has_halved = rate <= _FALL * lowest < math.inf
            lowest = min(lowest, rate)
            wait = 0 if is_better or restarts else 1 if has_halved else wait + 1
        return cls(sign * best, wait)


class LearningRateWait:
    """Wait with the patience of early stopping until the learning rate has fallen to half of its peak.

    Robust accuracy stays flat while the learning rate is high, and jumps when it falls. Waiting ends after three
    quarters of the run; without a scheduler or a limit of the run there is none.
    """

    def __init__(self, start_from_epoch: int | None) -> None:
        self.start_from_epoch = start_from_epoch
        if start_from_epoch is not None:
            check_integer("start_from_epoch", start_from_epoch, minimum=0)
        self._peaks: dict[str, float] = {}
        self._rate: float | None = None
        self._waited: tuple[int, bool] | None = None  # last epoch in which an evaluation was judged; whether it counted

    def observe(self, trainer: Trainer) -> None:
        """See the learning rates of a training batch."""
        if self.start_from_epoch is not None:
            return
        rates = _scheduled_rates(trainer)
        for name, rate in rates.items():
            self._peaks[name] = max(rate, self._peaks.get(name, 0.0))
        shares = [rate / self._peaks[name] for name, rate in rates.items() if self._peaks[name] > 0]
        self._rate = max(shares, default=None)

    def judge(self, trainer: Trainer) -> tuple[bool, float]:
        """Tell whether an evaluation counts, and its learning rate relative to the peak."""
        rate, progress = math.inf, progress_of(trainer)
        if self.start_from_epoch is not None:
            counts = trainer.current_epoch >= self.start_from_epoch
        elif self._rate is None or progress is None:
            counts = True
        else:
            counts, rate = self._rate <= _FALL or progress >= _LATEST, self._rate
        if not counts or (self._waited is not None and not self._waited[1]):
            self._waited = trainer.current_epoch, counts
        return counts, rate

    def describe(self) -> str:
        """Say what is waited for."""
        if self.start_from_epoch is not None:
            return f"patience waits for epoch {self.start_from_epoch}"
        rate = f"{self._rate or 0.0:#.2g} of its peak"
        return f"patience waits for the learning rate ({rate}), until {_LATEST:.0%} of the run at the latest"

    @property
    def past(self) -> str:
        """A note on the wait, once it is over."""
        if self._waited is None or not self._waited[1]:
            return ""
        reason = "for the learning rate " if self.start_from_epoch is None else ""
        return f"patience waited {reason}until epoch {self._waited[0]}"

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to continue."""
        return {"peaks": dict(self._peaks), "rate": self._rate, "waited": self._waited}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._peaks, self._rate = dict(state_dict["peaks"]), state_dict["rate"]
        self._waited = state_dict["waited"]


def _scheduled_rates(trainer: Trainer) -> dict[str, float]:
    """Return the rates of all groups of the optimizers that have a scheduler."""
    owners: list[Any] = [getattr(config.scheduler, "optimizer", None) for config in trainer.lr_scheduler_configs]
    optimizers = {id(owner): owner for owner in owners if hasattr(owner, "param_groups")}
    return {
        f"{number}.{index}": float(group["lr"])
        for number, optimizer in enumerate(optimizers.values())
        for index, group in enumerate(optimizer.param_groups)
    }


def progress_of(trainer: Trainer) -> float | None:
    """Return the share of the run that is over; None if it has no limit."""
    pairs = (trainer.current_epoch, trainer.max_epochs), (trainer.global_step, trainer.max_steps)
    return max((done / limit for done, limit in pairs if limit is not None and limit > 0), default=None)
