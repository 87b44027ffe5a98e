"""Inputs in [0, 1], the only range that other libraries of attacks know."""

import torch
from torch import Tensor

from lightning_robustness.attacks._classifier import Classifier
from lightning_robustness.input_space import InputSpace


class UnitRangeModel(torch.nn.Module):
    """A model that takes inputs in [0, 1]."""

    def __init__(self, model: Classifier, low: float, width: float) -> None:
        super().__init__()
        self.training = False
        self.model, self.low, self.width = model, low, width

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of inputs in [0, 1]."""
        return self.model(x * self.width + self.low)


def range_of(input_space: InputSpace, attack: str) -> tuple[float, float]:
    """Return the lower end and the width of a range."""
    low, high = input_space.low, input_space.high
    if low is None or high is None:
        raise ValueError(
            f"Expected inputs with a range for {attack}, which clamps to [0, 1], but got low={low}, high={high}. "
            "Use an attack of this package, or declare a range in `input_space`."
        )
    return low, high - low
