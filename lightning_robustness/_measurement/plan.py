import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import Self

from lightning_robustness._arguments import check_attack, check_integer, check_name, check_number, check_option
from lightning_robustness._measurement.meters import Meter
from lightning_robustness._measurement.meters.attack import AttackMeter
from lightning_robustness._measurement.meters.clever import CleverMeter
from lightning_robustness._measurement.meters.fisher import FisherMeter
from lightning_robustness._numbers import write_settings
from lightning_robustness._processes import rank_zero_warn
from lightning_robustness.attacks import CW, PGD, Attack, Budget, budget_of, get_attack
from lightning_robustness.attacks.attack import Norm, check_budgets, check_size, most_passes
from lightning_robustness.attacks.registry import Strength
from lightning_robustness.functional._class_statistics import check_p
from lightning_robustness.functional.boundary_distance import BoundaryNorm
from lightning_robustness.functional.fisher_spectral_norm import FisherMethod
from lightning_robustness.input_space import InputSpace
from lightning_robustness.metrics._base import Storage

AttackLike = str | Attack | Callable[..., Any]
DEFAULT_ATTACKS = ("pgd", "cw", "square")
# Names of values that are made of several attacks, or of one that runs at the end of training
WORST, FINAL = "worst", "final"
_RESERVED = (WORST, FINAL, "worst of all", "clean")  # the last two are curves
# Passes of samples from which on an attack is announced: minutes on a CPU, for a network of a few layers
_MANY_PASSES = 1_200_000


def name_attacks(
    attacks: Iterable[AttackLike] | Mapping[str, AttackLike],
    eps: float | None = None,
    strength: Strength = "fast",
    norm: Norm = "linf",
    argument: str = "attacks",
    is_sweep: bool = False,
) -> dict[str, Callable[..., Any]]:
    """Get attacks by the names that their values are reported under.

    Attacks in the l2 norm keep their own budget where the others' is in l-infinity, except in a sweep.
    """
    check_option("strength", strength, Strength)
    check_option("norm", norm, Norm)
    if eps is not None:
        check_size(check_number("eps", eps, minimum=-math.inf))
    attacks = list_attacks(attacks, argument)
    pairs = attacks.items() if isinstance(attacks, Mapping) else [(_default_name(attack), attack) for attack in attacks]
    named: dict[str, Callable[..., Any]] = {}
    for name, attack in pairs:
        if not isinstance(name, str) or not name.strip(" /\t\n"):
            raise ValueError(f"Expected names of attacks in `{argument}` that are not empty but got {name!r}.")
        if name in named:
            raise ValueError(
                f"Expected attacks of different names in `{argument}` but got {name!r} twice. Pass a mapping, such as "
                f"{{'{name}_weak': ..., '{name}_strong': ...}}, or leave one out."
            )
        if name in _RESERVED:
            raise ValueError(
                f"Expected a name for {attack!r} other than {name!r}: {', '.join(map(repr, _RESERVED))} are reserved, "
                f"for values and curves of their own. Give {attack!r} another name."
            )
        named[name] = _make(attack, argument, eps, strength, norm, is_sweep)
    return named


def announce(attacks: Mapping[str, Callable[..., Any]], num_samples: int, num_budgets: int = 1) -> None:
    """Warn of attacks that will take minutes."""
    for name, attack in attacks.items():
        passes = most_passes(attack)
        if passes * num_samples * num_budgets > _MANY_PASSES:
            each = f" at each of {num_budgets} budgets" if num_budgets > 1 else ""
            rank_zero_warn(
                f"The attack {name} takes up to {passes:,} passes of each of {num_samples:,} samples{each}, which "
                "takes minutes even on small networks. Attack fewer samples with `attack_samples`, or pass an attack "
                "with fewer steps or queries.",
                stacklevel=1,  # once in a run, not once per caller
            )


def _warn_of_published(attacks: Mapping[str, Callable[..., Any]]) -> None:
    """Say how success of the published C&W counts, which for its authors has no limit."""
    names = [name for name, attack in attacks.items() if type(attack) is CW]
    if names:
        rank_zero_warn(
            f"Success of {', '.join(names)}, the C&W attack as published, counts within an l2 budget here. To count it "
            "at any size, as the papers do, pass `strength='paper'`.",
            stacklevel=1,
        )


