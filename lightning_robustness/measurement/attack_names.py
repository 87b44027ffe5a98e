from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_robustness.attacks import Attack, budget_of, get_attack
from lightning_robustness.utilities.checks import check_name

AttackLike = str | Attack | Callable[..., Any]
DEFAULT_ATTACKS = ("pgd", "cw", "square")
# Names of values that are made of several attacks, or of one that runs at the end of training
WORST, FINAL = "worst", "final"
# Attacks that a name stands for where training is watched, and their options: PGD as published is too weak on robust
# networks, and the 100 gradients of C&W and the 5,000 queries of Square would cost more than the training
_WATCHING: dict[str, tuple[str, dict[str, Any]]] = {
    "pgd": ("strong_pgd", {}),
    "cw": ("minimum_norm_cw", {"initial_steps": 16, "steps": 2}),
    "square": ("square", {"num_queries": 100}),
}
# The same in a sweep, which takes attacks as published: 200 queries are those of the RDI paper for CIFAR
_PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {"square": ("square", {"num_queries": 200})}


def name_attacks(
    attacks: Iterable[AttackLike] | Mapping[str, AttackLike], eps: float | None = None, as_published: bool = False
) -> dict[str, Callable[..., Any]]:
    """Get attacks by the names that their values are reported under.

    ``"pgd"`` by name is ``get_attack("strong_pgd")``, so that a value under this name is the same verdict everywhere;
    pass ``PGD()`` for the published attack. ``"cw"`` by name is ``MinimumNormCW`` with 16 steps of DDN and 2 of Adam,
    ``"square"`` takes 100 queries. ``"worst"`` by name is reported as ``cascade``, since ``worst`` is the worst case of
    all attacks.

    Args:
        attacks: Names that ``get_attack`` knows, attacks or other callables; a mapping sets the names.
        eps: Budget of attacks that are given by name, in the l-infinity norm: attacks in the l2 norm, such as
            ``"pgd_l2"``, keep their own. For another one, pass the attack itself, ``PGD(norm="l2", eps=0.5)``.
        as_published: Whether ``"pgd"`` and ``"cw"`` by name are the published attacks, ``"square"`` takes 200 queries,
            and ``eps`` is the budget of all attacks, as in a sweep.

    Raises:
        ValueError: If an attack is unknown or targeted, two have the same name, or one has a reserved name.

    Example:
        >>> from lightning_robustness.attacks import PGD
        >>> from lightning_robustness.measurement.attack_names import name_attacks
        >>> list(name_attacks(["square", "torchattacks:DeepFool", PGD(steps=100)], eps=0.1))
        ['square', 'deepfool', 'pgd']

    """
    attacks = list_attacks(attacks)
    pairs = attacks.items() if isinstance(attacks, Mapping) else [(_default_name(attack), attack) for attack in attacks]
    named: dict[str, Callable[..., Any]] = {}
    for name, attack in pairs:
        check_name("attacks", name)
        if name in named:
            raise ValueError(
                f"Expected attacks of different names but got {name!r} twice. Pass a mapping, such as "
                f"{{'{name}_weak': ..., '{name}_strong': ...}}."
            )
        if name in (WORST, FINAL):
            raise ValueError(
                f"Expected a name for {attack!r} other than {name!r}, which the worst case of all attacks (worst) and "
                f"the attack at the end of training (final) are reported under. Pass {{'cascade': ...}}, for instance."
            )
        named[name] = _make(attack, eps, as_published) if isinstance(attack, str) else get_attack(attack)
        _check_untargeted(named[name])
    return named


def list_attacks(attacks: Any) -> list[AttackLike] | Mapping[str, AttackLike]:
    """Check that an argument holds attacks and return it as a list or a mapping, which can be gone through twice.

    Raises:
        ValueError: If it is a single attack, or something else.

    """
    if isinstance(attacks, Mapping):
        return attacks
    if isinstance(attacks, str) or callable(attacks):
        raise ValueError(f"Expected argument `attacks` to be a list but got {attacks!r}. Pass [{attacks!r}].")
    if not isinstance(attacks, Iterable):
        raise ValueError(f"Expected argument `attacks` to be a list but got {attacks!r}. Pass [] for none.")
    return list(attacks)


def name_final_attack(attack: AttackLike, eps: float | None = None) -> dict[str, Callable[..., Any]]:
    """Get an attack for a single strong verdict at the end of training, under the name that it is reported under.

    Args:
        attack: A name that ``get_attack`` knows, such as ``"worst"`` or ``"autoattack"``, with its full settings; or an
            attack or other callable.
        eps: Budget of an attack that is given by name.

    Raises:
        ValueError: If the attack is unknown or targeted.

    Example:
        >>> from lightning_robustness.measurement.attack_names import name_final_attack
        >>> list(name_final_attack("worst", eps=0.1))
        ['final']

    """
    return {FINAL: _check_untargeted(get_attack(attack, eps=eps) if isinstance(attack, str) else get_attack(attack))}


def _make(name: str, eps: float | None, as_published: bool) -> Callable[..., Any]:
    name, options = (_PUBLISHED if as_published else _WATCHING).get(name, (name, {}))
    attack = get_attack(name, **options)
    budget = budget_of(attack)
    keeps_budget = not as_published and budget is not None and budget.norm == "l2"
    return attack if keeps_budget else get_attack(name, eps=eps, **options)


def _check_untargeted(attack: Callable[..., Any]) -> Callable[..., Any]:
    if getattr(attack, "targeted", False):
        raise ValueError(f"Expected attacks without a target but got {attack!r}. A data set has true labels only.")
    return attack


def _default_name(attack: AttackLike) -> str:
    if isinstance(attack, str):
        return "cascade" if attack == WORST else attack.removeprefix("torchattacks:").replace(":", "_").lower()
    return str(getattr(attack, "name", getattr(attack, "__name__", type(attack).__name__))).lower()
