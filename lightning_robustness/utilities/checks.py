from typing import Any

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
    if preds.is_floating_point() or preds.is_complex() or preds.dtype == torch.bool:
        raise TypeError(
            f"Expected `preds` to be an integer tensor of predicted labels but got dtype {preds.dtype}. "
            "If these are logits, pass `logits.argmax(dim=1)`."
        )
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


def check_integer(name: str, value: Any, minimum: int) -> None:
    """Check that an argument is an integer.

    Args:
        name: Name of the argument.
        value: Its value.
        minimum: Smallest integer that is allowed.

    Raises:
        ValueError: If it is something else.

    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"Expected argument `{name}` to be an integer of at least {minimum} but got {value!r}.")
