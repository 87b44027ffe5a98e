import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lightning_robustness._arguments import check_attack, check_flag
from lightning_robustness._numbers import at_least_float32
from lightning_robustness._processes import rank_zero_warn
from lightning_robustness.attacks._classifier import Classifier, open_classifier
from lightning_robustness.input_space import InputSpace, check_input_space

Norm = Literal["linf", "l2"]
_ALL = slice(None)
_SMALLEST_BUDGET = 1e-9


class Budget(NamedTuple):
    """Largest perturbation of an attack: ``eps`` in un-normalised units, in ``norm``, None if it does not say."""

    norm: str | None
    eps: float


def budget_of(attack: Callable[..., Any], input_space: InputSpace | None = None) -> Budget | None:
    """Return the budget of an attack: built in, adapted from torchattacks, or any other callable.

    Args:
        attack: The attack. A callable that is not built in has a budget if it has an attribute ``eps`` and, where that
            is to be checked, ``norm``. A cascade has the largest budget of its members, if all are in the same norm.
        input_space: Range of the inputs, by default [0, 1]: defaults of torchattacks are in units of its width.

    Returns:
        The budget, or None if there is none, or not one that holds for all members of a cascade.

    Example:
        >>> from lightning_robustness.attacks import CW, PGD, Cascade, budget_of
        >>> budget_of(PGD(eps=0.25, norm="l2")), budget_of(CW())
        (Budget(norm='l2', eps=0.25), None)
        >>> budget_of(Cascade(attacks=(PGD(eps=0.25), PGD(eps=0.5))))
        Budget(norm='linf', eps=0.5)

    """
    check_attack(attack)
    budgets = budgets_of(attack, check_input_space(input_space))
    known = [budget for budget in budgets if budget is not None]
    if len(known) < len(budgets) or len({budget.norm for budget in known}) > 1:
        return None
    return max(known, key=lambda budget: budget.eps)


def budgets_of(attack: Callable[..., Any], input_space: InputSpace | None = None) -> list[Budget | None]:
    """Return the budget of each member of a cascade, or of any other attack as the only entry."""
    if hasattr(attack, "budgets_in"):  # attacks that have members, or a budget that depends on the range
        return list(attack.budgets_in(check_input_space(input_space)))
    eps = getattr(attack, "eps", None)
    if not isinstance(eps, Real) or isinstance(eps, bool):
        return [None]
    return [Budget(getattr(attack, "norm", None), float(eps))]


def is_minimum_norm(attack: Callable[..., Any], input_space: InputSpace | None = None) -> bool:
    """Return whether an attack looks for the smallest perturbation in l2: it has no ``eps``, and its ``norm`` is l2.

    Example:
        >>> from lightning_robustness.attacks import CW, PGD
        >>> from lightning_robustness.attacks.attack import is_minimum_norm
        >>> is_minimum_norm(CW()), is_minimum_norm(PGD(norm="l2", eps=0.5)), is_minimum_norm(lambda model, x, y: x)
        (True, False, False)

    """
    return getattr(attack, "norm", None) == "l2" and budgets_of(attack, input_space) == [None]


def most_passes(attack: Callable[..., Any]) -> int:
    """Return the largest number of passes that an attack takes for a sample; 0 if it does not say.

    Example:
        >>> from lightning_robustness.attacks import PGD, Square
        >>> from lightning_robustness.attacks.attack import most_passes
        >>> most_passes(PGD(steps=20, restarts=2)), most_passes(Square()), most_passes(lambda model, x, y: x)
        (40, 5000, 0)

    """
    members = getattr(attack, "attacks", None)
    if isinstance(members, tuple):
        return sum(most_passes(member) for member in members)
    if isinstance(passes := getattr(attack, "passes", None), int):
        return passes
    numbers = [getattr(attack, name, None) for name in ("num_queries", "steps")]
    number = next((number for number in numbers if isinstance(number, int)), 0)
    restarts = getattr(attack, "num_restarts", getattr(attack, "binary_search_steps", 1))
    return number * (restarts if isinstance(restarts, int) else 1)


def check_size(eps: float, smallest: float = _SMALLEST_BUDGET) -> None:
    """Check that a budget is not too small to change an input."""
    if eps < smallest:
        raise ValueError(
            f"Expected argument `eps` to be a budget that can change an input in single precision but got {eps}. Pass "
            "a positive number such as 8/255."
        )


