import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_robustness._arguments import check_number
from lightning_robustness.attacks.attack import budget_of
from lightning_robustness.attacks.run_attack import AttackResult
from lightning_robustness.input_space import InputSpace

# Probability of a false alarm of each test
LEVEL = 0.01


def binomial_tail(successes: int, trials: int, probability: float) -> float:
    """Compute the probability of at least this many successes in independent trials."""
    if successes <= 0 or probability >= 1:
        return float(successes <= trials)
    if successes > trials or probability <= 0:
        return 0.0
    k = torch.arange(successes, trials + 1, dtype=torch.float64)
    n = torch.tensor(float(trials), dtype=torch.float64)
    ways = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    log_terms = ways + k * math.log(probability) + (n - k) * math.log1p(-probability)
    return min(1.0, log_terms.logsumexp(dim=0).exp().item())


def is_more_than(successes: int, trials: int, share: float) -> bool:
    """Tell whether successes are more frequent than a share, and more than a handful (a sign test against none)."""
    return max(binomial_tail(successes, trials, share), 0.5**successes) < LEVEL


def is_more_often(only_first: int, only_second: int, trials: int, tolerance: float) -> bool:
    """Tell whether one attack succeeds more often than another on the same samples, by McNemar's exact test."""
    is_larger = only_first - only_second > tolerance * trials
    return is_larger and binomial_tail(only_first, only_first + only_second, 0.5) < LEVEL


def is_higher_rate(first: tuple[int, int], second: tuple[int, int], tolerance: float) -> bool:
    """Tell whether a rate is higher than another by more than a tolerance, from successes and trials of two samples.

    By the normal approximation, with one success and one failure added to each sample.
    """
    rates = [(successes + 1) / (trials + 2) for successes, trials in (first, second)]
    variances = [rate * (1 - rate) / (trials + 2) for rate, (_, trials) in zip(rates, (first, second), strict=True)]
    bound = NormalDist().inv_cdf(1 - LEVEL) * math.sqrt(sum(variances))
    return rates[0] - rates[1] - tolerance > bound


class MaskingSign(NamedTuple):
    """A reason to doubt a success rate.

    Args:
        name: Which sign it is.
        evidence: Observation in this run, with its numbers.
        explanation: Meaning of the observation.
        remedy: Attack or setting to try.

    """

    name: str
    evidence: str
    explanation: str
    remedy: str


class _Tally:
    """Results of one attack over all batches, with columns as ``AttackResult.columns`` has them."""

    def __init__(self, attack: Any, columns: Mapping[str, Tensor], input_space: InputSpace | None) -> None:
        self.attack, self.columns, self.budget = attack, columns, budget_of(attack, input_space)
        self.name = str(getattr(attack, "name", getattr(attack, "__name__", type(attack).__name__)))
        self.success, self.eligible = columns["success"], columns["eligible"]
        self.counts = int(self.success.sum()), int(self.eligible.sum())
        self.rate = self.counts[0] / max(self.counts[1], 1)

    def is_paired(self, other: "_Tally") -> bool:
        """Return whether both attacks seem to have seen the same samples, in the same order."""
        return torch.equal(self.eligible, other.eligible)

    def beats(self, other: "_Tally", tolerance: float) -> bool:
        """Return whether this attack succeeds significantly more often than another, and by more than a tolerance."""
        if not self.is_paired(other):
            return is_higher_rate(self.counts, other.counts, tolerance)
        only_this, only_other = int((self.success & ~other.success).sum()), int((other.success & ~self.success).sum())
        return is_more_often(only_this, only_other, self.counts[1], tolerance)

    def setting(self, *left_out: str) -> str:
        """Return all settings of the attack, a dataclass, but those that are left out."""
        names = [field.name for field in fields(self.attack) if field.name not in left_out]
        return repr((type(self.attack), [(name, getattr(self.attack, name)) for name in names]))

    def has(self, **attributes: Any) -> bool:
        """Tell whether the attack has these attributes."""
        return all(getattr(self.attack, name, None) == value for name, value in attributes.items())

    def is_rival(self, other: "_Tally") -> bool:
        """Return whether this is a white-box attack with the goal and the budget of another attack."""
        targeted = getattr(other.attack, "targeted", None)
        return self.has(white_box=True, targeted=targeted) and self.budget == other.budget


