from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_robustness.utilities.input_space import InputSpace
from lightning_robustness.utilities.logits import check_differentiable, compute_logits
from lightning_robustness.utilities.precision import at_least_float32


class Classifier(nn.Module):
    """A model as attacks see it: from un-normalised inputs to logits of at least single precision.

    Attributes:
        low: Smallest value that an input may have, or None.
        high: Largest value that an input may have, or None.
        dtype: Precision that the model takes its inputs in.
        num_rows: Samples that went through, all calls together.

    Args:
        model: The model, from normalised inputs to logits.
        input_space: Range and normalisation of its inputs.
        x: A batch as the model sees it, for shape, precision and device.
        y: Labels of that batch, which the model must have classes for.

    Raises:
        TypeError: If the labels are not integers.
        ValueError: If there is not one label for each sample, or a label is negative.

    """

    def __init__(self, model: Callable[..., Any], input_space: InputSpace, x: Tensor, y: Tensor) -> None:
        super().__init__()
        self.training = False
        self.model = model
        # Attacks that ask the first parameter for the device get an answer from models without parameters too
        self.anchor = nn.Parameter(x.new_empty(0), requires_grad=False)
        self.low, self.high, self.dtype = input_space.low, input_space.high, x.dtype
        self.num_rows = 0
        working = at_least_float32(x.dtype)
        corner = x.new_zeros(1, *x.shape[1:2], *[1] * (x.ndim - 2), dtype=working)
        self._is_normalized = input_space.mean is not None or input_space.std is not None
        self._mean, self._std = input_space.unnormalize(corner), input_space.scale(corner)
        self._highest_label = _check_labels(x, y)

    def unnormalize(self, x: Tensor) -> Tensor:
        """Map what the model sees to what attacks see, in at least single precision."""
        return x.to(self._mean.dtype) * self._std + self._mean if self._is_normalized else x.to(self._mean.dtype)

    def normalize(self, x: Tensor) -> Tensor:
        """Map what attacks see to what the model sees."""
        return ((x - self._mean) / self._std if self._is_normalized else x).to(self.dtype)

    def clamp(self, x: Tensor) -> Tensor:
        """Put un-normalised inputs into their range."""
        return x if self.low is None and self.high is None else x.clamp(self.low, self.high)

    def distance(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """Difference of two batches as the model sees them, in un-normalised units, flattened to a matrix."""
        return ((x_adv.to(self._std.dtype) - x.to(self._std.dtype)) * self._std).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """Run the model on un-normalised inputs and return logits."""
        return self.logits(self.normalize(x))

    def gradient(self, x: Tensor, weights: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Run the model on un-normalised inputs and differentiate a weighted sum of the logits of each sample.

        Args:
            x: Inputs.
            weights: Gives the weights, from the logits.

        Returns:
            Logits, and the gradient with respect to the inputs.

        Raises:
            ValueError: If the logits do not depend on the inputs by operations that autograd knows.

        """
        x = x.detach().requires_grad_()
        logits = self(x)
        check_differentiable(logits, otherwise="use an attack that needs outputs only, such as Square")
        (gradient,) = torch.autograd.grad(logits, x, weights(logits.detach()))
        return logits.detach(), gradient

    def logits(self, x: Tensor) -> Tensor:
        """Run the model on inputs as it sees them and return logits.

        Raises:
            ValueError: If the model has no class for the highest label, or changes its inputs in place.

        """
        self.num_rows += len(x)
        version = x._version
        logits = compute_logits(self.model, x)
        if logits.shape[1] <= self._highest_label:
            raise ValueError(
                f"Expected labels in the range 0 to {logits.shape[1] - 1}, for logits of {logits.shape[1]} classes, "
                f"but got {self._highest_label}."
            )
        if x._version != version:
            raise ValueError(
                "Expected the model to leave its inputs as they are but it changed them in place. "
                "Let its forward start with `x = x.clone()`."
            )
        return logits.to(at_least_float32(logits.dtype))


def _check_labels(x: Tensor, y: Tensor) -> int:
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise TypeError(f"Expected argument `y` to be an integer tensor of labels but got dtype {y.dtype}.")
    if y.shape != x.shape[:1]:
        raise ValueError(
            f"Expected argument `y` to have shape ({len(x)},), one label for each input, but got {tuple(y.shape)}."
        )
    if len(y) == 0:
        return -1
    low, high = torch.stack(y.aminmax()).tolist()
    if low < 0:
        raise ValueError(f"Expected labels to be non-negative but got values from {low} to {high}.")
    return high
