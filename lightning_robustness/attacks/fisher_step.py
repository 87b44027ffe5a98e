from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from lightning_robustness._arguments import check_number, check_option
from lightning_robustness.attacks._classifier import Classifier
from lightning_robustness.attacks.attack import Attack, Norm, Perturbation
from lightning_robustness.functional._fisher_estimators import FisherMethod, FisherSettings, check_can_hold_steps
from lightning_robustness.functional.fisher_spectral_norm import fisher_and_boundary
from lightning_robustness.input_space import InputSpace


@dataclass(frozen=True, kw_only=True, repr=False)
class FisherStep(Attack):
    r"""One step along the principal eigenvector of the Fisher information, which needs no labels.

    .. math:: x' = x + \epsilon v \quad \text{(l2)} \qquad x' = x + \epsilon \operatorname{sign}(v) \quad \text{(linf)}

    Where :math:`v` is the direction that :func:`~lightning_robustness.functional.fisher_spectral_norm` returns, along
    which the prediction changes most to second order. FGSM is the same step along the gradient of the loss.

    Args:
        eps: Length of the step, in the units of the range.
        norm: ``"linf"`` or ``"l2"``, the norm of the step.
        method: How the direction is computed; see :func:`~lightning_robustness.functional.fisher_spectral_norm`.
        targeted: Not available.
        all_steps: Whether samples that are misclassified before the attack take the step too.

    Raises:
        ValueError: If an argument is out of range or unknown, or targeted mode is requested.

    Example:
        >>> import torch
        >>> from lightning_robustness.attacks import FisherStep
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        >>> FisherStep(eps=0.1, norm="l2")(model, torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
        tensor([[0.4400, 0.4200]])

    """

    eps: float = 8 / 255
    norm: Norm = "linf"
    method: FisherMethod = "auto"
    steps: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("eps", self.eps)
        check_option("norm", self.norm, Norm)
        FisherSettings(self.method)
        if self.targeted:
            raise ValueError(
                "Expected argument `targeted` to be False for FisherStep, which needs no labels, but got True. "
                "Use PGD(steps=1, targeted=True)."
            )

    @property
    def white_box(self) -> bool:
        """Return whether the attack uses gradients."""
        return self.method != "blackbox"

    def perturb(self, model: Classifier, x: Tensor, y: Tensor) -> Perturbation:
        """Attack all samples of a batch, within a sandbox."""
        if self.method == "blackbox":
            check_can_hold_steps(model.dtype)
        settings = FisherSettings(self.method, InputSpace(model.low, model.high), direction=True)
        found = fisher_and_boundary(model, x, settings)
        direction: Any = found.direction
        step = self.eps * (direction.sign() if self.norm == "linf" else direction).to(x.dtype)
        return Perturbation(model.clamp(x + step), found.products, nonfinite_gradients=found.nonfinite_gradients)
