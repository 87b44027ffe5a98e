import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_robustness._measurement.meters import gather
from lightning_robustness._measurement.plan import WORST
from lightning_robustness._measurement.subject import Samples, Subject
from lightning_robustness._numbers import accumulation_dtype
from lightning_robustness.attacks import AttackResult, Budget, MaskingSign, budget_of, run_attack
from lightning_robustness.attacks.attack import budgets_of, is_minimum_norm
from lightning_robustness.attacks.masking import AttackTally, signs_of
from lightning_robustness.input_space import InputSpace
from lightning_robustness.metrics import AttackSuccessRate

_ROUNDING = 1.0001


class AttackOutcome(NamedTuple):
    """The effect of an attack on each sample, as tensors that can be concatenated and gathered over processes."""

    y: Tensor
    preds: Tensor
    adv_preds: Tensor
    eligible: Tensor
    success: Tensor
    l2: Tensor
    l2_budget: Tensor
    linf: Tensor
    queries: Tensor
    tells_gradients: Tensor
    zero_gradients: Tensor
    probabilities: Tensor
    deterministic: Tensor

    @classmethod
    def of(cls, result: AttackResult, y: Tensor, l2_budget: float = math.inf) -> Self:
        """Make it from what ``run_attack`` returned for a batch."""
        wide, none = accumulation_dtype(y.device), torch.zeros_like(y, dtype=torch.bool)
        return cls(
            y=y.long(),
            preds=result.preds,
            adv_preds=result.adv_preds,
            eligible=result.eligible,
            success=result.success,
            l2=result.l2.to(wide),
            l2_budget=torch.full_like(result.l2, l2_budget, dtype=wide),
            linf=result.linf.to(wide),
            queries=result.queries.long(),
            tells_gradients=none | (result.zero_gradients is not None),
            zero_gradients=none if result.zero_gradients is None else result.zero_gradients,
            probabilities=none | result.probabilities,
            deterministic=none | result.deterministic,
        )

    @classmethod
    def empty(cls, device: torch.device) -> Self:
        """Make one without samples."""
        wide = dict.fromkeys(("l2", "l2_budget", "linf"), accumulation_dtype(device))
        whole = dict.fromkeys(("y", "preds", "adv_preds", "queries"), torch.long)
        dtypes = dict.fromkeys(cls._fields, torch.bool) | wide | whole
        return cls(**{name: torch.zeros(0, dtype=dtypes[name], device=device) for name in cls._fields})

    @classmethod
    def concatenate(cls, outcomes: Iterable[Self]) -> Self:
        """Put the samples of several batches in a row."""
        return cls(*(torch.cat(parts) for parts in zip(*outcomes, strict=True)))

    def counted(self) -> Self:
        """Take successes back that are larger than the l2 budget; what was found keeps its size."""
        counts = self.l2 <= _ROUNDING * self.l2_budget
        return self._replace(adv_preds=torch.where(counts, self.adv_preds, self.preds), success=self.success & counts)

    def gather(self) -> Self:
        """Put the samples of all processes in a row, in the order of their ranks."""
        return type(self)(*(gather(part) for part in self))


def worst_case(outcomes: Mapping[str, AttackOutcome], budgets: Mapping[str, Sequence[Budget | None]]) -> AttackOutcome:
    """Return, for each sample, the closest success of any attack or, without one, the first failure.

    An attack with a budget counts wherever it succeeds, so that no such attack succeeds more often than the worst case.
    One without a budget, such as Carlini and Wagner's, breaks nearly every sample with perturbations of any size:
    beside attacks with a budget it counts where it stays within one of theirs, among each other where they are counted.
    """
    bounded = [name for name in outcomes if None not in budgets[name]]
    found = outcomes.values() if bounded else [outcome.counted() for outcome in outcomes.values()]
    stacked = AttackOutcome(*(torch.stack(parts) for parts in zip(*found, strict=True)))
    has_budget = torch.tensor([name in bounded for name in outcomes], device=stacked.y.device).unsqueeze(1)
    within = torch.zeros_like(stacked.success) | ~has_budget.any()
    for norm, size in {budget for name in bounded for budget in budgets[name] if budget is not None}:
        if norm in ("l2", "linf"):
            within |= getattr(stacked, norm) <= _ROUNDING * size
    adv_preds = torch.where(has_budget | within, stacked.adv_preds, stacked.preds)
    success = stacked.success & (has_budget | within)
    stacked = stacked._replace(adv_preds=adv_preds, success=success)
    closest = torch.where(adv_preds != stacked.y, stacked.l2, torch.inf).argmin(dim=0)
    columns = torch.arange(len(closest), device=closest.device)
    worst = AttackOutcome(*(part[closest, columns] for part in stacked))
    return worst._replace(l2_budget=torch.full_like(worst.l2, torch.inf))  # it is counted already


class Examples(NamedTuple):
    """Inputs as the model sees them, before and after an attack, true and predicted labels."""

    x: Tensor
    x_adv: Tensor
    y: Tensor
    preds: Tensor
    adv_preds: Tensor


class AttackMeter:
    """Success rates of attacks, one by one and in the worst case, and signs of masked gradients."""

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
        return run_attack(
            subject.forward, attack, batch.x, y, self._input_space, subject.seed, positions=batch.positions
        )

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