def masking_signs(results: Iterable[AttackResult], tolerance: float = 0.01) -> list[MaskingSign]:
    """Look for signs that gradients are masked, in what several attacks did to one model and the same samples.

    - ``black_box_beats_white_box``: an attack without gradients breaks samples that none with gradients does, at the
      same budget.
    - ``zero_gradients``: the gradient of some samples is zero in every coordinate.
    - ``nonfinite_gradients``: the gradient of some samples is NaN or infinite.
    - ``one_step_beats_many``: a single step succeeds more often than several, at the same budget.
    - ``not_rising_with_eps``: a larger budget does not give more success.
    - ``probabilities``: the outputs of the model look like probabilities.
    - ``random_outputs``: two forward passes give different outputs.

    The more attacks and budgets, the more can be seen: PGD, FGSM and Square, at two or more budgets, show all. Counts
    are compared by exact tests at a level of 1 %, sample by sample where the attacks saw the same samples in the same
    order, so a handful of samples never triggers a sign. The more samples and the more queries of Square, the smaller
    the fault that can be seen: with 500 samples, white-box attacks that miss 3 % or more of what Square breaks.

    Args:
        results: What ``run_attack`` returned; batches of the same attack are taken together.
        tolerance: Difference of success rates, or share of samples, that does not count, however certain it is.

    Returns:
        The signs that were found, each with a sentence that explains it and what to try.

    Example:
        >>> import torch
        >>> from lightning_robustness.attacks import PGD, masking_signs, run_attack
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Softmax(dim=1))
        >>> result = run_attack(model, PGD(eps=0.1), torch.rand(8, 2), torch.zeros(8, dtype=torch.long))
        >>> for sign in masking_signs([result]):
        ...     print(sign.name, "|", sign.remedy)
        probabilities | Return logits (before the softmax) and rerun the attacks.

    """
    if isinstance(results, AttackResult | str | Mapping) or not isinstance(results, Iterable):
        raise TypeError(f"Expected argument `results` to be a list of results of `run_attack` but got {results!r}.")
    check_number("tolerance", tolerance)
    groups = defaultdict[str | int, list[AttackResult]](list)
    for result in results:
        if not isinstance(result, AttackResult):
            raise TypeError(f"Expected argument `results` to hold results of `run_attack` but got {result!r}.")
        # By what is printed: fields may be lists or tensors, which can be neither hashed nor compared
        groups[repr(result.attack) if is_dataclass(result.attack) else id(result.attack)].append(result)
    parts = [[result.columns() for result in own] for own in groups.values()]
    columns = [{name: torch.cat([part[name] for part in own]) for name in own[0]} for own in parts]
    return find_signs([own[0].attack for own in groups.values()], columns, None, tolerance)


def find_signs(
    attacks: Iterable[Callable[..., Any]],
    columns: Iterable[Mapping[str, Tensor]],
    input_space: InputSpace | None,
    tolerance: float = 0.01,
) -> list[MaskingSign]:
    """Look for signs in the columns of each attack, over all batches."""
    tallies = [_Tally(attack, own, input_space) for attack, own in zip(attacks, columns, strict=True)]
    return [
        *_black_box_beats_white_box(tallies, tolerance),
        *_zero_gradients(tallies, tolerance),
        *_nonfinite_gradients(tallies),
        *_one_step_beats_many(tallies, tolerance),
        *_not_rising_with_eps(tallies, tolerance),
        *_outputs(tallies),
    ]


def _black_box_beats_white_box(tallies: list[_Tally], tolerance: float) -> Iterator[MaskingSign]:
    for black in tallies:
        rivals = [t for t in tallies if t.is_rival(black)]
        if not black.has(white_box=False) or black.budget is None or not rivals:
            continue
        white, missed = max(rivals, key=lambda t: t.rate), ""
        paired = [rival for rival in rivals if rival.is_paired(black)]
        if not paired:
            is_found = black.beats(white, tolerance)
        else:
            number = int((black.success & ~torch.stack([rival.success for rival in paired]).any(dim=0)).sum())
            is_found = is_more_than(number, black.counts[1], tolerance)
            missed = f"; {number} of {black.counts[1]} samples are broken by the first and by no attack with gradients"
        if is_found:
            yield MaskingSign(
                "black_box_beats_white_box",
                f"{black.name} succeeds on {black.rate:.1%}, {white.name} on {white.rate:.1%}{missed}.",
                "A gradient attack should find whatever a black-box attack finds. Here it does not: the gradients "
                "mislead, and the white-box success rate is too low.",
                "Take the success rate of both together (`worst`); use loss='margin', more steps and restarts, and "
                "look for operations without a useful gradient, such as rounding or saturated activations.",
            )


