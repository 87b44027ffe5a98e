import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from lightning_robustness.attacks.budget import Norm, budget_of
from lightning_robustness.attacks.classifier import Classifier, open_classifier
from lightning_robustness.utilities.checks import check_flag
from lightning_robustness.utilities.input_space import InputSpace
from lightning_robustness.utilities.precision import at_least_float32


class Perturbation(NamedTuple):
    """Result of an attack, per sample: inputs, cost and, if it used gradients, whether the first one was zero."""

    x_adv: Tensor
    queries: Tensor
    zero_gradients: Tensor | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Attack(ABC):
    """Base class of the built-in attacks: calling one attacks a batch and leaves no trace in the model or elsewhere.

    Samples that the attack has nothing to do for, because they are misclassified before it (in targeted mode, already
    at the target), are returned unchanged.

    Args:
        targeted: Whether ``y`` holds the labels to be predicted after the attack, instead of the true labels.
        all_steps: Whether every sample goes through every step, for adversarial inputs of full strength: also samples
            that are misclassified before the attack or during it, which otherwise leave the batch at once.

    """

    targeted: bool = False
    all_steps: bool = False

    def __post_init__(self) -> None:
        for name in ("targeted", "all_steps"):
            check_flag(name, getattr(self, name))

    def __call__(
        self,
        model: Callable[..., Any],
        x: Tensor,
        y: Tensor,
        *,
        input_space: InputSpace | None = None,
        seed: int = 0,
        index: int = 0,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Attack a batch.

        Args:
            model: Callable from inputs to logits.
            x: Inputs of shape ``(N, ...)`` as the model sees them: normalised, if the input space says so.
            y: Labels of shape ``(N,)``.
            input_space: Range and normalisation of the inputs; by default [0, 1], not normalised.
            seed: Seed of the random numbers that the attack draws.
            index: Second part of the seed, for instance the number of a training step.
            positions: Position of each sample in the data set, of shape ``(N,)``, by default that in the batch. What
                the attack draws for a sample depends on the seed and its position.

        Returns:
            Adversarial inputs as the model sees them, of the shape and dtype of ``x``.

        """
        with open_classifier(model, x, y, input_space, seed, index, positions=positions) as (classifier, x, y):
            active = None
            if not self.all_steps and len(x):
                with torch.no_grad():
                    active = (~self.reached(classifier.from_normalized(x), y)).nonzero().squeeze(1)
            return craft(self, classifier, x, y, active).x_adv

    @property
    def white_box(self) -> bool | None:
        """Whether the attack uses gradients; None if that is not known."""
        return True

    @abstractmethod
    def perturb(self, model: Classifier, x: Tensor, y: Tensor, active: Tensor) -> Perturbation:
        """Attack the active samples of a batch, given by their indices, within a sandbox."""

    def reached(self, logits: Tensor, y: Tensor) -> Tensor:
        """Tell which samples the attack has succeeded on."""
        return (logits.argmax(dim=1) == y) == self.targeted

    def __repr__(self) -> str:
        shared = [field.name for field in fields(Attack)]
        own = [field.name for field in fields(self) if field.name not in shared]
        changed = [name for name in shared if getattr(self, name) != getattr(Attack, name)]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in own + changed)})"


def craft(
    attack: Callable[..., Any], model: Classifier, x: Tensor, y: Tensor, active: Tensor | None = None
) -> Perturbation:
    """Attack a batch as ``perturb`` does, but with inputs and adversarial inputs as the model sees them."""
    perturbation = perturb(attack, model, model.unnormalize(x), y, active)
    if active is None:
        return perturbation._replace(x_adv=model.normalize(perturbation.x_adv))
    x_adv = x.clone()
    x_adv[active] = model.normalize(perturbation.x_adv[active])
    return perturbation._replace(x_adv=x_adv)


def perturb(
    attack: Callable[..., Any], model: Classifier, x: Tensor, y: Tensor, active: Tensor | None = None
) -> Perturbation:
    """Attack a batch with a built-in attack or any other callable, within a sandbox.

    Args:
        attack: The attack. Its result is checked against its budget, if ``budget_of`` knows one in a known norm.
        model: The model as attacks see it.
        x: Un-normalised inputs in its range.
        y: Labels.
        active: Indices of the samples to attack, by default all.

    Raises:
        TypeError: If the attack does not return a tensor.
        ValueError: If it returns another shape, NaN or infinity, or leaves its budget or the range.

    """
    x = x.to(at_least_float32(x.dtype))
    active = torch.arange(len(x), device=x.device) if active is None else active
    if len(active) == 0:
        return Perturbation(x, torch.zeros_like(y))
    method = attack.perturb if isinstance(attack, Attack) else partial(perturb_by_function, attack)
    perturbation = method(model, x, y, active)
    rows = all_or(active, len(x))
    _check_perturbation(attack, model, x[rows], perturbation.x_adv[rows])
    return perturbation


def all_or(rows: Tensor, number: int) -> Tensor | slice:
    """Return indices of rows, or a slice if these are all, which gives a view instead of a copy."""
    return slice(None) if len(rows) == number else rows


def perturb_by_function(
    attack: Callable[..., Any], model: Classifier, x: Tensor, y: Tensor, active: Tensor
) -> Perturbation:
    """Attack the active samples with a callable; its queries are an average, since rows cannot be told apart."""
    num_rows, rows = model.num_rows, x[active]
    rows_adv = attack(model, rows.clone(), y[active])
    if not isinstance(rows_adv, Tensor):
        raise TypeError(
            f"Expected {attack!r} to return a tensor of adversarial inputs but got {type(rows_adv).__name__}."
        )
    if rows_adv.shape != rows.shape:
        raise ValueError(
            f"Expected {attack!r} to return inputs of shape {tuple(rows.shape)} but got {tuple(rows_adv.shape)}."
        )
    x_adv, queries = x.clone(), torch.zeros_like(y)
    x_adv[active] = rows_adv.detach().to(x)
    queries[active] = math.ceil((model.num_rows - num_rows) / len(active))
    return Perturbation(x_adv, queries)


def _check_perturbation(attack: Callable[..., Any], model: Classifier, x: Tensor, x_adv: Tensor) -> None:
    delta = (x_adv - x).flatten(1)
    norm, eps = budget_of(attack, model.input_space) or (None, math.inf)
    distances = delta.aminmax() if norm != "l2" else (torch.linalg.vector_norm(delta, dim=1).amax(),)
    low, high, *sizes = torch.stack([*x_adv.aminmax(), *distances]).tolist()  # one transfer from the device
    distance = max(abs(size) for size in sizes)
    if not all(math.isfinite(value) for value in (low, high, distance)):
        raise ValueError(f"Expected {attack!r} to return finite inputs but got NaN or infinity.")
    rounding = 16 * torch.finfo(x.dtype).eps * max(1.0, abs(low), abs(high))
    if norm in get_args(Norm) and distance > eps + rounding * (math.sqrt(delta.shape[1]) if norm == "l2" else 1):
        raise ValueError(
            f"Expected {attack!r} to stay within eps={eps:g} in the {norm} norm but it went {distance:g} far."
        )
    if (model.low is not None and low < model.low - rounding) or (
        model.high is not None and high > model.high + rounding
    ):
        raise ValueError(
            f"Expected {attack!r} to stay in the range [{model.low}, {model.high}] but got values in "
            f"[{low:g}, {high:g}]. Let it clamp to this range, or declare another one in `input_space`."
        )
