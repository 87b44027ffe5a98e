from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_robustness._arguments import check_integer, check_name, check_number, check_option
from lightning_robustness._measurement.meters import SampleMeter
from lightning_robustness._measurement.meters.clever import CleverMeter
from lightning_robustness._measurement.meters.fisher import FisherMeter
from lightning_robustness.attacks import Attack, Budget, budget_of, get_attack
from lightning_robustness.functional.boundary_distance import BoundaryNorm
from lightning_robustness.functional.fisher_spectral_norm import FisherMethod
from lightning_robustness.input_space import InputSpace
from lightning_robustness.metrics._base import Mode

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

    Example:
        >>> from lightning_robustness.attacks import PGD
        >>> from lightning_robustness._measurement.plan import name_attacks
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
    """Check that an argument holds attacks and return it as a list or a mapping, which can be gone through twice."""
    if isinstance(attacks, Mapping):
        return attacks
    if isinstance(attacks, str) or callable(attacks):
        raise ValueError(f"Expected argument `attacks` to be a list but got {attacks!r}. Pass [{attacks!r}].")
    if not isinstance(attacks, Iterable):
        raise ValueError(f"Expected argument `attacks` to be a list but got {attacks!r}. Pass [] for none.")
    return list(attacks)


def name_final_attack(attack: AttackLike, eps: float | None = None) -> dict[str, Callable[..., Any]]:
    """Get an attack for a single strong verdict at the end of training, under the name that it is reported under.

    Example:
        >>> from lightning_robustness._measurement.plan import name_final_attack
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


def make_sample_meters(
    input_space: InputSpace,
    seed: int = 0,
    fim_samples: int = 256,
    fim_method: FisherMethod = "auto",
    clever_samples: int = 0,
    clever_radius: float = 2.0,
    budget: Budget | None = None,
) -> list[SampleMeter]:
    """Make the meters of a fixed sample, in the order in which they run; those of size 0 are not to be used."""
    for name, value in {"fim_samples": fim_samples, "clever_samples": clever_samples, "seed": seed}.items():
        check_integer(name, value, minimum=0)
    check_option("fim_method", fim_method, FisherMethod)
    check_number("clever_radius", clever_radius, exclusive=True)
    norm: BoundaryNorm = "l2" if budget is not None and budget.norm == "l2" else "linf"
    eps = None if budget is None else budget.eps
    return [
        FisherMeter(fim_samples, fim_method, input_space, seed, norm, eps),
        CleverMeter(clever_samples, clever_radius, input_space, seed),
    ]


def common_budget(
    attacks: Iterable[Callable[..., Any]],
    eps: float | None,
    input_space: InputSpace | None = None,
    first: BoundaryNorm = "linf",
) -> Budget | None:
    """Return the budget of a run, so that what has no budget can be compared with attacks that do.

    It is the largest budget of the attacks in the first norm or, where none of them has one, in the other.

    Example:
        >>> from lightning_robustness.attacks import CW, PGD
        >>> from lightning_robustness._measurement.plan import common_budget
        >>> common_budget([CW(), PGD(eps=0.5, norm="l2")], eps=0.1)
        Budget(norm='l2', eps=0.5)
        >>> common_budget([CW()], eps=0.1)
        Budget(norm='linf', eps=0.1)

    """
    budgets = [budget for attack in attacks if (budget := budget_of(attack, input_space)) is not None]
    for norm in ("linf", "l2") if first == "linf" else ("l2", "linf"):
        sizes = [budget.eps for budget in budgets if budget.norm == norm]
        if sizes:
            return Budget(norm, max(sizes))
    return None if eps is None else Budget("linf", eps)


def describe_settings(
    attacks: Mapping[str, Callable[..., Any]],
    attack_samples: int,
    meters: Iterable[SampleMeter],
    mode: Mode,
    input_space: InputSpace,
    seed: int,
) -> dict[str, str]:
    """Describe the settings that values depend on besides the model and the data."""
    return {
        "attacks": "; ".join(f"{name}: {attack!r}" for name, attack in attacks.items()) or "none",
        "attacked": f"at most {attack_samples} samples" if attacks else "none",
        **{meter.title: meter.describe() if meter.size else "none" for meter in meters},
        "RDI and ROBY": f"all samples, mode {mode!r}",
        "input space": repr(input_space),
        "seed": str(seed),
    }
