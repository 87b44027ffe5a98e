"""Attacks of other libraries, on inputs in [0, 1], the only range that these know."""

from abc import abstractmethod

import torch
from torch import Tensor

from lightning_robustness.attacks._classifier import Classifier
from lightning_robustness.attacks.attack import Attack, Perturbation, perturb_by_function
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

    @torch.no_grad()
    def count_classes(self, x: Tensor) -> int:
        """Return the number of classes, by a pass of the first input."""
        return self(x[:1]).shape[1]


class ForeignAttack(Attack):
    """Base of the adapters: inputs are mapped to [0, 1] and back."""

    def perturb(self, model: Classifier, x: Tensor, y: Tensor) -> Perturbation:
        """Attack all samples of a batch, within a sandbox."""
        return perturb_by_function(self._perturb_rows, model, x, y)

    def _perturb_rows(self, model: Classifier, x: Tensor, y: Tensor) -> Tensor:
        low, width = self._range(model.input_space)
        return self._attack(UnitRangeModel(model, low, width), (x - low) / width, y).to(x) * width + low

    @abstractmethod
    def _attack(self, model: UnitRangeModel, x: Tensor, y: Tensor) -> Tensor:
        """Attack inputs in [0, 1]."""

    def _range(self, input_space: InputSpace) -> tuple[float, float]:
        """Return the lower end and the width of a range."""
        low, high = input_space.low, input_space.high
        if low is None or high is None:
            raise ValueError(
                f"Expected inputs with a range for {self!r}, which clamps to [0, 1], but got low={low}, high={high}. "
                "Use an attack of this package, or declare a range in `input_space`."
            )
        return low, high - low


def draw_seed() -> int:
    """Draw a seed from the random state of the sandbox, where a library would take the time."""
    return int(torch.randint(2**31, ()))
