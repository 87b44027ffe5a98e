import math
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_robustness.attacks import AttackResult, MaskingSign, budget_of, run
from lightning_robustness.attacks.budget import budgets_of
from lightning_robustness.attacks.masking import AttackTally, signs_of
from lightning_robustness.measurement.attack_names import WORST
from lightning_robustness.measurement.attack_outcome import AttackOutcome, worst_case
from lightning_robustness.measurement.subject import Samples, Subject
from lightning_robustness.metrics import AttackSuccessRate
from lightning_robustness.utilities.input_space import InputSpace


class Examples(NamedTuple):
    """Inputs as the model sees them, before and after an attack, true and predicted labels."""

    x: Tensor
    x_adv: Tensor
    y: Tensor
    preds: Tensor
    adv_preds: Tensor


class AttackMeter:
    """Success rates of attacks, one by one and in the worst case, and signs of masked gradients.

    Args:
        attacks: Attacks by name.
        input_space: Range and normalisation of the inputs, which budgets are in the units of.
        num_examples: Number of adversarial inputs of each attack to keep, of those that succeeded; None for all inputs.
        gathers: Whether ``compute`` gathers the outcomes of all processes; not where each process has all of them.

    Attributes:
        seconds: Time that each attack took.
        examples: Adversarial inputs of each attack in this process.
        outcomes: After ``compute``, the effect of each attack on every sample of all processes.
        rates: After ``compute``, all rates of each attack and of the worst case, with confidence intervals.
        signs: After ``compute``, signs of masked gradients.

    """

    def __init__(
        self,
        attacks: Mapping[str, Callable[..., Any]],
        input_space: InputSpace,
        num_examples: int | None = 8,
        gathers: bool = True,
    ) -> None:
        self._attacks = attacks
        self._gathers = gathers
        self._input_space = input_space
        self._num_examples = num_examples
        self._outcomes: dict[str, AttackOutcome] = {}
        self.seconds: dict[str, float] = {}
        self.examples: dict[str, Examples] = {}
        self.outcomes: dict[str, AttackOutcome] = {}
        self.rates: dict[str, dict[str, float]] = {}
        self.signs: list[MaskingSign] = []

    def update(self, name: str, subject: Subject, samples: Samples) -> None:
        """Run one of the attacks on samples."""
        start = perf_counter()
        outcomes, examples = [AttackOutcome.empty(subject.device)], list[Examples]()
        for batch in subject.batches(samples, f"{name} attack"):
            x, y, result = batch.x, batch.labels(), self._run(name, subject, batch)
            outcomes.append(AttackOutcome.of(result, y))
            examples.append(self._pick(result, x, y, sum(len(picked.y) for picked in examples)))
        self._outcomes[name] = AttackOutcome.concatenate(outcomes)
        examples = [picked for picked in examples if picked.x.shape[1:] == examples[0].x.shape[1:]]
        if examples:
            self.examples[name] = Examples(*(torch.cat(parts) for parts in zip(*examples, strict=True)))
        self.seconds[name] = perf_counter() - start

    def measure(self, name: str, subject: Subject, batch: Samples) -> AttackOutcome:
        """Return the effect of one of the attacks on a batch, as ``Subject.batches`` gives it, for ``add``."""
        return AttackOutcome.of(self._run(name, subject, batch), batch.labels())

    def add(self, name: str, outcome: AttackOutcome, seconds: float) -> None:
        """Add the effect of one of the attacks on samples, and the time that it took."""
        self._outcomes[name], self.seconds[name] = outcome, seconds

    def drop(self, name: str) -> None:
        """Leave an attack out, because it failed in some process."""
        self._outcomes.pop(name, None)
        self.examples.pop(name, None)
        self.seconds.pop(name, None)

    def compute(self) -> dict[str, float]:
        """Return the values over all samples of all processes; keep outcomes, rates and signs."""
        self.outcomes = {
            name: outcome.gather() if self._gathers else outcome for name, outcome in self._outcomes.items()
        }
        self.signs = self._find_signs()
        values: dict[str, float] = {}
        for name, outcome in {**self.outcomes, **self._worst()}.items():
            metric = AttackSuccessRate(sync_on_compute=False).to(outcome.y.device)
            metric.update(outcome.preds, outcome.adv_preds, outcome.y, outcome.l2)
            self.rates[name] = rates = {part: value.item() for part, value in metric.compute_components().items()}
            if rates["correct"]:  # without a sample that was right, a success rate of 0 would be the best one
                values[f"asr/{name}"] = rates["asr"]
            values[f"adv_acc/{name}"] = rates["adv_acc"]
            if math.isfinite(rates["distortion"]):
                values[f"distortion/{name}"] = rates["distortion"]
            else:  # most samples withstood; JSON has no infinity
                rates["distortion"] = math.nan
            values["samples_attacks"] = rates["count"]
        if self.signs or self._is_complete:  # some signs take several attacks, so that no sign of a few says nothing
            values["masking"] = float(bool(self.signs))
        return values

    @property
    def _is_complete(self) -> bool:
        """Whether all attacks ran, without which the worst case could not be compared with that of other epochs."""
        return bool(self.outcomes) and self.outcomes.keys() == self._attacks.keys()

    def _worst(self) -> dict[str, AttackOutcome]:
        if not self._is_complete:
            return {}
        budgets = {name: budgets_of(self._attacks[name], self._input_space) for name in self.outcomes}
        return {WORST: worst_case(self.outcomes, budgets)}

    def _find_signs(self) -> list[MaskingSign]:
        tallies = [
            AttackTally(
                attack=self._attacks[name],
                budget=budget_of(self._attacks[name], self._input_space),
                success=outcome.success,
                eligible=outcome.eligible,
                zero_gradients=int((outcome.zero_gradients & outcome.eligible).sum()),
                samples_with_gradients=int(outcome.eligible.sum()) if outcome.tells_gradients.any() else 0,
                probabilities=bool(outcome.probabilities.any()),
                deterministic=bool(outcome.deterministic.all()),
            )
            for name, outcome in self.outcomes.items()
        ]
        return signs_of(tallies, tolerance=0.01)

    def _run(self, name: str, subject: Subject, batch: Samples) -> AttackResult:
        attack, y = self._attacks[name], batch.labels()
        return run(subject.forward, attack, batch.x, y, self._input_space, subject.seed, positions=batch.positions)

    def _pick(self, result: AttackResult, x: Tensor, y: Tensor, num_picked: int) -> Examples:
        rows = torch.arange(len(x), device=x.device)
        if self._num_examples is not None:
            rows = result.success.nonzero().squeeze(1)[: max(self._num_examples - num_picked, 0)]
        return Examples(*(v[rows].cpu() for v in (x, result.x_adv, y, result.preds, result.adv_preds)))
