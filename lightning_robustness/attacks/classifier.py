from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_robustness.utilities.checks import check_classes, check_integer, check_labels
from lightning_robustness.utilities.draws import Draws, check_positions
from lightning_robustness.utilities.input_space import InputSpace, check_input_space
from lightning_robustness.utilities.logits import check_differentiable, compute_logits
from lightning_robustness.utilities.precision import at_least_float32
from lightning_robustness.utilities.sandbox import sandbox


class Classifier(nn.Module):
    """A model as attacks see it: from un-normalised inputs to logits of at least single precision.

    Attributes:
        input_space: Range and normalisation of the inputs.
        low: Smallest value that an input may have, or None.
        high: Largest value that an input may have, or None.
        dtype: Precision that the model takes its inputs in.
        num_rows: Number of samples that went through, over all calls.
        draws: Random numbers for the samples of the batch, the only ones that built-in attacks use.
        num_classes: Number of logits, from the first call on; None before.

    Args:
        model: The model, from normalised inputs to logits.
        input_space: Range and normalisation of its inputs.
        x: A batch as the model sees it, for shape, precision and device.
        highest_label: Largest label of that batch, which the model must have a class for.
        draws: Random numbers for the samples of the batch.

    """

    def __init__(
        self, model: Callable[..., Any], input_space: InputSpace, x: Tensor, highest_label: int, draws: Draws
    ) -> None:
        super().__init__()
        self.training = False
        self.model = model
        # Attacks that ask the first parameter for the device get an answer from models without parameters too
        self.anchor = nn.Parameter(x.new_empty(0), requires_grad=False)
        self.input_space, self.low, self.high = input_space, input_space.low, input_space.high
        self.dtype = x.dtype
        self.num_rows = 0
        self.draws = draws
        self.num_classes: int | None = None
        working = at_least_float32(x.dtype)
        self._is_normalized = input_space.mean is not None or input_space.std is not None
        self._mean, self._std = x.new_zeros((), dtype=working), x.new_ones((), dtype=working)
        if self._is_normalized:
            corner = x.new_zeros(1, *x.shape[1:2], *[1] * (x.ndim - 2), dtype=working)
            self._mean, self._std = input_space.unnormalize(corner), input_space.scale(corner)
        self._highest_label = highest_label

    def unnormalize(self, x: Tensor) -> Tensor:
        """Map what the model sees to what attacks see, in at least single precision."""
        return x.to(self._mean.dtype) * self._std + self._mean if self._is_normalized else x.to(self._mean.dtype)

    def normalize(self, x: Tensor) -> Tensor:
        """Map what attacks see to what the model sees."""
        return ((x - self._mean) / self._std if self._is_normalized else x).to(self.dtype)

    def clamp(self, x: Tensor) -> Tensor:
        """Put un-normalised inputs into their range."""
        return x if self.low is None and self.high is None else x.clamp(self.low, self.high)

    def difference(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """Subtract two batches as the model sees them; in un-normalised units, one row per sample."""
        return ((x_adv.to(self._std.dtype) - x.to(self._std.dtype)) * self._std).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """Run the model on un-normalised inputs and return logits."""
        return self.from_normalized(self.normalize(x))

    def gradient(self, x: Tensor, weights: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Run the model on un-normalised inputs and differentiate a weighted sum of the logits of each sample.

        Args:
            x: Inputs.
            weights: Callable from the logits to the weights.

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

    def from_normalized(self, x: Tensor) -> Tensor:
        """Run the model on inputs as it sees them, normalised where it expects that, and return logits.

        Raises:
            ValueError: If the model has no class for the highest label, or changes its inputs in place.

        """
        self.num_rows += len(x)
        version = x._version
        logits = compute_logits(self.model, x)
        self.num_classes = logits.shape[1]
        check_classes("y", self._highest_label, logits.shape[1])
        if x._version != version:
            raise ValueError(
                "Expected the model to leave its inputs as they are but it changed them in place. "
                "Let its forward start with `x = x.clone()`."
            )
        return logits.to(at_least_float32(logits.dtype))


@contextmanager
def open_classifier(
    model: Callable[..., Any],
    x: Tensor,
    y: Tensor,
    input_space: InputSpace | None = None,
    seed: int = 0,
    index: int = 0,
    eval_mode: bool = True,
    positions: Tensor | None = None,
) -> Iterator[tuple[Classifier, Tensor, Tensor]]:
    """Check a batch and open a sandbox in which it can be attacked: the way into every attack.

    Args:
        model: Callable from inputs to logits.
        x: Inputs as the model sees them, of shape ``(N, ...)``.
        y: Labels of shape ``(N,)``.
        input_space: Range and normalisation of the inputs; by default [0, 1], not normalised.
        seed: Seed of the random numbers inside.
        index: Second part of the seed, for instance the number of a training step.
        eval_mode: Whether the model is attacked in eval mode.
        positions: Position of each sample in the data set, of shape ``(N,)``, by default that in the batch. What is
            drawn for a sample depends on the seed and its position; the global random states inside, which attacks that
            are not built in draw from, depend on the seed and the position of the first sample.

    Yields:
        The model as attacks see it, and copies of the inputs (as the model sees them) and of the labels.

    Raises:
        TypeError: If the inputs are not floating point or the labels not integers.
        ValueError: If inputs are out of range, or there is not one non-negative label and one position per sample.

    """
    input_space = check_input_space(input_space)
    input_space.check(x)
    highest_label = check_labels("y", y, len(x))
    if positions is not None:
        check_positions(positions, len(x))
    check_integer("index", index, minimum=0)
    first = 0 if positions is None or len(x) == 0 else int(positions[0])
    with sandbox(model, x, y, seed=seed, index=index + first, eval_mode=eval_mode) as (x, y):
        positions = torch.arange(len(x), device=x.device) if positions is None else positions.to(x.device)
        draws = Draws(positions, seed, index)
        yield Classifier(model, input_space, x, highest_label, draws), x, y.long()
