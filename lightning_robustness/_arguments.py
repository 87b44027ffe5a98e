"""Checks of arguments: one place, and one message, for each mistake."""

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

_ARGMAX = "If these are logits, pass `logits.argmax(dim=1)`."


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
    _check_length(name, preds, len(features))
    if len(preds) == 0:
        return features.reshape(0, features.shape[1:].numel())
    if features.numel() == 0:
        raise ValueError(
            f"Expected `features` to hold at least one value per sample but got shape {tuple(features.shape)}. Pass "
            "the logits, or the input of the classifier head."
        )
    features = features.flatten(1)
    finite = torch.stack(features.detach().aminmax()).isfinite().all()  # a NaN becomes both
    # One transfer from the device for all three values
    low, high, is_finite = torch.stack([preds.min(), preds.max(), finite.to(preds.dtype)]).tolist()
    check_classes(name, low, high, num_classes)
    if not is_finite:
        bad = int((~torch.isfinite(features)).any(dim=1).sum())
        raise ValueError(
            f"Expected `features` to be finite but {bad} of {len(features)} samples hold NaN or infinity. "
            "Check the network for divergence, or leave these samples out."
        )
    return features


def check_tensor(name: str, value: Any) -> None:
    """Check that an argument is a tensor of floating point numbers, such as inputs or features."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        remedy = f"`{name}.float()` and, for pixels up to 255, `InputSpace(high=255)`"
        remedy = remedy if isinstance(value, Tensor) else "`torch.as_tensor(values, dtype=torch.float32)`"
        raise TypeError(f"Expected `{name}` to be a floating point tensor but got {_describe(value)}. Pass {remedy}.")


def check_integer_tensor(name: str, value: Any, remedy: str = _ARGMAX) -> None:
    """Check that an argument is a tensor of integers, such as labels."""
    is_tensor = isinstance(value, Tensor)
    if not is_tensor or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"Expected `{name}` to be an integer tensor but got {_describe(value)}. {remedy}")


def check_labels(name: str, labels: Tensor, num_samples: int, remedy: str = _ARGMAX) -> int:
    """Check that there is one non-negative integer per sample, a label or a position, and return the largest."""
    check_integer_tensor(name, labels, remedy)
    _check_length(name, labels, num_samples)
    if num_samples == 0:
        return -1
    low, high = torch.stack(labels.aminmax()).tolist()  # one transfer from the device
    check_classes(name, low, high)
    return int(high)


def check_classes(
    name: str, low: int | None, high: int, num_classes: int | None = None, remedy: str = "Count from 0."
) -> None:
    """Check that labels from the lowest to the highest one are class indices; None for a lowest one that is known."""
    if (low is not None and low < 0) or (num_classes is not None and high >= num_classes):
        expected = "non-negative" if num_classes is None else f"from 0 to {num_classes - 1}, for {num_classes} classes,"
        came = f"up to {high}" if low is None else f"from {low} to {high}"
        raise ValueError(f"Expected `{name}` to be {expected} but got values {came}. {remedy}")


def _check_length(name: str, labels: Tensor, num_samples: int) -> None:
    if labels.shape != (num_samples,):
        raise ValueError(
            f"Expected `{name}` to have shape ({num_samples},), one value per sample, but got {tuple(labels.shape)}."
        )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"dtype {value.dtype}"
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def check_functions(forward_fn: Any, batch_fn: Any, embed_fn: Any = None) -> None:
    """Check the callables that adapt a model and its batches."""
    for name, value, what in (
        ("forward_fn", forward_fn, "the model and inputs and returns logits"),
        ("batch_fn", batch_fn, "a batch and returns inputs and labels"),
        ("embed_fn", embed_fn, "the model and what the loader gives and returns embeddings"),
    ):
        if value is not None and not callable(value):
            raise TypeError(
                f"Expected argument `{name}` to be a callable that takes {what}, or None, but got {value!r}. Pass the "
                "function itself."
            )


def check_model(model: Any) -> None:
    """Check that a model can be called."""
    if not callable(model) or isinstance(model, type):
        raise TypeError(
            f"Expected `model` to be a callable from inputs to logits, such as an instance of torch.nn.Module, but got "
            f"{_describe(model)}. Pass the network itself."
        )


def check_module(model: Any, purpose: str) -> None:
    """Check that a model is a module."""
    if not isinstance(model, nn.Module):
        remedy = f"Pass an instance, `{model.__name__}(...)`." if isinstance(model, type) else "Wrap it in one."
        raise TypeError(f"Expected `model` to be a torch.nn.Module, {purpose}, but got {_describe(model)}. {remedy}")


def check_attack(attack: Any, name: str = "attack") -> None:
    """Check that an argument, or an entry of one, is an attack that can be called."""
    if callable(attack) and not isinstance(attack, type):
        return
    if isinstance(attack, type):
        remedy = f"an instance, such as `{attack.__name__}(...)`"
    else:
        remedy = f"`get_attack({attack!r})`" if isinstance(attack, str) else "`PGD()`, or a function of your own"
    came = f"the name {attack!r}" if isinstance(attack, str) else _describe(attack)
    raise TypeError(
        f"Expected `{name}` to be a callable (model, x, y) -> x_adv or a name but got {came}. Pass {remedy}."
    )


def check_head(head: Any) -> None:
    """Check the argument for the classifier head."""
    if head is not None and (not isinstance(head, (str, nn.Module)) or head == ""):
        raise TypeError(
            f"Expected argument `head` to be the name of a submodule, such as 'model.fc', or the module itself but got "
            f"{head!r}. Omit it to detect the head automatically."
        )


def check_device(device: Any) -> None:
    """Check that torch can use a device, or that none is given."""
    try:
        if torch.empty(0, device=device).is_meta:
            raise ValueError("it holds no values, so that the weights would be lost.")
    except Exception as error:  # of several types, as the device is unknown, absent or not compiled in
        raise ValueError(
            "Expected argument `device` to be a device that torch can use here, such as 'cpu', 'cuda:0' or 'mps', "
            f"but got {device!r}: {str(error).splitlines()[0]}"
        ) from error


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
    if int(value) >= 2**63:
        raise ValueError(f"Expected argument `{name}` to be an integer below 2**63 but got {value!r}.")
    return int(value)


def check_flag(name: str, value: Any) -> bool:
    """Check that an argument is True or False, of Python or NumPy, and return it as a Python one."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"Expected argument `{name}` to be True or False but got {value!r}.")
    return bool(value)


