import math
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_robustness.attacks import AttackResult, Budget, MaskingSign, budget_of, run
from lightning_robustness.attacks.budget import budgets_of, is_minimum_norm
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
        budget: Budget of the run, within which success of attacks that look for the smallest perturbation counts: as it
            is in l2; for l-infinity, an l2 budget of ``max(eps, eps * sqrt(dimensions) / 4)``, with the dimensions of
            one input. None to count it at any size.
        num_examples: Number of adversarial inputs of each attack to keep, of those that succeeded; None for all inputs.
        gathers: Whether ``compute`` gathers the outcomes of all processes; not where each process has all of them.

    Attributes:
        seconds: Time that each attack took.
        examples: Adversarial inputs of each attack in this process.
        outcomes: After ``compute``, the effect of each attack on every sample of all processes.
        worst: After ``compute``, the worst case of all attacks for every sample; None if not all ran.
        l2_budget: After ``compute``, the largest l2 budget within which an attack counted; None without any.
        rates: After ``compute``, all rates of each attack and of the worst case, with confidence intervals.
        signs: After ``compute``, signs of masked gradients.

    """

    def __init__(
        self,
        attacks: Mapping[str, Callable[..., Any]],
        input_space: InputSpace,
        budget: Budget | None = None,
        num_examples: int | None = 8,
        gathers: bool = True,
    ) -> None:
        self._attacks = attacks
        self._gathers = gathers
        self._input_space = input_space
        self._budget = budget
        self._num_examples = num_examples
        self._outcomes: dict[str, AttackOutcome] = {}
        self.seconds: dict[str, float] = {}
        self.examples: dict[str, Examples] = {}
        self.outcomes: dict[str, AttackOutcome] = {}
        self.worst: AttackOutcome | None = None
        self.l2_budget: float | None = None
        self.rates: dict[str, dict[str, float]] = {}
        self.signs: list[MaskingSign] = []

    def update(self, name: str, subject: Subject, samples: Samples) -> None:
        """Run one of the attacks on samples."""
        start = perf_counter()
        outcomes, examples = [AttackOutcome.empty(subject.device)], list[Examples]()
        for batch in subject.batches(samples, f"{name} attack"):
            result = self._run(name, subject, batch)
            outcomes.append(self._outcome(name, result, batch))
            success = outcomes[-1].counted().success
            examples.append(self._pick(result, success, batch, sum(len(picked.y) for picked in examples)))
        self._outcomes[name] = AttackOutcome.concatenate(outcomes)
        examples = [picked for picked in examples if picked.x.shape[1:] == examples[0].x.shape[1:]]
        if examples:
            self.examples[name] = Examples(*(torch.cat(parts) for parts in zip(*examples, strict=True)))
        self.seconds[name] = perf_counter() - start

    def measure(self, name: str, subject: Subject, batch: Samples) -> AttackOutcome:
        """Return the effect of one of the attacks on a batch, as ``Subject.batches`` gives it, for ``add``."""
        return self._outcome(name, self._run(name, subject, batch), batch)

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
        found = {name: outcome.gather() if self._gathers else outcome for name, outcome in self._outcomes.items()}
        self.outcomes = {name: outcome.counted() for name, outcome in found.items()}
        self.worst = self._worst(found)
        self.signs = self._find_signs()
        values: dict[str, float] = {}
        for name, outcome in (found if self.worst is None else found | {WORST: self.worst}).items():
            self.rates[name] = rates = _rates(outcome.counted()) | {"distortion": _rates(outcome)["distortion"]}
            if rates["correct"]:  # without a sample that was right, a success rate of 0 would be the best one
                values[f"asr/{name}"] = rates["asr"]
            values[f"adv_acc/{name}"] = rates["adv_acc"]
            if math.isfinite(rates["distortion"]):
                values[f"distortion/{name}"] = rates["distortion"]
            else:  # most samples withstood; JSON has no infinity
                rates["distortion"] = math.nan
            values["samples_attacks"] = rates["count"]
        sizes = [size for outcome in found.values() for size in outcome.l2_budget.unique().tolist() if size < math.inf]
        if sizes:
            values["l2_budget"] = self.l2_budget = max(sizes)
        if self.signs or self._is_complete:  # some signs take several attacks, so that no sign of a few says nothing
            values["masking"] = float(bool(self.signs))
        return values

    @property
    def _is_complete(self) -> bool:
        """Whether all attacks ran, without which the worst case could not be compared with that of other epochs."""
        return bool(self.outcomes) and self.outcomes.keys() == self._attacks.keys()

    def _worst(self, found: Mapping[str, AttackOutcome]) -> AttackOutcome | None:
        if not self._is_complete:
            return None
        return worst_case(found, {name: budgets_of(self._attacks[name], self._input_space) for name in found})

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

    def _outcome(self, name: str, result: AttackResult, batch: Samples) -> AttackOutcome:
        if self._budget is None or not is_minimum_norm(self._attacks[name], self._input_space):
            return AttackOutcome.of(result, batch.labels())
        widening = 1.0 if self._budget.norm == "l2" else max(1.0, math.sqrt(math.prod(batch.x.shape[1:])) / 4)
        return AttackOutcome.of(result, batch.labels(), widening * self._budget.eps)

    def _pick(self, result: AttackResult, success: Tensor, batch: Samples, num_picked: int) -> Examples:
        x, y = batch.x, batch.labels()
        rows = torch.arange(len(x), device=x.device)
        if self._num_examples is not None:
            rows = success.nonzero().squeeze(1)[: max(self._num_examples - num_picked, 0)]
        return Examples(*(v[rows].cpu() for v in (x, result.x_adv, y, result.preds, result.adv_preds)))


def _rates(outcome: AttackOutcome) -> dict[str, float]:
    """Compute all rates of an attack."""
    metric = AttackSuccessRate(sync_on_compute=False).to(outcome.y.device)
    metric.update(outcome.preds, outcome.adv_preds, outcome.y, outcome.l2)
    return {part: value.item() for part, value in metric.compute_components().items()}