def check_budgets(
    attacks: Iterable[Callable[..., Any]], input_space: InputSpace | None, smallest: float = _SMALLEST_BUDGET
) -> None:
    """Check that the budgets of attacks can change inputs, and are in the units of their range.

    Warns where a budget is below one grey level of a range of at least 255, as budgets in the units of [0, 1] are.
    """
    space = check_input_space(input_space)
    low, high = space.low, space.high
    budgets = [budget for attack in attacks for budget in budgets_of(attack, space) if budget is not None]
    for budget in budgets:
        check_size(budget.eps, smallest)
    if low is None or high is None:
        return
    width = high - low
    for budget in budgets:
        if budget.norm == "linf" and budget.eps > width:
            raise ValueError(
                f"Expected `eps` to be at most {width:g}, the width of the range of inputs [{low:g}, {high:g}], but "
                f"got {budget.eps:g}. Budgets are in un-normalised units: 8/255 for pixels in [0, 1], or declare "
                "another range in `input_space`."
            )
    small = [budget.eps for budget in budgets if width >= 255 and 0 < budget.eps < width / 255]
    if small:
        rank_zero_warn(
            f"The budget eps={small[0]:g} is below one grey level of inputs in [{low:g}, {high:g}]: no "
            f"network will look vulnerable. Budgets are in the units of this range: if {small[0]:g} is meant for "
            f"[0, 1], pass `eps={small[0] * width:g}`.",
            stacklevel=1,  # attributed to this line, so that Python shows it once in a run, not once per caller
        )


class Perturbation(NamedTuple):
    """Result of an attack, per sample: inputs, cost and, where known, whether gradients were zero or not finite."""

    x_adv: Tensor
    queries: Tensor
    zero_gradients: Tensor | None = None
    nonfinite_gradients: Tensor | None = None


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
        """Attack a batch."""
        with open_classifier(model, x, y, input_space, seed, index, positions=positions) as (classifier, x, y):
            active = None
            if not self.all_steps and len(x):
                with torch.no_grad():
                    active = (~self.reached(classifier.from_normalized(x), y)).nonzero().squeeze(1)
            return craft(self, classifier, x, y, active).x_adv

    @property
    def white_box(self) -> bool | None:
        """Return whether the attack uses gradients; None if that is not known."""
        return True

    @abstractmethod
    def perturb(self, model: Classifier, x: Tensor, y: Tensor) -> Perturbation:
        """Attack all samples of a batch, within a sandbox; ``model.draws`` are their random numbers."""

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
    """Attack the active samples of a batch, by default all; inputs and results are as the model sees them."""
    if active is None or len(active) == len(x):
        found = perturb(attack, model, model.unnormalize(x), y)
        return found._replace(x_adv=model.normalize(found.x_adv))
    found = perturb(attack, model, model.unnormalize(x), y, active)
    nothing = torch.zeros_like(y, dtype=torch.bool)
    gradients = (found.zero_gradients, found.nonfinite_gradients)
    return Perturbation(
        x.index_copy(0, active, model.normalize(found.x_adv)),
        torch.zeros_like(y).index_copy(0, active, found.queries),
        *(None if flags is None else nothing.index_copy(0, active, flags) for flags in gradients),
    )


def perturb(
    attack: Callable[..., Any], model: Classifier, x: Tensor, y: Tensor, rows: Tensor | slice = _ALL
) -> Perturbation:
    """Attack rows of a batch with a built-in attack or any other callable, within a sandbox; return these rows."""
    x, y = x[rows].to(at_least_float32(x.dtype)), y[rows]
    if len(x) == 0:
        return Perturbation(x, torch.zeros_like(y))
    draws = model.draws
    model.draws, model.nonfinite = draws.rows(rows), None
    found = attack.perturb(model, x, y) if isinstance(attack, Attack) else perturb_by_function(attack, model, x, y)
    model.draws = draws
    _check_perturbation(attack, model, x, found.x_adv)
    if found.nonfinite_gradients is None and model.nonfinite is not None and len(model.nonfinite) == len(x):
        found = found._replace(nonfinite_gradients=model.nonfinite)
    return found


