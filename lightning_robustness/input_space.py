import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_robustness._arguments import check_tensor, is_number

# Number of values in a batch from which it is evident whether they are normalised
_ENOUGH = 32


@dataclass(frozen=True)
class InputSpace:
    """Range of the inputs, and the normalisation that the loader applied to them.

    Perturbation budgets, distortions and Fisher information are in un-normalised units, like ``low`` and ``high``.
    Wherever an ``input_space`` is None, it means ``InputSpace()``: values in [0, 1] that are not normalised. For
    unbounded data, such as audio features or tables, pass ``InputSpace(low=None, high=None)``.

    Args:
        low: Smallest un-normalised value, or None for no bound.
        high: Largest un-normalised value, or None for no bound.
        mean: Mean that the loader subtracted: a number, or one per channel (dimension 1 of a batch).
        std: Standard deviation that the loader divided by, in the same form.

    Raises:
        ValueError: If a value is not a finite number, the range is empty, a standard deviation is not positive, or mean
            and standard deviation have different numbers of channels.

    Example:
        >>> import torch
        >>> from lightning_robustness.input_space import InputSpace
        >>> space = InputSpace(mean=(0.5, 0.25), std=(0.25, 0.125))
        >>> batch = space.normalize(torch.tensor([[0.0, 1.0]]))
        >>> batch
        tensor([[-2.,  6.]])
        >>> space.unnormalize(batch)
        tensor([[0., 1.]])

    """

    low: float | None = 0.0
    high: float | None = 1.0
    mean: float | Sequence[float] | None = None
    std: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            value = getattr(self, name)
            if value is not None and not is_number(value):
                raise ValueError(f"Expected `{name}` to be a finite number, or None for no bound, but got {value!r}.")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError(f"Expected `low` to be smaller than `high` but got {self.low} and {self.high}.")
        for name in ("mean", "std"):
            object.__setattr__(self, name, _read_statistics(name, getattr(self, name)))
        if self.std is not None and not (torch.as_tensor(self.std) > 0).all():
            raise ValueError(f"Expected `std` to be positive but got {self.std}.")
        lengths = [len(value) if isinstance(value, tuple) else 1 for value in (self.mean, self.std)]
        if lengths[0] != lengths[1] and 1 not in lengths:
            raise ValueError(
                f"Expected `mean` and `std` to have the same number of channels but got {lengths[0]} and {lengths[1]}. "
                "Pass one value per channel, or a single one for all."
            )

    def normalize(self, x: Tensor) -> Tensor:
        """Map un-normalised values to inputs of the model."""
        return (x - self._per_channel("mean", x, 0.0)) / self.scale(x)

    def unnormalize(self, x: Tensor) -> Tensor:
        """Map inputs of the model to un-normalised values."""
        return x * self.scale(x) + self._per_channel("mean", x, 0.0)

    def scale(self, x: Tensor) -> Tensor:
        """Return the standard deviation, in a shape that broadcasts with a batch."""
        return self._per_channel("std", x, 1.0)

    def check(self, x: Tensor) -> None:
        """Check that a batch lies in the range, up to rounding.

        Args:
            x: Floating point tensor of shape ``(N, ...)``, as the model sees it.

        Raises:
            TypeError: If the batch is not floating point.
            ValueError: If it has fewer than two dimensions, or contains NaN, infinity or values outside the range. The
                message gives the observed range and a remedy.

        """
        check_tensor("x", x)
        if x.ndim < 2:
            raise ValueError(
                f"Expected inputs `x` of shape (N, ...) with at least 2 dimensions but got {tuple(x.shape)}. For a "
                "single sample, pass `x.unsqueeze(0)`."
            )
        if len(x) == 0:
            return
        if x.numel() == 0:
            raise ValueError(
                f"Expected inputs `x` with at least one value per sample but got shape {tuple(x.shape)}. Check what "
                "the loader returns."
            )
        is_normalized = self.mean is not None or self.std is not None
        values = self.unnormalize(x.detach()) if is_normalized else x.detach()
        low, high = torch.stack(values.aminmax()).tolist()  # one transfer from the device
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError(
                "Expected inputs to be finite but they hold NaN or infinity. Leave such samples out, or replace these "
                "values with `x.nan_to_num()`."
            )
        rounding = self._rounding(x.dtype)
        if (self.low is not None and low < self.low - rounding) or (
            self.high is not None and high > self.high + rounding
        ):
            raise ValueError(
                f"Expected inputs in the range [{self.low}, {self.high}] but observed [{low:.4g}, {high:.4g}]. "
                + self._remedy(low, high)
            )

    def _rounding(self, dtype: torch.dtype) -> float:
        bounds = [abs(bound) for bound in (self.low, self.high) if bound is not None]
        return 16 * torch.finfo(dtype).eps * max([1.0, *bounds])

    def _remedy(self, low: float, high: float) -> str:
        if self.mean is not None or self.std is not None:
            remedy = f"Does the loader normalise with mean={self.mean} and std={self.std}?"
        elif self._is_overshoot(low, high):
            remedy = (
                "Interpolation and augmentation can overshoot: let the loader end with "
                f"`x.clamp({self.low}, {self.high})`."
            )
        elif low >= 0 and 1 < high <= 255:
            remedy = "For pixels from 0 to 255, pass `InputSpace(high=255)`, with budgets in the same units."
        else:
            remedy = "If the loader normalises its inputs, pass `InputSpace(mean=..., std=...)`."
        return f"{remedy} For unbounded data, pass `InputSpace(low=None, high=None)`, with mean and std if it has them."

    def _is_overshoot(self, low: float, high: float) -> bool:
        """Return whether values leave the range by little, compared with its width."""
        if self.low is None or self.high is None:
            return False
        margin = 0.1 * (self.high - self.low)
        return self.low - margin <= low and high <= self.high + margin

    def _per_channel(self, name: str, x: Tensor, default: float) -> Tensor:
        value = getattr(self, name)
        tensor = torch.as_tensor(default if value is None else value, dtype=x.dtype, device=x.device)
        if tensor.ndim == 0 or len(tensor) == 1:
            return tensor.reshape(())
        if x.ndim < 2 or x.shape[1] != len(tensor):
            raise ValueError(
                f"Expected `{name}` to have one value, or one per channel (dimension 1) of inputs of shape "
                f"{tuple(x.shape)}, but got {len(tensor)}."
            )
        return tensor.reshape(-1, *[1] * (x.ndim - 2))


