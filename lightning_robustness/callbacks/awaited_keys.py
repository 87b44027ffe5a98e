"""Keys that callbacks wait for: whether they will be logged, what is better, and new values of them."""

import math
from typing import Literal

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_robustness.callbacks.trainer_access import is_sharded, logged_in_this_epoch
from lightning_robustness.measurement.keys import Key, find_key
from lightning_robustness.utilities.checks import check_option

ExtremeMode = Literal["min", "max"]


def split_key(key: str) -> tuple[str, Key | None]:
    """Split a logged key into its prefix and its entry in the table of keys; outside the table there is no entry.

    Example:
        >>> from lightning_robustness.callbacks.awaited_keys import split_key
        >>> prefix, entry = split_key("val/robustness/asr/pgd")
        >>> prefix, entry.name
        ('val/robustness', 'asr/pgd')
        >>> split_key("val/loss")
        ('robustness', None)

    """
    parts = key.split("/")
    for start in range(1, len(parts)):  # prefixes may have several parts
        entry = find_key("/".join(parts[start:]).removeprefix("debug/"))
        if entry is not None:
            return "/".join(parts[:start]), entry
    return "robustness", None


def mode_of(key: str, mode: ExtremeMode | None) -> ExtremeMode:
    """Return the mode that is given or else the direction that is more robust, by the table of keys.

    Args:
        key: Key of a value, with its prefix.
        mode: ``"min"`` or ``"max"``, or None.

    Raises:
        ValueError: If it is neither given nor in the table, or is something else.

    Example:
        >>> from lightning_robustness.callbacks.awaited_keys import mode_of
        >>> mode_of("robustness/adv_acc/worst", None), mode_of("robustness/fim", None), mode_of("val_loss", "min")
        ('max', 'min', 'min')

    """
    if mode is not None:
        check_option("mode", mode, ExtremeMode)
        return mode
    _, entry = split_key(key)
    if entry is not None and entry.higher_is_better is not None:
        return "max" if entry.higher_is_better else "min"
    raise ValueError(f"Expected argument `mode` to be 'min' or 'max', whichever is better for {key!r}, but got None.")


def check_awaited(trainer: Trainer, owner: Callback, key: str) -> None:
    """Check, where the callbacks of a Trainer tell, that a key will be logged.

    Raises:
        MisconfigurationException: If it will not.

    """
    keys = _promised(trainer)
    prefixes = tuple({f"{promised.split('/')[0]}/" for promised in keys})
    names = {promised.split("/")[-1] for promised in keys} - {"acc"}
    # Any other key may be the module's own, unless it looks like one of theirs
    if key not in keys and (key.startswith(prefixes) or key.split("/")[-1] in names):
        reason = f", since {type(trainer.strategy).__name__} shards the parameters" if is_sharded(trainer) else ""
        raise MisconfigurationException(
            f"{type(owner).__name__} waits for {key!r}, which will not be logged{reason}. These keys will be: "
            f"{', '.join(keys)}."
        )


def check_default_guard(trainer: Trainer, owner: Callback, guard: str) -> None:
    """Check that a callback of a Trainer will log the key of a guard that the user did not name.

    Raises:
        MisconfigurationException: If none will.

    """
    if guard not in _promised(trainer):
        others = [f"guard={key!r}" for key in _promised(trainer) if key.endswith("/acc")]
        remedy = " or ".join([*others, "the key of a clean accuracy that the module logs", "guard=None"])
        raise MisconfigurationException(
            f"{type(owner).__name__} is guarded by {guard!r}, which will not be logged. Pass {remedy}."
        )


def new_value(trainer: Trainer, key: str) -> float | None:
    """Return the value that was logged in the validation epoch under way; None if there is none or it is not finite.

    Every process must call it: they decide alike, on the mean, if the module logs the value of each process.
    """
    return last_value(trainer, key) if key in logged_in_this_epoch(trainer) else None


def last_value(trainer: Trainer, key: str) -> float | None:
    """Return the value that was logged last, of whatever age; otherwise the same as ``new_value``."""
    logged = trainer.callback_metrics.get(key)
    if logged is None:
        return None
    value = trainer.strategy.reduce(logged.to(trainer.strategy.root_device).float().mean(), reduce_op="mean").item()
    return value if math.isfinite(value) else None


def came_late(trainer: Trainer, key: str) -> bool:
    """Return whether callbacks such as the monitor say in ``late_keys`` that a value came after the last validation."""
    return any(key in getattr(callback, "late_keys", ()) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def _promised(trainer: Trainer) -> list[str]:
    """Return the keys that callbacks such as the monitor say in ``keys_under`` that they will log."""
    callbacks = [callback for callback in trainer.callbacks if hasattr(callback, "keys_under")]  # type: ignore[attr-defined]
    return [key for callback in callbacks for key in callback.keys_under(trainer)]
