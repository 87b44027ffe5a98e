from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_robustness._arguments import check_flag, check_integer, check_name
from lightning_robustness._measurement.keys import logged_keys, tag
from lightning_robustness._measurement.plan import Plan
from lightning_robustness._model.access import Access
from lightning_robustness._numbers import write_budget
from lightning_robustness.attacks import budget_of
from lightning_robustness.attacks.attack import check_budgets


@dataclass(frozen=True)
class MonitorSettings:
    """The arguments of the monitor, checked; see there. ``final`` is the attack at the end of training, by its name."""

    access: Access
    plan: Plan
    final: Mapping[str, Callable[..., Any]]
    dataloader_idx: int
    prefix: str
    log_figures: bool
    log_embeddings: bool
    progress: bool | None

    def __post_init__(self) -> None:
        check_integer("dataloader_idx", self.dataloader_idx, minimum=0)
        check_name("prefix", self.prefix)
        for name in ("log_figures", "log_embeddings", *(["progress"] if self.progress is not None else [])):
            check_flag(name, getattr(self, name))
        check_budgets(self.final.values(), self.plan.input_space)

    @property
    def final_plan(self) -> Plan:
        """The plan of the attack at the end of training."""
        return replace(self.plan, attacks=self.final)

    @property
    def attacks(self) -> dict[str, Callable[..., Any]]:
        """All attacks, by name."""
        return {**self.plan.attacks, **self.final}

    @property
    def needs_gradients(self) -> bool:
        """Whether inputs will be perturbed or differentiated."""
        return bool(self.attacks or self.plan.meters())

    @property
    def sample_size(self) -> int:
        """Number of samples that meters need."""
        attacked = self.plan.attack_samples if self.attacks else 0
        return max([attacked, *(meter.size for meter in self.plan.meters())])

    @property
    def parts(self) -> list[str]:
        """Names of what is measured besides the attacks."""
        return [*self.plan.parts, *(["trust"] if self.plan.attacks else [])]

    @property
    def keys(self) -> list[str]:
        """Keys of the values that say how robust the network is, as they are logged."""
        return [tag(self.prefix, name) for name in logged_keys(self.parts, list(self.plan.attacks))]

    def without_gradients(self) -> "MonitorSettings":
        """Leave out everything that needs passes or gradients of its own."""
        plan = replace(self.plan, attacks={}, attack_samples=0, fim_samples=0, clever_samples=0)
        return replace(self, plan=plan, final={}, log_embeddings=False)

    def describe(self) -> dict[str, str]:
        """Describe everything that values depend on besides the module and the data."""
        budgets = [budget_of(attack, self.plan.input_space) for attack in self.plan.attacks.values()]
        texts = dict.fromkeys(write_budget(budget.eps) for budget in budgets if budget)
        return self.plan.describe() | {"eps": ", ".join(texts)}
