from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_robustness.attacks import budget_of
from lightning_robustness.attacks.budget import check_budgets
from lightning_robustness.functional.fisher_spectral_norm import FisherMethod
from lightning_robustness.measurement.attack_meter import AttackMeter
from lightning_robustness.measurement.feature_meter import FeatureMeter
from lightning_robustness.measurement.keys import Part, logged_keys, tag
from lightning_robustness.measurement.meter import SampleMeter
from lightning_robustness.measurement.sample_meters import common_budget, make_sample_meters
from lightning_robustness.measurement.settings import describe_settings
from lightning_robustness.metrics.class_statistics import Mode
from lightning_robustness.utilities.checks import check_functions, check_head, check_integer, check_name
from lightning_robustness.utilities.input_space import InputSpace
from lightning_robustness.utilities.number_text import write_budget


@dataclass(frozen=True)
class MonitorSettings:
    """The arguments of the monitor, checked; see there."""

    attacks: Mapping[str, Callable[..., Any]]
    final: Mapping[str, Callable[..., Any]]
    eps: float | None
    input_space: InputSpace
    num_classes: int | None
    head: str | nn.Module | None
    forward_fn: Callable[..., Any] | None
    embed_fn: Callable[..., Any] | None
    batch_fn: Callable[..., Any] | None
    fim_samples: int
    fim_method: FisherMethod
    clever_samples: int
    clever_radius: float
    attack_samples: int
    batch_size: int
    dataloader_idx: int
    seed: int
    prefix: str
    mode: Mode
    log_figures: bool
    log_embeddings: bool
    progress: bool | None

    def __post_init__(self) -> None:
        for name in ("dataloader_idx", "seed"):
            check_integer(name, getattr(self, name), minimum=0)
        check_integer("batch_size", self.batch_size, minimum=1)
        check_name("prefix", self.prefix)
        check_functions(self.forward_fn, self.batch_fn, self.embed_fn)
        check_head(self.head)
        check_budgets([*self.attacks.values(), *self.final.values()], self.input_space)
        # These check the other arguments
        self.make_meters()
        FeatureMeter(2 if self.num_classes is None else self.num_classes, self.mode, torch.device("cpu"))

    @property
    def parts(self) -> list[Part]:
        """The parts that are measured beside the attacks."""
        trust: list[Part] = ["trust"] if self.attacks else []
        return ["features", *(meter.name for meter in self.make_meters()), *trust]

    @property
    def keys(self) -> list[str]:
        """Keys of the values that say how robust the network is, as they are logged."""
        return [tag(self.prefix, name) for name in logged_keys(self.parts, list(self.attacks))]

    def without_gradients(self) -> "MonitorSettings":
        """Leave out everything that needs passes or gradients of its own."""
        return replace(
            self, attacks={}, final={}, fim_samples=0, clever_samples=0, attack_samples=0, log_embeddings=False
        )

    def make_meters(self) -> list[SampleMeter]:
        """Make the meters of the sample that are wanted."""
        budget = common_budget(self.attacks.values(), self.eps, self.input_space)
        options = (self.fim_samples, self.fim_method, self.clever_samples, self.clever_radius)
        meters = make_sample_meters(self.input_space, self.seed, *options, budget)
        return [meter for meter in meters if meter.size]

    def make_attack_meter(self, attacks: Mapping[str, Callable[..., Any]]) -> AttackMeter:
        """Make the meter of attacks, those of every epoch or the final one."""
        budget = common_budget(self.attacks.values(), self.eps, self.input_space, first="l2")
        return AttackMeter(attacks, self.input_space, budget)

    def describe(self) -> dict[str, str]:
        """Describe everything that values depend on besides the module and the data."""
        budgets = [budget_of(attack, self.input_space) for attack in self.attacks.values()]
        described = describe_settings(
            self.attacks, self.attack_samples, self.make_meters(), self.mode, self.input_space, self.seed
        )
        return described | {"eps": ", ".join(dict.fromkeys(write_budget(budget.eps) for budget in budgets if budget))}