def _zero_gradients(tallies: list[_Tally], tolerance: float) -> Iterator[MaskingSign]:
    for tally in tallies:
        told = tally.columns["zero_gradients"][tally.columns["tells_gradients"] & tally.eligible]
        number = int(told.sum())
        if is_more_than(number, len(told), tolerance):
            yield MaskingSign(
                "zero_gradients",
                f"{tally.name} finds a gradient of zero for {number / len(told):.1%} of the samples.",
                "Where the gradient is zero in every coordinate, a gradient attack cannot move: confident outputs may "
                "have underflowed, or an operation may stop gradients.",
                "Use loss='margin', which does not saturate, a random start, and Square, which needs no gradient.",
            )


def _nonfinite_gradients(tallies: list[_Tally]) -> Iterator[MaskingSign]:
    for tally in tallies:
        yield from nonfinite_sign(tally.name, tally.columns["nonfinite_gradients"][tally.eligible])


def nonfinite_sign(name: str, nonfinite: Tensor) -> Iterator[MaskingSign]:
    """Return a sign if any sample has a gradient that is not finite: honest networks have none."""
    number = int(nonfinite.sum())
    if number:
        yield MaskingSign(
            "nonfinite_gradients",
            f"{name} finds a gradient that is NaN or infinite for {number} of {len(nonfinite)} samples.",
            "An operation has no derivative at these inputs, such as the square root of 0 in the magnitude of an edge. "
            "NaN counts as zero there, so the attack may miss adversarial examples that exist.",
            "Add an epsilon under the root, `torch.sqrt(x + 1e-8)`, and rerun the attacks.",
        )


def _one_step_beats_many(tallies: list[_Tally], tolerance: float) -> Iterator[MaskingSign]:
    for one in tallies:
        rivals = [t for t in tallies if t.is_rival(one) and (getattr(t.attack, "steps", None) or 1) > 1]
        if not one.has(white_box=True, steps=1) or not rivals:
            continue
        many = max(rivals, key=lambda t: t.rate)
        if one.beats(many, tolerance):
            yield MaskingSign(
                "one_step_beats_many",
                f"{one.name} with one step succeeds on {one.rate:.1%}, {many.name} with {many.attack.steps} steps "
                f"on {many.rate:.1%}.",
                "Many small steps should do at least as well as a large one: close to the input the gradient points "
                "the wrong way, as after training against a single step.",
                "Use a larger alpha, more steps and random restarts; train against several steps.",
            )


def _not_rising_with_eps(tallies: list[_Tally], tolerance: float) -> Iterator[MaskingSign]:
    groups = defaultdict[str, list[tuple[float, _Tally]]](list)
    for tally in tallies:
        if tally.budget is not None and is_dataclass(tally.attack):
            groups[tally.setting("eps", "alpha", "options")].append((tally.budget.eps, tally))
    for group in groups.values():
        group.sort(key=lambda pair: pair[0])
        for (small_eps, small), (large_eps, large) in itertools.pairwise(group):
            if small.beats(large, tolerance) or (large_eps >= 2 * small_eps and _has_stopped(small, large)):
                yield MaskingSign(
                    "not_rising_with_eps",
                    f"{small.name} succeeds on {small.rate:.1%} with eps={small_eps:g} and on "
                    f"{large.rate:.1%} with eps={large_eps:g}.",
                    "Success cannot fall as the budget grows: the attack misses adversarial examples that exist.",
                    "Let alpha grow with eps, or leave it out; use more steps and restarts, and add Square.",
                )


def _has_stopped(small: _Tally, large: _Tally) -> bool:
    """Tell whether twice the budget or more gives no more success.

    No new success where a number is expected has a probability of exp(-number) by a Poisson distribution.
    """
    broken, number = small.counts
    return large.rate <= small.rate and math.exp(-min(broken, number - broken) / 2) < LEVEL


def _outputs(tallies: list[_Tally]) -> Iterator[MaskingSign]:
    if any(tally.columns["probabilities"].any() for tally in tallies):
        yield MaskingSign(
            "probabilities",
            "All outputs are non-negative and add up to 1 for each sample.",
            "Attacks expect logits: a softmax on top flattens the loss, and hides gradients of confident samples.",
            "Return logits (before the softmax) and rerun the attacks.",
        )
    if not all(tally.columns["deterministic"].all() for tally in tallies):
        yield MaskingSign(
            "random_outputs",
            "Two forward passes of the same inputs gave different outputs.",
            "A model that is random in eval mode gives the attack a different gradient at every step, and its "
            "predictions change without any attack.",
            "Take the randomness out, or attack the mean of several forward passes.",
        )