def perturb_by_function(attack: Callable[..., Any], model: Classifier, x: Tensor, y: Tensor) -> Perturbation:
    """Attack a batch with a callable; its queries are an average, since rows cannot be told apart."""
    num_rows = model.num_rows
    model.is_watched = True
    x_adv = attack(model, x.clone(), y)
    model.is_watched = False
    if not isinstance(x_adv, Tensor):
        raise TypeError(f"Expected {attack!r} to return a tensor of adversarial inputs but got {type(x_adv).__name__}.")
    if x_adv.shape != x.shape:
        raise ValueError(
            f"Expected {attack!r} to return inputs of shape {tuple(x.shape)} but got {tuple(x_adv.shape)}."
        )
    queries = torch.full_like(y, math.ceil((model.num_rows - num_rows) / len(x)))
    return Perturbation(torch.empty_like(x).copy_(x_adv.detach()), queries)  # a copy: it may be the attack's own


def _check_perturbation(attack: Callable[..., Any], model: Classifier, x: Tensor, x_adv: Tensor) -> None:
    delta = (x_adv - x).flatten(1)
    norm, eps = budget_of(attack, model.input_space) or (None, math.inf)
    size = torch.linalg.vector_norm(delta, ord=2 if norm == "l2" else torch.inf, dim=1).amax()
    low, high, distance = torch.stack([*x_adv.aminmax(), size]).tolist()  # one transfer from the device
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


@dataclass(frozen=True, kw_only=True, repr=False)
class Cascade(Attack):
    """Several attacks, each of which sees only the samples that those before it did not break.

    A sample counts as broken if any of the attacks breaks it: its success rate is the worst case.

    Args:
        attacks: Attacks, cheap ones first; callables that are not built in work too.
        targeted: Whether ``y`` holds the labels to be predicted after the attack; the attacks must agree.
        all_steps: Whether all attacks see all samples.

    Raises:
        ValueError: If there is no attack, or one is targeted and the cascade is not, or the reverse.

    Example:
        >>> import torch
        >>> from lightning_robustness.attacks import PGD, Cascade, run_attack
        >>> model = torch.nn.Linear(2, 2)
        >>> model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
        >>> x, y = torch.tensor([[0.75, 0.5], [1.0, 0.5]]), torch.tensor([0, 0])
        >>> attack = Cascade(attacks=(PGD(eps=0.25, steps=1, start="clean"), PGD(eps=0.375, steps=1, start="clean")))
        >>> run_attack(model, attack, x, y).linf
        tensor([0.2500, 0.3750])

    """

    attacks: tuple[Callable[..., Any], ...]
    white_box: ClassVar[None] = None  # some members may be, others not

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.attacks, (str, Mapping)) or not isinstance(self.attacks, Iterable):
            raise TypeError(f"Expected argument `attacks` to be a sequence of attacks but got {self.attacks!r}.")
        object.__setattr__(self, "attacks", tuple(self.attacks))
        if not self.attacks:
            raise ValueError("Expected argument `attacks` to hold at least one attack but got none.")
        for attack in self.attacks:
            check_attack(attack, "attacks")
            if isinstance(attack, Attack) and attack.targeted != self.targeted:
                raise ValueError(
                    f"Expected all attacks to have targeted={self.targeted} as the cascade has, but got {attack!r}."
                )

    def budgets_in(self, input_space: InputSpace) -> list[Budget | None]:
        """Return the budgets of all members."""
        return [budget for attack in self.attacks for budget in budgets_of(attack, input_space)]

    def perturb(self, model: Classifier, x: Tensor, y: Tensor) -> Perturbation:
        """Attack all samples of a batch, within a sandbox."""
        x_adv, queries, draws = x.clone(), torch.zeros_like(y), model.draws
        survivors, nonfinite = torch.arange(len(x), device=x.device), torch.zeros_like(y, dtype=torch.bool)
        for number, attack in enumerate(self.attacks):
            model.draws = draws.stream(number)  # a second attack must not try what the first has tried
            found = perturb(attack, model, x, y, survivors)
            # A sample keeps the input that broke it or, if none did, the last attempt
            x_adv[survivors] = found.x_adv
            with torch.no_grad():
                reached = self.reached(model(found.x_adv), y[survivors])
            queries[survivors] += found.queries + 1
            if found.nonfinite_gradients is not None:
                nonfinite[survivors] |= found.nonfinite_gradients
            survivors = survivors[~reached]
            if len(survivors) == 0:
                break
        return Perturbation(x_adv, queries, nonfinite_gradients=nonfinite)