def check_name(name: str, value: Any) -> str:
    """Check that an argument is a string that is not empty and return it."""
    if not isinstance(value, str) or not value.strip(" /\t\n"):
        raise ValueError(f"Expected argument `{name}` to be a string that is not empty but got {value!r}.")
    return value


def check_number(
    name: str, value: Any, minimum: float = 0.0, exclusive: bool = False, maximum: float = math.inf
) -> float:
    """Check that an argument is a finite real number and return it as a Python one."""
    if not is_number(value) or not minimum <= value <= maximum or (exclusive and value == minimum):
        bound = "" if minimum == -math.inf else f" {'above' if exclusive else 'of at least'} {minimum:g}"
        bound += "" if maximum == math.inf else f" and at most {maximum:g}"
        raise ValueError(f"Expected argument `{name}` to be a finite number{bound} but got {value!r}.")
    return float(value)


def check_share(name: str, value: Any) -> None:
    """Check that an argument is a number between 0 and 1, neither of which it may be."""
    if not is_number(value) or not 0 < value < 1:
        raise ValueError(f"Expected argument `{name}` to be a number between 0 and 1, exclusive, but got {value!r}.")


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
            f"Expected results that {values.dtype} can hold but {bad} of {len(values)} samples overflow: "
            "logits change too steeply with the inputs. Scale the logits, or pass the model and `x` in float64."
        )
    return values


def is_number(value: Any) -> bool:
    """Return whether a value is a finite real number, of Python or NumPy."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def read_budgets(name: str, eps: Iterable[Any]) -> list[float]:
    """Return budgets as plain numbers, also from arrays and tensors."""
    try:
        if isinstance(eps, str | Mapping):
            raise TypeError
        return [float(budget) for budget in eps]
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"Expected argument `{name}` to be a sequence of numbers but got {eps!r}. Pass a list, such as [0.1]."
        ) from error
