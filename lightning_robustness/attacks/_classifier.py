from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_robustness._arguments import check_classes, check_integer, check_labels
from lightning_robustness._isolation.draws import Draws
from lightning_robustness._isolation.sandbox import sandbox
from lightning_robustness._model.access import (
    CHANGED,
    check_differentiable,
    compute_logits,
    mend_gradients,
    nonfinite_rows,
    warn_of_nonfinite_gradients,
)
from lightning_robustness._numbers import at_least_float32
from lightning_robustness.input_space import InputSpace, check_input_space

# What an infinite derivative counts as: the mean slope of a square root over a step of 0.1. With a larger one, nothing
# would be left of an l2 step for other coordinates
_STEEP = 3.0


class Classifier(nn.Module):
    """A model as attacks see it: from un-normalised inputs to logits of at least single precision."""

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
        # Samples with a gradient that is not finite, in the attack under way; None before its first gradient
        self.nonfinite: Tensor | None = None
        self._num_gradients, self._mends = 0, False
        self.is_watched = False  # whether the attack computes gradients by itself
        self._is_normalized = input_space.mean is not None or input_space.std is not None  # else, both steps are saved
        corner = x.new_zeros(1, *x.shape[1:2], *[1] * (x.ndim - 2), dtype=at_least_float32(x.dtype))
        self._mean, self._std = input_space.unnormalize(corner), input_space.scale(corner)
        self._highest_label = highest_label

    def unnormalize(self, x: Tensor) -> Tensor:
        """Map what the model sees to what attacks see, in at least single precision."""
        x = x.to(self._mean.dtype)
        return x * self._std + self._mean if self._is_normalized else x

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
        if self.is_watched and x.requires_grad:
            x = x.view_as(x)
            x.register_hook(self._watch)
        logits = self.from_normalized(self.normalize(x))
        if self._mends and logits.requires_grad:
            mend_gradients(logits, _STEEP)
        return logits

    def gradient(self, x: Tensor, weights: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Run the model on un-normalised inputs and differentiate a weighted sum of the logits of each sample.

        Once a gradient is not finite, derivatives that are not count as zero. To tell means to wait for the device, so
        the first, second, fourth, eighth, ... gradient are looked at: the first projection may make inputs flat.
        """
        x = x.detach().requires_grad_()
        logits = self(x)
        check_differentiable(logits, otherwise="use an attack that needs outputs only, such as Square")
        self._num_gradients = 1 if self.nonfinite is None else self._num_gradients + 1
        is_due = not self._mends and self._num_gradients & (self._num_gradients - 1) == 0
        vectors = weights(logits.detach())
        (gradient,) = torch.autograd.grad(logits, x, vectors, retain_graph=is_due)
        if is_due and self._note(gradient):
            mend_gradients(logits, _STEEP)
            (gradient,) = torch.autograd.grad(logits, x, vectors)
        return logits.detach(), gradient.nan_to_num(0.0, 0.0, 0.0)

    def _note(self, gradient: Tensor) -> bool:
        """Note which samples have a gradient that is not finite, and tell whether any has."""
        nonfinite = nonfinite_rows(gradient)
        if self.nonfinite is None or len(self.nonfinite) == len(nonfinite):
            self.nonfinite = nonfinite
        self._mends = bool(nonfinite.any())
        if self._mends:
            warn_of_nonfinite_gradients()
        return self._mends

    def _watch(self, gradient: Tensor) -> Tensor:
        if not self._mends:
            self._note(gradient)
        return gradient.nan_to_num(0.0, 0.0, 0.0)

    def from_normalized(self, x: Tensor) -> Tensor:
        """Run the model on inputs as it sees them, normalised where it expects that, and return logits."""
        self.num_rows += len(x)
        version = x._version
        logits = compute_logits(self.model, x)
        self.num_classes = logits.shape[1]
        check_classes("y", None, self._highest_label, logits.shape[1])
        if x._version != version:
            raise ValueError(CHANGED)
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
    precise: bool = True,
    positions: Tensor | None = None,
) -> Iterator[tuple[Classifier, Tensor, Tensor]]:
    """Check a batch and open a sandbox in which it can be attacked: the way into every attack."""
    input_space = check_input_space(input_space)
    input_space.check(x)
    highest_label = check_labels("y", y, len(x))
    if positions is not None:
        check_labels("positions", positions, len(x), "Pass the position of each sample in the data set.")
    check_integer("index", index, minimum=0)
    first = 0 if positions is None or len(x) == 0 else int(positions[0])
    with sandbox(model, x, y, seed=seed, index=index + first, eval_mode=eval_mode, precise=precise) as (x, y):
        positions = torch.arange(len(x), device=x.device) if positions is None else positions.to(x.device)
        draws = Draws(positions, seed, index)
        yield Classifier(model, input_space, x, highest_label, draws), x, y.long()
