from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_robustness.attacks import Attack, get_attack
from lightning_robustness.attacks.budget import check_budget, warn_of_tiny_budget
from lightning_robustness.utilities.input_space import InputSpace

AttackLike = str | Attack | Callable[..., Any]
# For attacks given by name, where the defaults are too expensive to be repeated during training
_OPTIONS = {"square": {"num_queries": 200}}


def name_attacks(
    attacks: Iterable[AttackLike] | Mapping[str, AttackLike], eps: float | None = None
) -> dict[str, Callable[..., Any]]:
    """Get attacks by the names that their values are reported under.

    Args:
        attacks: Names that ``get_attack`` knows, attacks or other callables; a mapping sets the names. Square, by name,
            takes 200 queries, the number of the RDI paper for CIFAR, since its usual 5,000 would cost more than the
            training that is watched.
        eps: Budget of attacks that are given by name.

    Raises:
        ValueError: If an attack is unknown or targeted, or two have the same name.

    Example:
        >>> from lightning_robustness.attacks import PGD
        >>> from lightning_robustness.measurement.attack_names import name_attacks
        >>> list(name_attacks(["square", "torchattacks:DeepFool", PGD(steps=100)], eps=0.1))
        ['square', 'deepfool', 'pgd']

    """
    if isinstance(attacks, str) or callable(attacks):
        raise ValueError(f"Expected argument `attacks` to be a list but got {attacks!r}. Pass [{attacks!r}].")
    pairs = attacks.items() if isinstance(attacks, Mapping) else [(_default_name(attack), attack) for attack in attacks]
    named: dict[str, Callable[..., Any]] = {}
    for name, attack in pairs:
        if name in named:
            raise ValueError(
                f"Expected attacks of different names but got {name!r} twice. Pass a mapping, such as "
                f"{{'{name}_weak': ..., '{name}_strong': ...}}."
            )
        options: dict[str, Any] = {"eps": eps, **_OPTIONS.get(attack, {})} if isinstance(attack, str) else {}
        named[name] = get_attack(attack, **options)
        if getattr(named[name], "targeted", False):
            raise ValueError(
                f"Expected attacks without a target but got {named[name]!r}. A data set has true labels only."
            )
    return named


def check_budgets(attacks: Iterable[Callable[..., Any]], input_space: InputSpace) -> None:
    """Check that budgets fit the range of inputs, and warn of those below one grey level.

    Raises:
        ValueError: If a budget is wider than the range.

    """
    for attack in attacks:
        check_budget(attack, input_space)
        warn_of_tiny_budget(attack, input_space)


def _default_name(attack: AttackLike) -> str:
    if isinstance(attack, str):
        return attack.removeprefix("torchattacks:").lower()
    return str(getattr(attack, "name", getattr(attack, "__name__", type(attack).__name__))).lower()
