import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_robustness.attacks.classifier import Classifier
from lightning_robustness.utilities.checks import check_integer
from lightning_robustness.utilities.input_space import InputSpace
from lightning_robustness.utilities.precision import at_least_float32
from lightning_robustness.utilities.sandbox import sandbox

Norm = Literal["linf", "l2"]


class Perturbation(NamedTuple):
    """What an attack did to a batch, one entry a sample; whether the first gradient was zero, if it used gradients."""

    x_adv: Tensor
    queries: Tensor
    zero_gradients: Tensor | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Attack:
    """What the built-in attacks share: calling one attacks a batch and leaves no trace in the model or elsewhere.

    Samples that the attack has nothing to do for, because they are wrong before it (in targeted mode, already at the
    target), come back as they are.

    Args:
        targeted: Whether ``y`` holds labels that the model shall predict, instead of true ones that it shall not.
        all_steps: Whether every sample goes through every step, for an image of full strength: also those that are
            wrong before and those that are broken on the way, which otherwise leave the batch at once.
        progress: Whether to show a progress bar.
        low: Smallest value of inputs, or None for no bound.
        high: Largest value of inputs, or None for no bound.

    """

    targeted: bool = False
    all_steps: bool = False
    progress: bool = False
    low: float | None = 0.0
    high: float | None = 1.0

    def __call__(self, model: Callable[..., Any], x: Tensor, y: Tensor, *, seed: int = 0, index: int = 0) -> Tensor:
        """Attack a batch.

        Args:
            model: Callable from inputs to logits.
            x: Inputs of shape ``(N, ...)``, not normalised, in the range from ``low`` to ``high``.
            y: Labels of shape ``(N,)``.
            seed: Seed of the random numbers that the attack draws.
            index: Second part of the seed, for instance the index of the batch.

        Returns:
            Adversarial inputs, of the shape and dtype of ``x``.

        """
        input_space = InputSpace(self.low, self.high)
        input_space.check(x)
        with sandbox(model, x, y, seed=seed, index=index) as (x, y):
            classifier = Classifier(model, input_space, x, y)
            y = y.long()
            active = torch.arange(len(x), device=x.device)
            if not self.all_steps and len(x):
                with torch.no_grad():
                    active = active[~self.reached(classifier.logits(x), y)]
            x[active] = classifier.normalize(perturb(self, classifier, x, y, active).x_adv[active])
            return x

    @property
    def white_box(self) -> bool | None:
        """Whether the attack uses gradients; None if that is not known."""
        return True

    def perturb(self, model: Classifier, x: Tensor, y: Tensor, active: Tensor) -> Perturbation:
        """Attack the active samples of a batch, given by their indices, within a sandbox."""
        raise NotImplementedError

    def reached(self, logits: Tensor, y: Tensor) -> Tensor:
        """Tell which samples are where the attack wants them."""
        return (logits.argmax(dim=1) == y) == self.targeted

    def __repr__(self) -> str:
        shared = [field.name for field in fields(Attack)]
        own = [field.name for field in fields(self) if field.name not in shared]
        changed = [name for name in shared if getattr(self, name) != getattr(Attack, name)]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in own + changed)})"

    def _iterations(self, number: int) -> Iterable[int]:
        return tqdm(range(number), desc=type(self).__name__, leave=False, disable=not self.progress)

    def _check_number(self, name: str, minimum: float = 0.0, exclusive: bool = False) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < minimum or (exclusive and value == minimum):
            bound = "above" if exclusive else "of at least"
            raise ValueError(f"Expected argument `{name}` to be a finite number {bound} {minimum:g} but got {value!r}.")

    def _check_count(self, name: str, minimum: int = 1) -> None:
        check_integer(name, getattr(self, name), minimum)

    def _check_option(self, name: str, options: Any) -> None:
        value, allowed = getattr(self, name), get_args(options)
        if value not in allowed:
            raise ValueError(f"Expected argument `{name}` to be one of {allowed} but got {value!r}.")


def perturb(
    attack: Callable[..., Any], model: Classifier, x: Tensor, y: Tensor, active: Tensor | None = None
) -> Perturbation:
    """Attack a batch with a built-in attack or any other callable, within a sandbox.

    Args:
        attack: What to run. Its budget is checked if it has attributes ``eps`` and ``norm``, ``"linf"`` or ``"l2"``.
        model: The model as attacks see it.
        x: Un-normalised inputs in its range.
        y: Labels.
        active: Indices of the samples to attack; by default all. Built-in attacks get the whole batch, so that the
            random numbers that they draw for a sample do not depend on which others are active.

    Raises:
        TypeError: If the attack returns something else than a tensor.
        ValueError: If it returns another shape, NaN or infinity, or leaves its budget or the range.

    """
    x = x.to(at_least_float32(x.dtype))
    active = torch.arange(len(x), device=x.device) if active is None else active
    if len(active) == 0:
        return Perturbation(x, torch.zeros_like(y))
    if isinstance(attack, Attack):
        attack = replace(attack, low=model.low, high=model.high)
        perturbation = attack.perturb(model, x, y, active)
    else:
        perturbation = perturb_by_function(attack, model, x, y, active)
    rows = all_or(active, len(x))
    _check_perturbation(attack, model, x[rows], perturbation.x_adv[rows])
    return perturbation


def all_or(rows: Tensor, number: int) -> Tensor | slice:
    """Indices of rows, or all of them as a slice, which gives a view instead of a copy."""
    return slice(None) if len(rows) == number else rows


def perturb_by_function(
    attack: Callable[..., Any], model: Classifier, x: Tensor, y: Tensor, active: Tensor
) -> Perturbation:
    """Attack the active samples with a callable; its queries are an average: which rows were whose is not known."""
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
    eps, norm = getattr(attack, "eps", None), getattr(attack, "norm", None)
    distances = delta.aminmax() if norm != "l2" else (torch.linalg.vector_norm(delta, dim=1).amax(),)
    low, high, *sizes = torch.stack([*x_adv.aminmax(), *distances]).tolist()  # one transfer from the device
    distance = max(abs(size) for size in sizes)
    if not all(math.isfinite(value) for value in (low, high, distance)):
        raise ValueError(f"Expected {attack!r} to return finite inputs but got NaN or infinity.")
    rounding = 16 * torch.finfo(x.dtype).eps * max(1.0, abs(low), abs(high))
    has_budget = isinstance(eps, (int, float)) and norm in get_args(Norm)
    if has_budget and distance > eps + rounding * (1 if norm == "linf" else math.sqrt(delta.shape[1])):
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
