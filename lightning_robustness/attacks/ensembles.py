"""Strong attacks that are made of others."""

from typing import Any

from lightning_robustness.attacks.budget import Norm
from lightning_robustness.attacks.cascade import Cascade
from lightning_robustness.attacks.pgd import PGD
from lightning_robustness.attacks.square import Square

# The strongest verdict that 16 gradients buy
STRONG_PGD: dict[str, Any] = {"steps": 8, "loss": ("cross_entropy", "margin"), "schedule": "shrinking"}
# Budgets where none is given
_EPS: dict[Norm, float] = {"linf": PGD.eps, "l2": 1.0}
# Other classes that are attacked one by one, as in AutoAttack, if there are as many
_RIVALS = 9


def worst(eps: float | None = None, norm: Norm = "linf", targeted: bool = False, all_steps: bool = False) -> Cascade:
    """Make a cascade that is close to AutoAttack for a fraction of its time.

    Strong PGD, 20 adaptive steps against each of the nine highest rivals of the label, and Square with 1,000 queries;
    each sees only what those before it did not break.

    Args:
        eps: Largest distance from the input; by default 8/255, in the l2 norm 1.
        norm: ``"linf"`` or ``"l2"``.
        targeted: Whether labels are those to be predicted after the attack: the margin then takes the place of rivals.
        all_steps: Whether all attacks see all samples and take all steps.

    Example:
        >>> from lightning_robustness.attacks.ensembles import worst
        >>> [type(attack).__name__ for attack in worst(eps=0.1).attacks]
        ['PGD', 'PGD', 'Square']

    """
    shared = _shared(eps, norm, targeted, all_steps)
    return _cascade(PGD(**STRONG_PGD, **shared), _against_rivals(20, shared), Square(num_queries=1000, **shared))


def autoattack(
    eps: float | None = None, norm: Norm = "linf", targeted: bool = False, all_steps: bool = False
) -> Cascade:
    """Make an ensemble like the standard one of AutoAttack (Croce and Hein, 2020) from the attacks here.

    100 adaptive steps with cross-entropy, 40 against each of the nine highest rivals of the label, and Square with
    4,000 queries. Instead of DLR, its loss is the margin, whose direction does not depend on the scale of the logits
    either. As published, there are 100 steps against each rival, the minimum-norm attack FAB, and 5,000 queries: they
    found nothing more where it was tried, and take three times as long.

    Args:
        eps: Largest distance from the input; by default 8/255, in the l2 norm 1.
        norm: ``"linf"`` or ``"l2"``.
        targeted: Whether labels are those to be predicted after the attack: the margin then takes the place of rivals.
        all_steps: Whether all attacks see all samples and take all steps.

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
