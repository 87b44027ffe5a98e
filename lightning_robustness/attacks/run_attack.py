from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_robustness._model.access import are_probabilities, check_finite
from lightning_robustness._numbers import accumulation_dtype
from lightning_robustness.attacks._classifier import Classifier, open_classifier
from lightning_robustness.attacks.attack import Attack, check_budgets, craft
from lightning_robustness.attacks.registry import get_attack
from lightning_robustness.input_space import InputSpace


@dataclass(frozen=True, eq=False)
class AttackResult:
    """Result of an attack on a batch, per sample.

    Attributes:
        attack: The attack.
        x_adv: Adversarial inputs as the model sees them, equal to the inputs of samples that were not attacked.
        preds: Predicted labels before the attack.
        adv_preds: Predicted labels of ``x_adv``, from a forward pass after the attack.
        eligible: Samples that the attack can succeed on: right before it or, in targeted mode, not yet at the target.
        success: Those of them that are wrong after it or, in targeted mode, at the target.
        l2: Euclidean distance of ``x_adv`` from the input, in un-normalised units.
        linf: Largest change of a coordinate, in un-normalised units.
        queries: Forward passes (with gradient, for attacks that use one) that the attack took; an average for attacks
            that are not built in.
        zero_gradients: Samples whose first gradient was zero everywhere; None for attacks that do not report it.
        probabilities: Whether the model's outputs look like probabilities, instead of logits.
        deterministic: Whether a second forward pass of the same inputs gave the same outputs.
        nonfinite_gradients: Samples with a gradient that was NaN or infinite, which counted as zero or as
            steep; None for attacks without gradients.

    """

    attack: Callable[..., Any]
    x_adv: Tensor
    preds: Tensor
    adv_preds: Tensor
    eligible: Tensor
    success: Tensor
    l2: Tensor
    linf: Tensor
    queries: Tensor
    zero_gradients: Tensor | None
    probabilities: bool
    deterministic: bool
    nonfinite_gradients: Tensor | None = None

    @property
    def success_rate(self) -> float:
        """Share of the eligible samples on which the attack succeeded; 0 without any."""
        return self.success.sum().item() / max(self.eligible.sum().item(), 1)

    def columns(self) -> dict[str, Tensor]:
        """Return everything there is per sample but the inputs; flags of the batch are repeated for each sample."""
        wide = accumulation_dtype(self.l2.device)
        none = torch.zeros_like(self.success)
        return {
            "preds": self.preds,
            "adv_preds": self.adv_preds,
            "eligible": self.eligible,
            "success": self.success,
            "l2": self.l2.to(wide),
            "linf": self.linf.to(wide),
            "queries": self.queries.long(),
            "tells_gradients": none | (self.zero_gradients is not None),
            "zero_gradients": none if self.zero_gradients is None else self.zero_gradients,
            "nonfinite_gradients": none if self.nonfinite_gradients is None else self.nonfinite_gradients,
            "probabilities": none | self.probabilities,
            "deterministic": none | self.deterministic,
        }

    def __repr__(self) -> str:
        return (
            f"AttackResult({self.attack!r}: {int(self.success.sum())} of {int(self.eligible.sum())} eligible samples "
            f"broken, {len(self.preds)} samples in total)"
        )


def run_attack(
    model: Callable[..., Any],
    attack: str | Callable[..., Any],
    x: Tensor,
    y: Tensor,
    *,
    input_space: InputSpace | None = None,
    seed: int = 0,
    index: int = 0,
    positions: Tensor | None = None,
) -> AttackResult:
    """Attack a batch and measure the result, without a trace in the model, its gradients or random states.

    The attack sees the samples that are classified correctly. The inputs that it returns are checked against its budget
    and the range, and classified once more: that prediction counts.

    Args:
        model: Callable from inputs to logits, or to an output that holds them.
        attack: A built-in attack, a name that ``get_attack`` knows, an instance of an attack of torchattacks, or any
            callable ``(model, x, y) -> x_adv`` on un-normalised inputs.
        x: Inputs as the model sees them, of shape ``(N, ...)``.
        y: Labels of shape ``(N,)``: true ones or, for a targeted attack, targets.
        input_space: Range and normalisation of the inputs; by default [0, 1], not normalised.
        seed: Seed of the random numbers that the attack draws. The result does not depend on what ran before.
        index: Second part of the seed, for instance the number of a training step.
        positions: Position of each sample in the data set, of shape ``(N,)``, by default that in the batch. What a
            built-in attack draws for a sample depends on the seed and its position, not on its batch.

    Returns:
        Adversarial inputs, predictions, success, distortion and cost.

    Raises:
        TypeError: If the inputs are not floating point or the labels not integers.
        ValueError: If inputs are out of range, a budget is wider than that, labels have no class, logits are not
            finite, or the attack returns inputs of another shape, not finite, or outside of its budget or the range.

    Example:
        >>> import torch
        >>> from lightning_robustness.attacks import PGD, run_attack
        >>> model = torch.nn.Linear(2, 2)
        >>> model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
        >>> x, y = torch.tensor([[0.75, 0.5], [1.0, 0.0], [0.25, 0.5]]), torch.tensor([0, 0, 0])
        >>> result = run_attack(model, PGD(eps=0.25, steps=2, start="clean"), x, y)
        >>> result.preds, result.adv_preds, result.success
        (tensor([0, 0, 1]), tensor([1, 0, 1]), tensor([ True, False, False]))
        >>> result.linf, result.queries
        (tensor([0.2500, 0.2500, 0.0000]), tensor([2, 2, 0]))

    """
    attack = get_attack(attack)
    check_budgets([attack], input_space, smallest=0.0)
    targeted = isinstance(attack, Attack) and attack.targeted
    all_steps = isinstance(attack, Attack) and attack.all_steps
    with open_classifier(model, x, y, input_space, seed, index, positions=positions) as (classifier, x, y):
        logits = _logits(classifier, x)
        preds = logits.argmax(dim=1)
        eligible = (preds == y) != targeted
        active = (eligible | all_steps).nonzero().squeeze(1)
        perturbation = craft(attack, classifier, x, y, active)
        adv_preds = preds.clone()
        adv_preds[active] = _logits(classifier, perturbation.x_adv[active]).argmax(dim=1)
        delta = classifier.difference(perturbation.x_adv, x)
        return AttackResult(
            attack=attack,
            x_adv=perturbation.x_adv,
            preds=preds,
            adv_preds=adv_preds,
            eligible=eligible,
            success=eligible & ((adv_preds == y) == targeted),
            l2=torch.linalg.vector_norm(delta, dim=1),
            linf=torch.linalg.vector_norm(delta, ord=torch.inf, dim=1),
            queries=perturbation.queries,
            zero_gradients=perturbation.zero_gradients,
            nonfinite_gradients=perturbation.nonfinite_gradients,
            probabilities=are_probabilities(logits),
            deterministic=_is_deterministic(classifier, x[:8]),
        )


@torch.no_grad()
def _logits(classifier: Classifier, x: Tensor) -> Tensor:
    if len(x) == 0:  # many networks do not take an empty batch
        return x.new_zeros(0, 2)
    logits = classifier.from_normalized(x)
    check_finite(logits)
    return logits


def _is_deterministic(classifier: Classifier, x: Tensor) -> bool:
    """Return whether two passes give the same logits; in batches of one size, since the kernel depends on it."""
    if len(x) == 0:
        return True
    first, second = _logits(classifier, x), _logits(classifier, x)
    rounding = 256 * torch.finfo(x.dtype).eps * first.abs().max().clamp(min=1.0)
    return bool((first - second).abs().max() <= rounding)
