"""Inputs and labels of a batch of any common type."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_robustness._arguments import check_classes, check_integer_tensor

_INPUT_NAMES = (
    *("image", "images", "pixel_values", "input_values", "input_features", "inputs_embeds", "input", "inputs", "x"),
    "input_ids",
)
_LABEL_NAMES = ("label", "labels", "target", "targets", "y")
_NOT_CLASSIFICATION = "Expected single-label classification, with one class per sample, but"
_BATCH_FN = "`batch_fn=`, a callable that takes the batch and returns inputs and labels"
_ELSEWHERE = f"If they are elsewhere, pass {_BATCH_FN}."
_ONE_HOT = (
    f"One-hot or soft labels, and any others, can be turned into class indices by {_BATCH_FN}: "
    "`lambda batch: (batch[0], batch[1].argmax(dim=1))`."
)
_WHOLE = "If they are classes, pass `batch_fn=lambda batch: (batch[0], batch[1].long())`."
_SIGNS = "For the two classes -1 and 1, pass `batch_fn=lambda batch: (batch[0], (batch[1] > 0).long())`."


class Batch(NamedTuple):
    """Inputs, labels if there are any, and positions in the data set once they are known.

    ``name`` is the key of the inputs; ``extras`` are the other entries, with a row per sample or one that all share.
    """

    x: Tensor
    y: Tensor | None
    name: str | None = None
    extras: Mapping[str, Tensor] = MappingProxyType({})
    positions: Tensor = torch.zeros(0, dtype=torch.long)

    def labels(self) -> Tensor:
        """Return the labels, which attacks need."""
        return require_labels(self.y, "attacks")

    @property
    def highest_label(self) -> int:
        """The largest label; -1 without labels."""
        return -1 if self.y is None or len(self.y) == 0 else int(self.y.max())

    def first(self, number: int) -> "Batch":
        """Return the first samples."""
        return self.rows(slice(number))

    def rows(self, rows: Tensor | slice) -> "Batch":
        """Return some of the samples, whose positions need not be known."""
        return self._replace(
            x=self.x[rows],
            y=None if self.y is None else self.y[rows],
            extras={name: value if len(value) == 1 else value[rows] for name, value in self.extras.items()},
            positions=self.positions[rows] if len(self.positions) else self.positions,
        )

    def to(self, device: torch.device) -> "Batch":
        """Move inputs and labels to a device; the other entries follow where they are used."""
        return self._replace(x=self.x.to(device), y=None if self.y is None else self.y.to(device))


def read_batch(batch: Any, batch_fn: Callable[[Any], Any] | None = None, soft: bool = False) -> Batch:
    """Find the inputs and the labels of a batch and what else it holds, by name, such as an attention mask."""
    found = _find(batch, batch_fn)
    labels = None if found.y is None else _read_labels(found.x, found.y, soft)
    if batch_fn is None:
        extras = {k: v for k, v in found.extras.items() if isinstance(v, Tensor) and v.shape[:1] == found.x.shape[:1]}
    else:
        extras = _check_extras(found.extras, len(found.x))
    return found._replace(y=labels, extras=extras)


def _check_extras(extras: Any, num_samples: int) -> dict[str, Tensor]:
    others = dict(extras) if isinstance(extras, Mapping) else {}
    others = {name: type(value).__name__ for name, value in others.items() if not isinstance(value, Tensor)}
    if others or not isinstance(extras, Mapping):
        found = ", ".join(f"{kind} for {name!r}" for name, kind in others.items()) or type(extras).__name__
        raise TypeError(
            "Expected the third value of `batch_fn` to be a dictionary of tensors, which `forward` takes by name, "
            f"but got {found}. Leave it out, or return {{'mask': batch[2]}}, for instance."
        )
    for name, value in extras.items():
        if value.shape[:1] != (num_samples,):
            raise ValueError(
                f"Expected the tensors in the third value of `batch_fn` to have {num_samples} rows, one per "
                f"sample, but {name!r} has shape {tuple(value.shape)}. Repeat it for each sample, or leave it out."
            )
    return dict(extras)


def require_labels(y: Tensor | None, needed_by: str, otherwise: str | None = None) -> Tensor:
    """Return labels that have to be there."""
    if y is None:
        raise ValueError(
            f"Expected batches with labels, for {needed_by}, but got none. Pass {_BATCH_FN}"
            f"{'' if otherwise is None else f', or {otherwise}'}."
        )
    return y


def replace_in_batch(
    batch: Any, x: Tensor, batch_fn: Callable[[Any], tuple[Tensor, Tensor | None]] | None = None
) -> Any:
    """Make a batch of the same type with other inputs, and leave the given one unchanged."""
    old = _find(batch, batch_fn).x
    if len(old) == 0 or len(x) == 0 or len(x) % len(old):
        raise ValueError(f"Expected as many inputs as the batch has, {len(old)}, or a multiple, but got {len(x)}.")
    if not _holds(batch, old):
        raise ValueError(
            "Expected `batch_fn` to return inputs that are a tensor of the batch itself, in order to replace them, but "
            "got another one. Prepare inputs in the data set or in `training_step` instead."
        )
    return _replace(batch, old, x, len(x) // len(old))


def _find(batch: Any, batch_fn: Callable[[Any], Any] | None) -> Batch:
    """Find the parts of a batch, of which only the inputs are checked."""
    found = _pick(batch) if batch_fn is None else _call(batch_fn, batch)
    x, y = found.x, found.y
    if not isinstance(x, Tensor) or x.ndim == 0:
        observed = f"one of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(
            f"Expected the inputs of a batch to be a tensor of shape (N, ...) but got {observed}. For other batches, "
            f"pass {_BATCH_FN}."
        )
    if batch_fn is None and (type(y) is int or (isinstance(y, Tensor) and y.ndim == 0)):
        raise TypeError(
            "Expected batches but the loader gives single samples. Pass `DataLoader(dataset, batch_size=128)`."
        )
    is_index = x.ndim == 1 and not x.is_floating_point() and isinstance(y, Tensor) and y.ndim > 1
    if batch_fn is None and isinstance(batch, (tuple, list)) and len(batch) > 2 and is_index:
        raise ValueError(
            "Expected a batch `(x, y, ...)` but the first entry looks like indices and the second like inputs. Pass "
            "`batch_fn=lambda batch: (batch[1], batch[2])`."
        )
    return found


def _call(batch_fn: Callable[[Any], Any], batch: Any) -> Batch:
    result = batch_fn(batch)
    if not isinstance(result, (tuple, list)) or len(result) not in (2, 3):
        kind = type(result).__name__
        found = f"a {kind} of {len(result)}" if isinstance(result, (tuple, list)) else kind
        raise TypeError(
            f"Expected `batch_fn` to return (inputs, labels) or (inputs, labels, dictionary) but got {found}."
        )
    return Batch(result[0], result[1], extras=result[2] if len(result) == 3 else {})


def _pick(batch: Any) -> Batch:
    if isinstance(batch, Tensor):
        return Batch(batch, None)
    entries = _named_entries(batch)
    name = next((name for name in _INPUT_NAMES if name in entries), None)
    if name is not None:
        labels = next((entries[name] for name in _LABEL_NAMES if name in entries), None)
        others = {key: value for key, value in entries.items() if key != name and key not in _LABEL_NAMES}
        return Batch(entries[name], labels, name, others)
    if isinstance(batch, (tuple, list)) and len(batch) > 0:
        return Batch(batch[0], batch[1] if len(batch) > 1 else None)
    observed = f" with {', '.join(map(repr, entries))}" if entries else ""
    raise TypeError(
        "Expected a batch to be a tensor, a tuple or list `(x, y, ...)`, or a mapping, dataclass or named tuple with "
        f"inputs named {', '.join(_INPUT_NAMES)} but got {type(batch).__name__}{observed}. For other batches, pass "
        f"{_BATCH_FN}."
    )


def _named_entries(batch: Any) -> dict[Any, Any]:
    if isinstance(batch, Mapping):
        return dict(batch)
    if dataclasses.is_dataclass(batch):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return batch._asdict() if isinstance(batch, tuple) and hasattr(batch, "_asdict") else {}


def _read_labels(x: Tensor, y: Any, soft: bool) -> Tensor:
    """Bring labels to integers of shape ``(N,)``, or say what they are instead."""
    if isinstance(y, Tensor) and y.shape == (len(x), 1):
        y = y.squeeze(1)
    if isinstance(y, Tensor) and y.shape == x.shape[:1] and not y.is_complex():
        if y.dtype == torch.bool or (y.is_floating_point() and bool(((y == 0) | (y == 1)).all())):
            return y.long()  # as BCEWithLogitsLoss takes them
        if y.is_floating_point() and bool((y.abs() == 1).all()):
            raise ValueError(f"Expected `y` to be classes counted from 0 but they are -1 and 1. {_SIGNS}")
        if y.is_floating_point():
            kind = "whole numbers in floating point" if bool((y == y.round()).all()) else "real numbers"
            raise ValueError(
                f"{_NOT_CLASSIFICATION} the labels are {kind}, from {y.min():g} to {y.max():g}"
                + (f". {_WHOLE}" if kind != "real numbers" else ", as in regression.")
            )
    if isinstance(y, Tensor) and y.is_floating_point():
        return _read_float_labels(x, y, soft)
    check_integer_tensor("y", y, _ONE_HOT)
    if y.shape == x.shape[:1]:
        return y
    if y.ndim > 2 and len(y) == len(x):
        found = "there is a label for each position, as in segmentation"
    elif y.ndim == 2 and len(y) == len(x):
        found = f"there are {y.shape[1]} labels per sample, as in multi-label classification"
    else:
        raise ValueError(
            f"Expected `y` to have shape ({len(x)},), one label per sample, but got {tuple(y.shape)}. {_ELSEWHERE}"
        )
    raise ValueError(f"{_NOT_CLASSIFICATION} {found} ({tuple(y.shape)}). {_ONE_HOT}")


def _read_float_labels(x: Tensor, y: Tensor, soft: bool) -> Tensor:
    if y.shape == x.shape and y.ndim > 2:
        raise ValueError(
            f"{_NOT_CLASSIFICATION} the second entry of the batch looks like other inputs, of shape {tuple(y.shape)}, "
            f"as in Siamese networks. {_ELSEWHERE}"
        )
    are_distributions = y.ndim == 2 and len(y) == len(x) and bool((y >= 0).all())
    are_distributions = are_distributions and bool(((y.sum(dim=1) - 1).abs() < 1e-2).all())
    if soft and are_distributions:
        return y.argmax(dim=1)
    if are_distributions or y.ndim != 2:
        check_integer_tensor("y", y, _ONE_HOT)
    raise ValueError(
        f"{_NOT_CLASSIFICATION} there are {y.shape[1]} numbers per sample that do not sum to 1, as in multi-label "
        f"classification. {_ELSEWHERE}"
    )


def check_label_range(y: Tensor, num_classes: int) -> None:
    """Check that labels belong to the classes of a model."""
    if len(y) == 0:
        return
    low, high = torch.stack(y.aminmax()).tolist()  # one transfer from the device
    if low >= 0 and high < num_classes:
        return
    if low == -1 and bool((y.abs() == 1).all()):
        reason = _SIGNS
    elif low < 0:
        reason = (
            f"Labels such as {low} mark samples without a class, the `ignore_index` of a loss: leave them out, with "
            "`batch_fn=lambda batch: (batch[0][batch[1] >= 0], batch[1][batch[1] >= 0])`."
        )
    elif low > 0 and high == num_classes:
        reason = "If they start at 1, pass `batch_fn=lambda batch: (batch[0], batch[1] - 1)`."
    else:
        reason = (
            "If these are not the labels but something else, such as lengths, pass a `batch_fn=` that returns inputs "
            "and labels: `lambda batch: (batch[0], batch[2])`. If the model returns features instead of logits, pass a "
            "`forward_fn=` that returns logits."
            + (" One output per sample is read as two classes; regression cannot be measured." * (num_classes == 2))
        )
    check_classes("y", low, high, num_classes, reason)


def _parts(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (tuple, list)) else _named_entries(value).values()


def _holds(value: Any, old: Tensor) -> bool:
    return value is old or any(_holds(part, old) for part in _parts(value))


def _replace(value: Any, old: Tensor, new: Tensor, times: int) -> Any:
    if value is old:
        return new
    if times == 1 and not _holds(value, old):
        return value
    if isinstance(value, Tensor):
        has_entries = value.ndim > 0 and len(value) == len(old)
        return value.repeat(times, *[1] * (value.ndim - 1)) if has_entries else value
    if isinstance(value, (tuple, list)):
        if _has_entry_per_sample(value, old):
            return value * times
        return _rebuild_sequence(value, [_replace(part, old, new, times) for part in value])
    entries = _named_entries(value)
    return _rebuild(value, {name: _replace(part, old, new, times) for name, part in entries.items()})


def _has_entry_per_sample(value: tuple[Any, ...] | list[Any], old: Tensor) -> bool:
    # A pair of tensors with two entries each is a pair of columns, not two samples
    are_columns = all(isinstance(part, Tensor) and part.ndim > 0 and len(part) == len(old) for part in value)
    return len(value) == len(old) and not (are_columns or hasattr(value, "_fields") or _holds(value, old))


def _rebuild_sequence(value: tuple[Any, ...] | list[Any], parts: list[Any]) -> Any:
    if isinstance(value, list):
        result = copy.copy(value)
        result[:] = parts
        return result
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def _rebuild(value: Any, entries: dict[Any, Any]) -> Any:
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)(entries)  # type: ignore[call-arg]
    if not entries:
        return value
    result = copy.copy(value)
    for name, entry in entries.items():
        if isinstance(result, MutableMapping):
            result[name] = entry
        else:
            object.__setattr__(result, name, entry)  # a dataclass may be frozen
    return result
