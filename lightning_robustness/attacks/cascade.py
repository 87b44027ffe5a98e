from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_robustness._arguments import check_attack
from lightning_robustness.attacks._classifier import Classifier
from lightning_robustness.attacks.attack import Attack, Budget, Norm, Perturbation, budgets_of, perturb
from lightning_robustness.attacks.pgd import PGD
from lightning_robustness.attacks.square import Square
from lightning_robustness.input_space import InputSpace


@dataclass(frozen=True, kw_only=True, repr=False)
class Cascade(Attack):
    """Several attacks, each of which sees only the samples that those before it did not break.

    A sample counts as broken if any of the attacks breaks it: the success rate is that of the worst case.

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


# The strongest verdict that 16 gradients buy
FAST_PGD: dict[str, Any] = {"steps": 8, "loss": ("cross_entropy", "margin"), "schedule": "shrinking"}
# Other classes that are attacked one by one, as in AutoAttack, if there are as many
_RIVALS = 9
# With 1,000 queries of Square, within a point of AutoAttack
STRONG_PGD: dict[str, Any] = {
    "steps": 20,
    "loss": ("cross_entropy", "margin", *["rivals"] * _RIVALS),
    "schedule": "adaptive",
}
# Budgets where none is given
_EPS: dict[Norm, float] = {"linf": PGD.eps, "l2": 1.0}


def cascade(eps: float | None = None, norm: Norm = "linf", targeted: bool = False, all_steps: bool = False) -> Cascade:
    """Make a cascade that is close to AutoAttack for a fraction of its time.

    Fast PGD, 20 adaptive steps against each of the nine highest rivals of the label, and Square with 1,000 queries;
    each sees only what those before it did not break.

    Example:
        >>> from lightning_robustness.attacks.cascade import cascade
        >>> [type(attack).__name__ for attack in cascade(eps=0.1).attacks]
        ['PGD', 'PGD', 'Square']

    """
    shared = _shared(eps, norm, targeted, all_steps)
    return _cascade(PGD(**FAST_PGD, **shared), _against_rivals(20, shared), Square(num_queries=1000, **shared))


def ensemble(eps: float | None = None, norm: Norm = "linf", targeted: bool = False, all_steps: bool = False) -> Cascade:
    """Make an ensemble like the standard one of AutoAttack (Croce and Hein, 2020) from the attacks here.

    100 adaptive steps with cross-entropy, 40 against each of the nine highest rivals of the label, and Square with
    4,000 queries. Instead of DLR, its loss is the margin, whose direction does not depend on the scale of the logits
    either. As published, there are 100 steps against each rival, the minimum-norm attack FAB, and 5,000 queries: they
    found nothing more where it was tried, and take three times as long.
    """
    shared = _shared(eps, norm, targeted, all_steps)
    return _cascade(
        PGD(steps=100, schedule="adaptive", **shared), _against_rivals(40, shared), Square(num_queries=4000, **shared)
    )


def _shared(eps: float | None, norm: Norm, targeted: bool, all_steps: bool) -> dict[str, Any]:
    eps = _EPS.get(norm, PGD.eps) if eps is None else eps
    return {"eps": eps, "norm": norm, "targeted": targeted, "all_steps": all_steps}


def _against_rivals(steps: int, shared: dict[str, Any]) -> PGD:
    if shared["targeted"]:
        return PGD(steps=steps, schedule="adaptive", loss="margin", **shared)
    return PGD(steps=steps, schedule="adaptive", loss="rivals", restarts=_RIVALS, **shared)


def _cascade(*attacks: PGD | Square) -> Cascade:
    return Cascade(attacks=attacks, targeted=attacks[0].targeted, all_steps=attacks[0].all_steps)
