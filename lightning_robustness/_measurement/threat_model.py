from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

from torch import Tensor
from typing_extensions import Self

from lightning_robustness._numbers import write_budget
from lightning_robustness.attacks import get_attack
from lightning_robustness.attacks.attack import budgets_of, is_minimum_norm
from lightning_robustness.attacks.registry import ATTACK_NAMES, Strength, describe_settings
from lightning_robustness.input_space import InputSpace

_NORMS = {"linf": "l-infinity"}


class AttackFacts(NamedTuple):
    """Facts about an attack that a reader of a report needs."""

    budgets: dict[str, float]
    settings: str
    queries: float | None = None
    l2_budget: float | None = None

    @property
    def limit(self) -> str:
        """Sizes at which success counts, for an attack without a budget."""
        return "no budget" if self.l2_budget is None else f"l2 <= {write_budget(self.l2_budget)}"


@dataclass(frozen=True)
class ThreatModel:
    """Perturbations that attackers may make, and how hard they tried."""

    attacks: dict[str, AttackFacts] = field(default_factory=dict)
    samples: int = 0
    low: float | None = 0.0
    high: float | None = 1.0
    is_image: bool = False

    @classmethod
    def of(
        cls,
        attacks: Mapping[str, Callable[..., Any]],
        input_space: InputSpace,
        samples: int,
        is_image: bool = False,
        queries: Mapping[str, float] | None = None,
        l2_budget: float | None = None,
    ) -> Self:
        """Describe attacks on inputs."""
        facts = {
            name: AttackFacts(
                _budgets(attack, input_space),
                describe_settings(attack),
                (queries or {}).get(name),
                l2_budget if is_minimum_norm(attack, input_space) else None,
            )
            for name, attack in attacks.items()
        }
        return cls(facts, samples, input_space.low, input_space.high, is_image)

    @property
    def budget(self) -> str:
        """Budgets of the attacks as text, empty if none of them has one."""
        return " and ".join(write_budget(eps, norm) for norm, eps in self._budgets.items())

    @property
    def has_pixels(self) -> bool:
        """Return whether distances can be written in steps of 8-bit pixels: for images with values in [0, 1]."""
        return self.is_image and (self.low, self.high) == (0.0, 1.0)

    @property
    def _budgets(self) -> dict[str, float]:
        """Largest budget by norm; where no attack has one, the budget within which they count."""
        facts = self.attacks.values()
        counted = [("l2", fact.l2_budget) for fact in facts if fact.l2_budget is not None]
        return _largest([pair for fact in facts for pair in fact.budgets.items()] or counted)

    def describe(self, budget: str = "") -> dict[str, str]:
        """Describe it in a few lines, by name."""
        norms = [_NORMS.get(norm, norm) for norm in self._budgets]
        bounds = f"values in [{_bound(self.low)}, {_bound(self.high)}]"
        return {
            "norm": " and ".join(norms) or "none",
            "budget": budget or self.budget or "none",
            "attacks": ", ".join(f"{name}{_parenthesis(facts)}" for name, facts in self.attacks.items()) or "none",
            "samples": f"{self.samples}; misclassified ones need no attack" if self.samples else "none attacked",
            "inputs": f"images with {bounds}" if self.is_image else bounds,
        }


def list_settings() -> list[tuple[str, str, str]]:
    """List what each name stands for at each strength: one row for those that are the same at all of them.

    Example:
        >>> from lightning_robustness._measurement.threat_model import list_settings
        >>> [row for row in list_settings() if row[0] == "cw"][0]
        ('cw', 'fast', 'C&W from a DDN start, 16 + 2 steps')

    """
    rows = []
    for name in ATTACK_NAMES:
        if name == "autoattack":
            rows.append((name, "all", "AutoAttack by its authors, where their package is installed"))
            continue
        texts = {strength: describe_settings(get_attack(name, strength=strength)) for strength in get_args(Strength)}
        if len(set(texts.values())) == 1:
            rows.append((name, "all", texts["fast"]))
        else:
            rows += [(name, strength, text) for strength, text in texts.items()]
    return rows


def is_image(x: Any) -> bool:
    """Return whether a batch holds images, with one or three channels."""
    return isinstance(x, Tensor) and x.ndim == 4 and x.shape[1] in (1, 3)


def _budgets(attack: Callable[..., Any], input_space: InputSpace) -> dict[str, float]:
    """Return the largest budget in each norm, as a cascade may have several; none unless all its members have one."""
    budgets = budgets_of(attack, input_space)
    known = [(budget.norm or "unknown", budget.eps) for budget in budgets if budget is not None]
    return _largest(known) if len(known) == len(budgets) else {}


def _largest(budgets: Iterable[tuple[str, float]]) -> dict[str, float]:
    largest: dict[str, float] = {}
    for norm, eps in budgets:
        largest[norm] = max(eps, largest.get(norm, 0.0))
    return largest


def _parenthesis(facts: AttackFacts) -> str:
    parts = [facts.settings, "" if facts.budgets else facts.limit]
    if facts.queries is not None:
        number = f"{facts.queries:.0f}"
        noun = "" if "queries" in facts.settings else " query" if number == "1" else " queries"
        parts.append(f"{number}{noun} on average")
    text = ", ".join(part for part in parts if part)
    return f" ({text})" if text else ""


def _bound(bound: float | None) -> str:
    return "unbounded" if bound is None else f"{bound:g}"