def check_input_space(input_space: Any, bounded: bool = True) -> InputSpace:
    """Check an argument ``input_space`` and return it; for None, the default."""
    if input_space is None:
        return InputSpace() if bounded else InputSpace(low=None, high=None)
    if not isinstance(input_space, InputSpace):
        raise TypeError(
            f"Expected argument `input_space` to be an InputSpace, or None, but got {input_space!r}. Pass "
            "`InputSpace(low=0.0, high=1.0, mean=..., std=...)`."
        )
    return input_space


def check_normalized(space: InputSpace, x: Tensor) -> None:
    """Check that a batch is normalised if the space says so.

    If a mean is declared but no value is below ``low``, about half of them cannot have been moved there.
    """
    if space.mean is None or space.low is None or space.high is None or x.numel() < _ENOUGH:
        return
    low, high = torch.stack(x.detach().aminmax()).tolist()
    moved = torch.as_tensor(space.mean).min().item() > space.low
    if moved and space.low <= low and high <= space.high:
        raise ValueError(
            f"Expected inputs that the loader normalised with mean={space.mean} and std={space.std} but observed "
            f"values from {low:.4g} to {high:.4g}, which already lie in [{space.low}, {space.high}]. "
            f"If the model normalises them itself, leave mean and std out: `InputSpace(low={space.low}, "
            f"high={space.high})`."
        )


def clip(space: InputSpace, x: Tensor) -> tuple[Tensor, Tensor]:
    """Put values back into the range, and return whether each was outside of it by more than rounding."""
    if space.low is None and space.high is None:
        return x, torch.zeros_like(x, dtype=torch.bool)
    values, rounding = space.unnormalize(x), space._rounding(x.dtype)
    clipped = values.clamp(space.low, space.high)
    outside = (values - clipped).abs() > rounding
    return torch.where(outside, space.normalize(clipped), x), outside


def _read_statistics(name: str, value: Any) -> Any:
    """Check a mean or standard deviation, and return one per channel as a tuple, which can be hashed."""
    if value is None or is_number(value):
        return value
    values = value.tolist() if hasattr(value, "tolist") else value
    values = values if isinstance(values, Sequence) and not isinstance(values, str) else [values]
    if len(values) == 0 or not all(is_number(entry) for entry in values):
        raise ValueError(
            f"Expected `{name}` to be a finite number, or a sequence of one per channel, but got {value!r}. Pass what "
            "the loader normalises with, such as `mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)`."
        )
    return tuple(float(entry) for entry in values)
