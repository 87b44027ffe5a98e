"""Checks of arguments: one place, and one message, for each mistake."""

import math
from numbers import Integral, Real
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn


def check_features_and_preds(
    features: Tensor, preds: Tensor, num_classes: int | None = None, name: str = "preds"
) -> Tensor:
    """Check features and predicted labels and return the features as a matrix."""
    check_tensor("features", features)
    check_integer_tensor(name, preds)
    if features.ndim < 2:
        raise ValueError(
            f"Expected `features` to have shape (N, ...) with at least 2 dimensions but got {tuple(features.shape)}. "
            "For a single sample, pass `features.unsqueeze(0)`."
        )
    if preds.ndim != 1 or len(preds) != len(features):
        raise ValueError(
            f"Expected `{name}` to have shape ({len(features)},), one label for each row of `features`, "
            f"but got {tuple(preds.shape)}."
        )
    if len(preds) == 0:
        return features.reshape(0, features.shape[1:].numel())
    if features.numel() == 0:
        raise ValueError(
            f"Expected `features` to hold at least one value per sample but got shape {tuple(features.shape)}. Pass "
            "the logits, or what enters the classifier head."
        )
    features = features.flatten(1)
    finite = torch.stack(features.detach().aminmax()).isfinite().all()  # a NaN becomes both
    # One transfer from the device for all three values
    low, high, is_finite = torch.stack([preds.min(), preds.max(), finite.to(preds.dtype)]).tolist()
    if low < 0 or (num_classes is not None and high >= num_classes):
        expected = "non-negative" if num_classes is None else f"in the range 0 to {num_classes - 1}"
        raise ValueError(f"Expected labels in `{name}` to be {expected} but got values from {low} to {high}.")
    if not is_finite:
        bad = int((~torch.isfinite(features)).any(dim=1).sum())
        raise ValueError(
            f"Expected `features` to be finite but {bad} of {len(features)} samples hold NaN or infinity. "
            "Check the network for divergence, or leave these samples out."
        )
    return features


