"""Checks of arguments: one place, and one message, for each mistake."""

import math
from numbers import Integral, Real
from typing import Any, get_args

import torch
from torch import Tensor


def check_features_and_preds(features: Tensor, preds: Tensor, num_classes: int | None = None) -> Tensor:
    """Check features and predicted labels and return the features as a matrix.

    Args:
        features: Floating point tensor of shape ``(N, ...)``; dimensions after the first are flattened.
        preds: Integer tensor of shape ``(N,)`` with the predicted labels.
        num_classes: Number of classes, where it is known; labels must then be smaller.

    Raises:
        TypeError: If the features are not floating point or the labels not integers.
        ValueError: If shapes do not fit, labels are out of range or features are not finite.

    """
    if not features.is_floating_point():
        raise TypeError(f"Expected `features` to be a floating point tensor but got dtype {features.dtype}.")
    check_integer_tensor("preds", preds)
    if features.ndim < 2:
        raise ValueError(
            f"Expected `features` to have shape (N, ...) with at least 2 dimensions but got {tuple(features.shape)}. "
            "For a single sample, pass `features.unsqueeze(0)`."
        )
    if preds.ndim != 1 or len(preds) != len(features):
        raise ValueError(
            f"Expected `preds` to have shape ({len(features)},), one label for each row of `features`, "
            f"but got {tuple(preds.shape)}."
        )
    if len(preds) == 0:
        return features.reshape(0, features.shape[1:].numel())
    features = features.flatten(1)
    finite = torch.stack(features.detach().aminmax()).isfinite().all()  # a NaN becomes both
    # One transfer from the device for all three values
    low, high, is_finite = torch.stack([preds.min(), preds.max(), finite.to(preds.dtype)]).tolist()
    if low < 0 or (num_classes is not None and high >= num_classes):
        expected = "non-negative" if num_classes is None else f"in the range 0 to {num_classes - 1}"
        raise ValueError(f"Expected labels in `preds` to be {expected} but got values from {low} to {high}.")
    if not is_finite:
        bad = int((~torch.isfinite(features)).any(dim=1).sum())
        raise ValueError(
            f"Expected `features` to be finite but {bad} of {len(features)} samples hold NaN or infinity. "
            "Check the network for divergence, or leave these samples out."
        )
    return features


def check_integer_tensor(
    name: str, value: Any, remedy: str = "If these are logits, pass `logits.argmax(dim=1)`."
) -> None:
    """Check that an argument is a tensor of integers, such as labels.

    Args:
        name: Name of the argument.
        value: Its value.
        remedy: Advice that ends the message.

    Raises:
        TypeError: If it is not.

    """
    if not isinstance(value, Tensor):
        raise TypeError(f"Expected `{name}` to be an integer tensor of labels but got {type(value).__name__}. {remedy}")
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"Expected `{name}` to be an integer tensor of labels but got dtype {value.dtype}. {remedy}")


def check_labels(name: str, labels: Tensor, num_samples: int) -> int:
    """Check that there is one non-negative integer label per sample.

    Returns:
        The highest label, -1 without any, to be compared with the number of classes where that is known.

    Raises:
        TypeError: If the labels are not integers.
        ValueError: If their number is wrong, or one is negative.

    """
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


def check_integer(name: str, value: Any, minimum: int) -> int:
    """Check that an argument is an integer, of Python or NumPy, and return it as a Python one.

    Raises:
        ValueError: If it is something else, or below the minimum.

    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise ValueError(f"Expected argument `{name}` to be an integer of at least {minimum} but got {value!r}.")
    return int(value)


def check_number(name: str, value: Any, minimum: float = 0.0, exclusive: bool = False) -> float:
    """Check that an argument is a finite real number and return it as a Python one.

    Args:
        name: Name of the argument.
        value: Its value.
        minimum: Smallest number that is allowed.
        exclusive: Whether the minimum itself is not allowed.

    Raises:
        ValueError: If it is something else, or too small.

    """
    is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < minimum or (exclusive and value == minimum):
        bound = "above" if exclusive else "of at least"
        raise ValueError(f"Expected argument `{name}` to be a finite number {bound} {minimum:g} but got {value!r}.")
    return float(value)


def check_option(name: str, value: Any, options: Any) -> None:
    """Check that an argument is one of the values of a ``Literal``.

    Raises:
        ValueError: If it is something else.

    """
    allowed = get_args(options)
    if value not in allowed:
        raise ValueError(f"Expected argument `{name}` to be one of {allowed} but got {value!r}.")
