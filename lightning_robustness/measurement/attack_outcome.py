import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_robustness.attacks import AttackResult, Budget
from lightning_robustness.measurement.meter import gather
from lightning_robustness.utilities.precision import accumulation_dtype

_ROUNDING = 1.0001


class AttackOutcome(NamedTuple):
    """The effect of an attack on each sample, as tensors that can be concatenated and gathered over processes.

    Args:
        y: True labels.
        preds: Predicted labels before the attack.
        adv_preds: Predicted labels after it.
        eligible: Whether the attack could succeed: the sample was right before it.
        success: Whether it did.
        l2: Euclidean size of the perturbation, in un-normalised units.
        l2_budget: Largest such size at which a success counts; infinite for an attack with a budget of its own.
        linf: Largest change of a coordinate.
        queries: Forward passes that it took.
        tells_gradients: Whether the attack reports on its first gradient.
        zero_gradients: Whether that was zero in every coordinate.
        probabilities: Whether the outputs of its batch looked like probabilities.
        deterministic: Whether a second forward pass of its batch gave the same outputs.

    """

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
        """Make it from what ``run`` returned for a batch."""
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

    Args:
        outcomes: Outcomes on the same samples, by attack, as they were found.
        budgets: Norm and size of what each attack may do, None if it may do anything: one, or one for each member of a
            cascade.

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