def check_tensor(name: str, value: Any) -> None:
    """Check that an argument is a tensor of floating point numbers, such as inputs or features."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return
    if isinstance(value, Tensor):
        came, remedy = f"dtype {value.dtype}", f"Convert it with `{name}.float()`."
    else:
        came, remedy = type(value).__name__, "Pass `torch.as_tensor(values, dtype=torch.float32)`."
    raise TypeError(f"Expected `{name}` to be a floating point tensor but got {came}. {remedy}")


def check_callable(name: str, value: Any, what: str) -> None:
    """Check that an optional argument is a callable."""
    if value is not None and not callable(value):
        raise TypeError(
            f"Expected argument `{name}` to be a callable that takes {what}, or None, but got {value!r}. Pass the "
            "function itself."
        )


def check_functions(forward_fn: Any, batch_fn: Any, embed_fn: Any = None) -> None:
    """Check the callables that adapt a model and its batches."""
    check_callable("forward_fn", forward_fn, "the model and inputs and returns logits")
    check_callable("batch_fn", batch_fn, "a batch and returns inputs and labels")
    check_callable("embed_fn", embed_fn, "the model and what the loader gives and returns embeddings")


def check_model(model: Any) -> None:
    """Check that a model can be called."""
    if callable(model) and not isinstance(model, type):
        return
    came = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
    raise TypeError(
        f"Expected `model` to be a callable from inputs to logits, such as an instance of torch.nn.Module, but got "
        f"{came}. Pass the network itself."
    )


def check_attack(attack: Any, name: str = "attack") -> None:
    """Check that an argument, or an entry of one, is an attack that can be called."""
    if callable(attack) and not isinstance(attack, type):
        return
    if isinstance(attack, type):
        came, remedy = f"the class {attack.__name__}", f"Pass an instance, such as `{attack.__name__}(...)`."
    elif isinstance(attack, str):
        came, remedy = f"the name {attack!r}", f"Pass `get_attack({attack!r})`."
    else:
        came, remedy = type(attack).__name__, "Pass `PGD()`, or a function of your own."
    raise TypeError(
        f"Expected `{name}` to be an attack, a callable (model, x, y) -> x_adv or a name, but got {came}. {remedy}"
    )


def check_module(model: Any, purpose: str) -> None:
    """Check that a model is a module."""
    if not isinstance(model, nn.Module):
        came = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"Expected `model` to be a torch.nn.Module, {purpose}, but got {came}. Wrap it in one.")


def check_head(head: Any) -> None:
    """Check the argument for the classifier head."""
    if head is not None and (not isinstance(head, (str, nn.Module)) or head == ""):
        raise TypeError(
            f"Expected argument `head` to be the name of a submodule, such as 'model.fc', or the module itself but got "
            f"{head!r}. Leave it out to have it found."
        )


def check_device(device: Any) -> None:
    """Check that torch can use a device, or that none is given."""
    try:
        torch.empty(0, device=device)
    except Exception as error:  # of several types, as the device is unknown, absent or not compiled in
        raise ValueError(
            "Expected argument `device` to be a device that torch can use here, such as 'cpu', 'cuda:0' or 'mps', "
            f"but got {device!r}: {str(error).splitlines()[0]}"
        ) from error


def check_integer_tensor(
    name: str, value: Any, remedy: str = "If these are logits, pass `logits.argmax(dim=1)`."
) -> None:
    """Check that an argument is a tensor of integers, such as labels."""
    if not isinstance(value, Tensor):
        raise TypeError(f"Expected `{name}` to be an integer tensor of labels but got {type(value).__name__}. {remedy}")
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"Expected `{name}` to be an integer tensor of labels but got dtype {value.dtype}. {remedy}")


def check_labels(name: str, labels: Tensor, num_samples: int) -> int:
    """Check that there is one non-negative integer label per sample."""
    check_integer_tensor(name, labels)
    if labels.shape != (num_samples,):
        raise ValueError(
            f"Expected `{name}` to have shape ({num_samples},), one label per sample, but got {tuple(labels.shape)}."
        )
    if num_samples == 0:
        return -1
    low, high = torch.stack(labels.aminmax()).tolist()  # one transfer from the device
    if low < 0:
        raise ValueError(f"Expected labels in `{name}` to be non-negative but got values from {low} to {high}.")
    return high


def check_classes(name: str, highest_label: int, num_classes: int) -> None:
    """Check that a model has a class for the highest label."""
    if highest_label >= num_classes:
        raise ValueError(
            f"Expected labels in `{name}` in the range 0 to {num_classes - 1}, for logits of {num_classes} classes, "
            f"but got {highest_label}. Count classes from 0."
        )


def check_not_empty(name: str, value: Tensor) -> None:
    """Check that a batch has samples."""
    if len(value) == 0:
        raise ValueError(
            f"Expected `{name}` to hold at least one sample but got shape {tuple(value.shape)}. Leave "
            "empty batches out."
        )


def check_integer(name: str, value: Any, minimum: int) -> int:
    """Check that an argument is an integer, of Python or NumPy, and return it as a Python one."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise ValueError(f"Expected argument `{name}` to be an integer of at least {minimum} but got {value!r}.")
    return int(value)


def check_flag(name: str, value: Any) -> bool:
    """Check that an argument is True or False, of Python or NumPy, and return it as a Python one."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"Expected argument `{name}` to be True or False but got {value!r}.")
    return bool(value)


def check_share(name: str, value: Any) -> float:
    """Check that an argument is a number above 0 and at most 1 and return it."""
    if not is_number(value) or not 0 < value <= 1:
        raise ValueError(f"Expected argument `{name}` to be a number above 0 and at most 1 but got {value!r}.")
    return float(value)


def check_name(name: str, value: Any) -> str:
    """Check that an argument is a string that is not empty and return it."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"Expected argument `{name}` to be a string that is not empty but got {value!r}.")
    return value


def check_number(name: str, value: Any, minimum: float = 0.0, exclusive: bool = False) -> float:
    """Check that an argument is a finite real number and return it as a Python one."""
    if not is_number(value) or value < minimum or (exclusive and value == minimum):
        bound = "above" if exclusive else "of at least"
        raise ValueError(f"Expected argument `{name}` to be a finite number {bound} {minimum:g} but got {value!r}.")
    return float(value)


def check_option(name: str, value: Any, options: Any) -> None:
    """Check that an argument is one of the values of a ``Literal``."""
    allowed = get_args(options)
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"Expected argument `{name}` to be one of {allowed} but got {value!r}.")


def check_overflow(values: Tensor) -> Tensor:
    """Check that results per sample did not overflow and return them."""
    is_finite = values.isfinite()
    if not is_finite.all():
        bad = int((~is_finite).reshape(len(values), -1).any(dim=1).sum())
        raise ValueError(
            f"Expected results that {values.dtype} can hold but those of {bad} of {len(values)} samples overflow: "
            "logits change too steeply with the inputs. Scale the logits, or pass the model and `x` in float64."
        )
    return values


def is_number(value: Any) -> bool:
    """Return whether a value is a finite real number, of Python or NumPy."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
