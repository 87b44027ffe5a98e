from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_robustness._arguments import check_flag, check_integer, check_name, check_number, check_option
from lightning_robustness._measurement.keys import logged_keys, tag
from lightning_robustness._measurement.plan import Plan
from lightning_robustness._model.access import Access
from lightning_robustness._numbers import write_budget
from lightning_robustness.attacks import PGD, budget_of
from lightning_robustness.attacks.attack import check_budgets

Combine = Literal["replace", "mix", "concat"]
AdversarialLoss = Literal["trades", "mart"]


def check_prefix(prefix: Any) -> None:
    """Check what keys start with; no part between slashes is empty."""
    check_name("prefix", prefix)
    if not all(part.strip() for part in prefix.split("/")):
        raise ValueError(
            f"Expected argument `prefix` to have names around each slash, as 'val/robustness', but got {prefix!r}. "
            "Leave the other slashes out."
        )


@dataclass(frozen=True)
class MonitorSettings:
    """The arguments of the monitor, checked; see there. ``final`` is the attack at the end of training, by its name."""

    access: Access
    plan: Plan
    final: Mapping[str, Callable[..., Any]]
    dataloader_idx: int
    prefix: str
    log_details: bool
    log_figures: bool
    log_combined: bool
    log_embeddings: bool
    progress: bool | None

    def __post_init__(self) -> None:
        check_integer("dataloader_idx", self.dataloader_idx, minimum=0)
        check_prefix(self.prefix)
        for name in ("log_details", "log_figures", "log_combined", "log_embeddings"):
            check_flag(name, getattr(self, name))
        if self.progress is not None:
            check_flag("progress", self.progress)
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
        """Return whether inputs will be perturbed or differentiated."""
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
    def names(self) -> list[str]:
        """Names of the values that say how robust the network is."""
        return logged_keys(self.parts, list(self.plan.attacks))

    @property
    def keys(self) -> list[str]:
        """Keys of the values that say how robust the network is, with their prefix."""
        return [tag(self.prefix, name) for name in self.names]

    def without_gradients(self) -> "MonitorSettings":
        """Leave out everything that needs passes or gradients of its own."""
        plan = replace(self.plan, attacks={}, attack_samples=0, fim_samples=0, clever_samples=0)
        return replace(self, plan=plan, final={}, log_embeddings=False)

    @property
    def budgets(self) -> list[float]:
        """Budgets of the attacks, each once."""
        budgets = (budget_of(attack, self.plan.input_space) for attack in self.plan.attacks.values())
        return list(dict.fromkeys(budget.eps for budget in budgets if budget))

    def describe(self) -> dict[str, str]:
        """Describe everything that values depend on besides the module and the data."""
        return self.plan.describe() | {"eps": ", ".join(dict.fromkeys(map(write_budget, self.budgets)))}


@dataclass(frozen=True)
class AdversarialSettings:
    """The arguments of adversarial training, checked; see there. ``attacks`` has one per epoch, and then the last."""

    attacks: Sequence[Callable[..., Any]]
    combine: Combine
    ratio: float
    loss: AdversarialLoss | None
    loss_weight: float | None
    warmup_epochs: int
    eval_mode: bool
    measure_every_n_batches: int
    overfitting_samples: int
    overfitting_checkpoint: str | None
    seed: int
    prefix: str

    def __post_init__(self) -> None:
        check_option("combine", self.combine, Combine)
        check_number("ratio", self.ratio, exclusive=True, maximum=1.0)
        check_prefix(self.prefix)
        self._check_loss()
        for name in ("warmup_epochs", "overfitting_samples", "seed"):
            check_integer(name, getattr(self, name), minimum=0)
        check_flag("eval_mode", self.eval_mode)
        check_integer("measure_every_n_batches", self.measure_every_n_batches, minimum=1)
        if self.overfitting_checkpoint is not None and not self.looks_for_overfitting:
            raise ValueError(
                "Expected argument `overfitting_checkpoint` with PGD of one step and `overfitting_samples` above 0, "
                f"which the sign is looked for with, but got {self.attacks[0]!r} and {self.overfitting_samples}. Leave "
                "it out."
            )

    def _check_loss(self) -> None:
        if self.loss is None:
            if self.loss_weight is not None:
                raise ValueError(
                    f"Expected argument `loss_weight` with `loss` but got {self.loss_weight} alone. Leave it out."
                )
            return
        check_option("loss", self.loss, AdversarialLoss)
        if self.loss_weight is not None:
            check_number("loss_weight", self.loss_weight)
        if self.combine != "replace":
            raise ValueError(
                f"Expected `combine` to be 'replace' with `loss={self.loss!r}`, which has clean and adversarial inputs "
                f"of its own, but got {self.combine!r}. Leave `combine` out."
            )

    @property
    def looks_for_overfitting(self) -> bool:
        """Return whether to look for overfitting to an attack of a single step."""
        attack = self.attacks[0]
        return isinstance(attack, PGD) and attack.steps == 1 and self.overfitting_samples > 0

    def attack_at(self, epoch: int) -> Callable[..., Any]:
        """Return the attack of an epoch."""
        return self.attacks[min(max(epoch - self.warmup_epochs, 0), len(self.attacks) - 1)]
