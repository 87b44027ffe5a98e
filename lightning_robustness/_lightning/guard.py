import math
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_robustness._arguments import check_name, check_number, check_option
from lightning_robustness._lightning.trainer import is_sharded, logged_in_this_epoch, num_training_batches
from lightning_robustness._measurement.keys import Key, find_key, name_of, tag
from lightning_robustness._processes import rank_zero_warn

ExtremeMode = Literal["min", "max"]


def split_key(key: str) -> tuple[str, Key | None]:
    """Split a logged key into its prefix and its entry in the table of keys; outside the table there is no entry.

    Example:
        >>> from lightning_robustness._lightning.guard import split_key
        >>> prefix, entry = split_key("val/robustness/asr/pgd")
        >>> prefix, entry.name
        ('val/robustness', 'asr/pgd')
        >>> split_key("val/loss")
        ('robustness', None)

    """
    parts = key.split("/")
    for start in range(1, len(parts)):  # prefixes may have several parts
        prefix = "/".join(parts[:start]).removesuffix("_details").removesuffix("_trust")
        name = name_of(prefix, key)
        if name is not None:
            return prefix, find_key(name)
    return "robustness", None


def _tag_meant(key: str) -> str:
    """Return the key with the prefix of its group, if it ends in the name of a value; otherwise the key itself."""
    parts = key.split("/")
    for start in range(1, len(parts)):
        prefix, name = "/".join(parts[:start]), "/".join(parts[start:])
        if find_key(name) is not None:
            return tag(prefix.removesuffix("_details").removesuffix("_trust"), name)
    return key


def mode_of(key: str, mode: ExtremeMode | None) -> ExtremeMode:
    """Return the mode that is given or else the direction that is more robust, by the table of keys."""
    if mode is not None:
        check_option("mode", mode, ExtremeMode)
        return mode
    _, entry = split_key(key)
    if find_key(key) is not None:
        raise ValueError(
            f"Expected argument `monitor` to start with the prefix of RobustnessMonitor but got {key!r}. Pass "
            f"{tag('robustness', key)!r}."
        )
    if entry is not None and entry.higher_is_better is not None:
        return "max" if entry.higher_is_better else "min"
    tagged = _tag_meant(key) if entry is None else key
    if tagged != key:
        raise ValueError(
            f"Expected argument `monitor` to be a key as RobustnessMonitor logs it, {tagged!r}, but got {key!r}. Pass "
            "that one or, if this is a key of your own, the `mode`."
        )
    raise ValueError(f"Expected argument `mode` to be 'min' or 'max', whichever is better for {key!r}, but got None.")


def check_awaited(trainer: Trainer, owner: Callback, key: str) -> None:
    """Check, where the callbacks of a Trainer tell, that a key will be logged; warn if none of them logs such keys."""
    keys, entry = _promised(trainer), split_key(key)[1]
    if not keys and entry is not None and entry.name != "acc":
        rank_zero_warn(
            f"{type(owner).__name__} waits for {key!r}, a value of RobustnessMonitor, but there is none. Add "
            "RobustnessMonitor to the callbacks, unless the module logs the value itself."
        )
    prefixes = tuple({f"{promised.split('/')[0]}/" for promised in keys})
    names = {promised.split("/")[-1] for promised in keys} - {"acc"}
    # Any other key may be the module's own, unless it looks like one of theirs
    if key not in keys and (key.startswith(prefixes) or key.split("/")[-1] in names):
        reason = f", since {type(trainer.strategy).__name__} shards the parameters" if is_sharded(trainer) else ""
        raise MisconfigurationException(
            f"{type(owner).__name__} waits for {key!r}, which will not be logged{reason}. These keys will be: "
            f"{', '.join(keys)}."
        )


def check_alone(trainer: Trainer, owner: Callback, prefix: str) -> None:
    """Check that no other callback will log keys of one name under a prefix."""
    taken = [key for key in _promised(trainer) if key.rpartition("/")[0] == prefix]
    if taken:
        raise MisconfigurationException(
            f"Expected {type(owner).__name__} to be alone in logging under {prefix!r}, but another callback logs "
            f"{', '.join(taken)}. Pass another `prefix`."
        )


def check_package(trainer: Trainer, owner: Callback) -> None:
    """Check that a Trainer knows a checkpoint callback as one; ``pytorch_lightning`` would add its own."""
    if owner not in trainer.checkpoint_callbacks:
        raise MisconfigurationException(
            f"Expected the Trainer of `lightning.pytorch` for {type(owner).__name__} but got one of "
            f"`{type(trainer).__module__.split('.')[0]}`, which does not know it as a checkpoint callback: "
            '`test(ckpt_path="best")` would load another epoch. Import `lightning.pytorch` instead of '
            "`pytorch_lightning`; the two are the same code."
        )


def check_default_guard(trainer: Trainer, owner: Callback, guard: str) -> None:
    """Check that a callback of a Trainer will log the key of a guard that the user did not name."""
    keys = _promised(trainer)
    if not keys:
        raise MisconfigurationException(
            f"{type(owner).__name__} is guarded by {guard!r}, a value of RobustnessMonitor, but there is none. Add "
            "RobustnessMonitor to the callbacks or, if the module logs such values itself, pass the key of its clean "
            "accuracy as `guard=`."
        )
    if guard not in keys:
        others = [f"guard={key!r}" for key in keys if key.endswith("/acc")]
        remedy = " or ".join([*others, "the key of a clean accuracy that the module logs", "guard=None"])
        raise MisconfigurationException(
            f"{type(owner).__name__} is guarded by {guard!r}, which will not be logged. Pass {remedy}, or add "
            "a RobustnessMonitor with this prefix to the callbacks."
        )


