import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_robustness._measurement.meters import Meter
from lightning_robustness._measurement.samples import Samples
from lightning_robustness._measurement.subject import Subject
from lightning_robustness._model.batch import Batch
from lightning_robustness._processes import Processes
from lightning_robustness.attacks import AttackResult, Budget, run_attack
from lightning_robustness.attacks.attack import is_minimum_norm


@dataclass(frozen=True)
class AttackMeter(Meter):
    """Attack samples, and tell what became of each.

    A minimum-norm attack succeeds within the l2 budget of the run or, from linf, ``max(eps, eps * sqrt(d) / 4)``.
    """

    key: str
    attack: Callable[..., Any]
    size: int
    budget: Budget | None = None

    keeps_partial = False  # the worst of some samples is not the worst of all

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of its rows."""
        return f"attack {self.key}"

    @property
    def title(self) -> str:  # type: ignore[override]
        """Text of the progress bar."""
        return f"{self.key} attack"

    @property
    def label(self) -> str:  # type: ignore[override]
        """Name within a sentence."""
        return f"the attack {self.key}"

    @override
    def measure(self, subject: Subject, batch: Batch) -> Mapping[str, Tensor]:
        columns = self._run(subject, batch).columns()
        l2_budget = torch.full_like(columns["l2"], self._l2_budget(subject, batch))
        return {"y": batch.labels().long(), **columns, "l2_budget": l2_budget}

    def _run(self, subject: Subject, batch: Batch) -> AttackResult:
        forward, space, seed = subject.logits_of(batch), subject.input_space, subject.seed
        return run_attack(
            forward, self.attack, batch.x, batch.labels(), input_space=space, seed=seed, positions=batch.positions
        )

    def _l2_budget(self, subject: Subject, batch: Batch) -> float:
        if self.budget is None or not is_minimum_norm(self.attack, subject.input_space):
            return math.inf
        widening = 1.0 if self.budget.norm == "l2" else max(1.0, math.sqrt(math.prod(batch.x.shape[1:])) / 4)
        return widening * self.budget.eps


class Examples(NamedTuple):
    """Inputs as the model sees them, before and after an attack, true and predicted labels."""

    x: Tensor
    x_adv: Tensor
    y: Tensor
    preds: Tensor
    adv_preds: Tensor


def attack_again(
    meter: AttackMeter, subject: Subject, samples: Samples, positions: Tensor, processes: Processes
) -> Examples | None:
    """Attack some samples once more, for pictures, in a single batch: the same images in any number of processes.

    Rows hold no images. None if the attack breaks none of them this time, as may happen with a random attack.
    """
    shares = processes.gather(samples.at(positions))
    examples: Examples | None = None
    with processes.step():
        owners = [rank for rank, share in enumerate(shares) if len(share.positions)]
        if owners[:1] == [processes.rank]:
            examples = _attack(meter, subject, Samples.join(shares))
    return next((found for found in processes.gather(examples) if found is not None), None)


def _attack(meter: AttackMeter, subject: Subject, samples: Samples) -> Examples | None:
    examples: list[Examples] = []
    for batch in replace(subject, progress=False).batches(samples, meter.title):
        result = meter._run(subject, batch)
        parts = batch.x, result.x_adv, batch.labels(), result.preds, result.adv_preds
        examples.append(Examples(*(part[result.success].cpu() for part in parts)))
    examples = [found for found in examples if len(found.y) and found.x.shape[1:] == examples[0].x.shape[1:]]
    return Examples(*(torch.cat(parts) for parts in zip(*examples, strict=True))) if examples else None