def list_attacks(attacks: Any, argument: str = "attacks") -> list[AttackLike] | Mapping[str, AttackLike]:
    """Check that an argument holds attacks and return it as a list or a mapping, which can be gone through twice."""
    if isinstance(attacks, Mapping):
        return attacks
    is_one = isinstance(attacks, str) or callable(attacks)
    if isinstance(attacks, Iterable) and not is_one:
        return list(attacks)
    one = f"{attacks.__name__}(...)" if isinstance(attacks, type) else repr(attacks)
    remedy = f"`[{one}]`" if is_one else "a list of names, such as ['pgd'], or [] for none"
    raise ValueError(f"Expected argument `{argument}` to be a list but got {attacks!r}. Pass {remedy}.")


def name_final_attack(
    attack: AttackLike, eps: float | None = None, norm: Norm = "linf"
) -> dict[str, Callable[..., Any]]:
    """Get an attack for a single strong verdict at the end of training, under the name that it is reported under."""
    if isinstance(attack, str):
        check_name("final_attack", attack)
    return {FINAL: _make(attack, "final_attack", eps, "strong", norm)}


def _make(
    given: AttackLike, argument: str, eps: float | None, strength: Strength, norm: Norm, is_sweep: bool = False
) -> Callable[..., Any]:
    if not isinstance(given, str):
        check_attack(given, argument)
    attack = _by_name(given, eps, strength, norm, is_sweep) if isinstance(given, str) else get_attack(given)
    if getattr(attack, "targeted", False):
        raise ValueError(f"Expected attacks without a target but got {attack!r}. A data set has true labels only.")
    return attack


def _by_name(name: str, eps: float | None, strength: Strength, norm: Norm, is_sweep: bool) -> Callable[..., Any]:
    attack = get_attack(name, strength=strength)
    budget = budget_of(attack)
    if norm == "l2" and budget is not None and budget.norm == "linf":
        if eps is None:
            raise ValueError("Expected `eps` with norm='l2' but got None. Pass the l2 budget, such as 0.5.")
        is_foreign = name.startswith("torchattacks:")
        return get_attack(name, eps=eps, strength=strength, norm="L2" if is_foreign else "l2")
    keeps_budget = not is_sweep and norm == "linf" and budget is not None and budget.norm == "l2"
    return attack if keeps_budget else get_attack(name, eps=eps, strength=strength)


def _default_name(attack: AttackLike) -> str:
    if isinstance(attack, str):
        return attack.replace(":", "_").lower()
    attack = get_attack(attack) if callable(attack) else attack  # names instances of torchattacks
    return str(getattr(attack, "name", getattr(attack, "__name__", type(attack).__name__))).lower()