def agreed_value(trainer: Trainer, key: str, is_new: bool = True) -> float | None:
    """Return the value of the validation epoch under way, or the last one, however old; None if there is none.

    Every process must call it: they decide alike, on the mean of those that have logged one.
    """
    logged = trainer.callback_metrics.get(key)
    if is_new and key not in logged_in_this_epoch(trainer):
        logged = None
    own = torch.zeros(2, dtype=torch.float32, device=trainer.strategy.root_device)
    if logged is not None:
        own = torch.stack([logged.to(own).mean(), torch.ones_like(own[0])])
    total, number = trainer.strategy.reduce(own, reduce_op="sum")
    return (total / number).item() if number else None


def new_value(trainer: Trainer, key: str) -> float | None:
    """Return the value of the validation epoch under way; None if there is none or it is not finite."""
    return _finite(agreed_value(trainer, key))


def last_value(trainer: Trainer, key: str) -> float | None:
    """Return the last logged value, however old; otherwise the same as ``new_value``."""
    return _finite(agreed_value(trainer, key, is_new=False))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def describe_missing(trainer: Trainer, owner: Callback, key: str) -> str:
    """Say that a callback never saw the value that it waits for, and why that may be."""
    name, value = type(owner).__name__, trainer.callback_metrics.get(key)
    if value is None:
        return f"{name} never saw {key!r}. {_list_logged(trainer)}"
    if not value.isfinite().all():
        return (
            f"{name} never saw a finite {key!r}: it was NaN or infinite. Look for a division by zero or a loss that "
            "diverges, or monitor another key."
        )
    return (
        f"{name} never saw {key!r} in validation: it was logged in training alone. "
        "Log it in `validation_step`, or use Lightning's own callback."
    )


def _list_logged(trainer: Trainer) -> str:
    return f"Logged were: {', '.join(trainer.callback_metrics)}." if trainer.callback_metrics else "Nothing was logged."


def reference_key(trainer: Trainer, prefix: str) -> str | None:
    """Return the key of the robust accuracy that the monitor with this prefix logs most often; None without attacks."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        key = callback.reference_under(trainer) if hasattr(callback, "reference_under") else None
        if key is not None and split_key(key)[0] == prefix:
            return str(key)
    return None


def came_late(trainer: Trainer, key: str) -> bool:
    """Return whether callbacks such as the monitor say in ``late_keys`` that a value came after the last validation."""
    return any(key in getattr(callback, "late_keys", ()) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def _promised(trainer: Trainer) -> list[str]:
    """Return the keys that callbacks such as the monitor say in ``keys_under`` that they will log."""
    callbacks = [callback for callback in trainer.callbacks if hasattr(callback, "keys_under")]  # type: ignore[attr-defined]
    return [key for callback in callbacks for key in callback.keys_under(trainer)]


DEFAULT_TOLERANCE = 0.02


class Guard:
    """Admit the epochs of a run whose clean accuracy, or another value, is close to the best so far.

    Without it, a stop on attack-free values, success rates or distortions keeps the first epoch.
    """

    def __init__(self, monitor: str, guard: str | None, tolerance: float | None, mode: ExtremeMode, owner: str) -> None:
        prefix, entry = split_key(monitor)
        self._is_named = guard is not None and check_name("guard", guard) != "auto"
        self.key = str(guard) if self._is_named else f"{prefix}/acc"
        is_robust_accuracy = entry is not None and entry.name.startswith(("adv_acc/", "boundary_acc"))
        is_guarded = tolerance is not None or (entry is not None and not is_robust_accuracy)
        self.has_veto = self._is_named or (guard == "auto" and is_guarded)
        self.tolerance = DEFAULT_TOLERANCE if tolerance is None else check_number("guard_tolerance", tolerance)
        check_option("guard_mode", mode, ExtremeMode)
        self.best = math.nan
        self.has_improved = False  # since somebody set this to False
        self._sign = 1 if mode == "max" else -1
        self._owner = owner
        self._last: tuple[int, float] | None = None
        self._has_warned = False

    def check(self, trainer: Trainer, owner: Callback) -> None:
        """Check, where the callbacks of a Trainer tell, that the value will be logged, if there is a veto."""
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

    def value(self, trainer: Trainer) -> float:
        """Return the value of the current network; NaN if it is not known."""
        is_known = self._last is not None and self._last[0] == num_training_batches(trainer)
        if not is_known and self.has_veto and math.isnan(self.best) and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"{self._owner} is guarded by {self.key!r}, which was not logged, so all epochs are considered. Pass "
                f"another key, or guard=None. {_list_logged(trainer)}"
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
        """Return what a resumed run needs to continue."""
        return {"key": self.key, "best": self.best, "has_improved": self.has_improved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> bool:
        """Go on from a checkpoint, unless it was of another key or there is no veto now; return whether keys agree."""
        self._last = None
        is_same = bool(state_dict["key"] == self.key)
        if self.has_veto and is_same:
            self.best, self.has_improved = state_dict["best"], state_dict["has_improved"]
        return is_same