@dataclass(frozen=True)
class Plan:
    """Settings of a measurement that monitor and ``evaluate`` share, checked.

    ``budget`` applies to values without attacks, ``minimum_norm_budget`` to the success of attacks without a budget.
    """

    attacks: Mapping[str, Callable[..., Any]]
    input_space: InputSpace
    attack_samples: int
    fim_samples: int
    fim_method: FisherMethod
    clever_samples: int
    clever_radius: float
    budget: Budget | None
    minimum_norm_budget: Budget | None
    storage: Storage
    batch_size: int
    seed: int
    roby_p: float = 2.0

    def __post_init__(self) -> None:
        for name in ("attack_samples", "fim_samples", "clever_samples", "seed"):
            check_integer(name, getattr(self, name), minimum=0)
        check_integer("batch_size", self.batch_size, minimum=1)
        check_option("fim_method", self.fim_method, FisherMethod)
        check_number("clever_radius", self.clever_radius, exclusive=True)
        check_option("storage", self.storage, Storage)
        check_p(self.roby_p, "roby_p")
        check_budgets(self.attacks.values(), self.input_space)

    @classmethod
    def of(
        cls,
        attacks: Iterable[AttackLike] | Mapping[str, AttackLike],
        eps: float | None,
        input_space: InputSpace,
        attack_samples: int,
        strength: Strength = "fast",
        norm: Norm = "linf",
        boundary_eps: float | None = None,
        **settings: Any,
    ) -> Self:
        """Make a plan of attacks by name, with a budget; values without attacks may have another one."""
        check_integer("attack_samples", attack_samples, minimum=0)
        check_option("norm", norm, Norm)
        named = name_attacks(attacks, eps, strength, norm) if attack_samples else {}
        if norm == "l2" and eps == PGD.eps and (named or boundary_eps is None):
            raise ValueError(
                "Expected `eps` with norm='l2' but got 8/255, the default, which is for l-infinity and next to nothing "
                "in l2. Pass the l2 budget, such as 0.5."
            )
        announce(named, attack_samples)
        if strength != "paper":
            _warn_of_published(named)
        size = eps if boundary_eps is None else boundary_eps
        budget = common_budget(named.values(), size, input_space, first=norm)
        # The papers count what C&W finds for a fixed c, whatever its size
        is_paper = strength == "paper"
        l2_budget = None if is_paper else common_budget(named.values(), eps, input_space, first="l2", otherwise=norm)
        return cls(named, input_space, attack_samples, budget=budget, minimum_norm_budget=l2_budget, **settings)

    @property
    def parts(self) -> list[str]:
        """Names of what is measured besides the attacks."""
        return ["features", *(meter.name for meter in self.meters())]

    def meters(self) -> list[Meter]:
        """Return the meters of the sample, without attacks, in the order in which they run."""
        return [meter for meter in self._all_meters() if meter.size]

    def attack_meters(self, names: Iterable[str] | None = None) -> list[AttackMeter]:
        """Return the meters of some of the attacks, by default of all."""
        return [
            AttackMeter(name, self.attacks[name], self.attack_samples, self.minimum_norm_budget)
            for name in (self.attacks if names is None else names)
        ]

    def describe(self) -> dict[str, str]:
        """Describe the settings that values depend on besides the model and the data."""
        attacks = [f"{name}: {write_settings(attack)}" for name, attack in self.attacks.items()]
        return {
            "attacks": "; ".join(attacks) or "none",
            "attacked": f"at most {self.attack_samples} samples" if self.attacks else "none",
            **{meter.title: meter.describe() if meter.size else "none" for meter in self._all_meters()},
            "RDI and ROBY": f"all samples, storage {self.storage!r}"
            + (f", ROBY in l{self.roby_p:g}" if self.roby_p != 2 else ""),
            "input space": repr(self.input_space),
            "seed": str(self.seed),
        }

    def _all_meters(self) -> list[Meter]:
        return [make(self) for make in METERS]


def _fisher(plan: Plan) -> Meter:
    norm: BoundaryNorm = "l2" if plan.budget is not None and plan.budget.norm == "l2" else "linf"
    return FisherMeter(plan.fim_samples, plan.fim_method, norm, None if plan.budget is None else plan.budget.eps)


def _clever(plan: Plan) -> Meter:
    return CleverMeter(plan.clever_samples, plan.clever_radius)


# The meters of the sample, in the order in which they run. A new value is a meter here, and its keys in ``keys``
METERS: tuple[Callable[[Plan], Meter], ...] = (_fisher, _clever)


def common_budget(
    attacks: Iterable[Callable[..., Any]],
    eps: float | None,
    input_space: InputSpace | None = None,
    first: BoundaryNorm = "linf",
    otherwise: BoundaryNorm | None = None,
) -> Budget | None:
    """Return the budget of a run, so that what has no budget can be compared with attacks that do.

    It is the largest budget of the attacks in the first norm or, where none of them has one, in the other; without such
    attacks ``eps``, in the first norm unless another is given.
    """
    budgets = [budget for attack in attacks if (budget := budget_of(attack, input_space)) is not None]
    for norm in ("linf", "l2") if first == "linf" else ("l2", "linf"):
        sizes = [budget.eps for budget in budgets if budget.norm == norm]
        if sizes:
            return Budget(norm, max(sizes))
    return None if eps is None else Budget(otherwise or first, eps)
