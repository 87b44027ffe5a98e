"""Which epoch or model is the most robust, and which ones cannot be told from it: one rule for all who say so."""

import math
from collections.abc import Hashable, Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple, TypeVar

from lightning_robustness._measurement.assisted import Assisted
from lightning_robustness._measurement.statistics import (
    Evaluation,
    accuracy_interval,
    attack_of,
    comparable,
    most_robust,
    reference_of,
)
from lightning_robustness._numbers import write_interval, write_share
from lightning_robustness.attacks.masking import binomial_tail

Name = TypeVar("Name", bound=Hashable)
# Outcomes of the attacks of each evaluation, by its step
Outcomes = Mapping[int, Mapping[str, Assisted]]
CORRECTED = "corrected for selection, slightly pessimistic"
_LEVEL = 0.05
_Z = NormalDist().inv_cdf(1 - _LEVEL / 2)
_MAX_NAMED = 5


class Rival(NamedTuple):
    """Difference in robust accuracy to the best, with its 95 % interval, and the p-value of the test behind both."""

    difference: float
    low: float
    high: float
    p_value: float


def rival(best: Assisted, other: Assisted) -> Rival:
    """Compare a model or an epoch with the best one, by pairs if the samples are the same."""
    if not best.positions.equal(other.positions):
        return _compare_unpaired(best, other)
    is_plain = best.means is None or other.means is None
    return _compare_exactly(best, other) if is_plain else _compare_paired(best, other)


def _compare_unpaired(best: Assisted, other: Assisted) -> Rival:
    shares = best.estimate(), other.estimate()
    gap = shares[1].value - shares[0].value
    reach = math.hypot(*((share.high - share.low) / 2 for share in shares))
    return Rival(gap, gap - reach, gap + reach, 2 * NormalDist().cdf(-abs(gap) / (reach / _Z)))


def _compare_paired(best: Assisted, other: Assisted) -> Rival:
    """Compare two assisted accuracies on the same samples by the normal distribution."""
    gap = other.estimate().value - best.estimate().value
    number, total = len(best.robust), best.total
    changes = (best.robust - other.robust).square().sum().item()
    remainder = (best.residuals - other.residuals).double().square().sum().item()
    variance = (1 / number - 1 / total) * (remainder + 2) / (number + 2) + (changes + 1) / ((number + 2) * total)
    error = math.sqrt(variance)
    reach = _Z * error
    return Rival(gap, max(gap - reach, -1.0), min(gap + reach, 1.0), 2 * NormalDist().cdf(-abs(gap) / error))


def _compare_exactly(best: Assisted, other: Assisted) -> Rival:
    """Compare two accuracies on the same samples, one of them plain, by McNemar's exact test.

    The interval is Clopper and Pearson's, on the samples on which the two differ.
    """
    only_best = int(((best.robust > 0) & (other.robust == 0)).sum())
    only_other = int(((other.robust > 0) & (best.robust == 0)).sum())
    number, total = only_best + only_other, len(best.robust)
    ends = _lower_end(only_other, number), 1 - _lower_end(only_best, number)
    low, high = (number * (2 * end - 1) / total for end in ends)
    p_value = min(1.0, 2 * binomial_tail(max(only_best, only_other), number, 0.5))
    return Rival((only_other - only_best) / total, low, high, p_value)


def _lower_end(successes: int, number: int) -> float:
    """Return the lower end of the exact 95 % interval of a share, by bisection."""
    low = 0.0
    high = successes / max(number, 1)
    for _ in range(50):
        share = (low + high) / 2
        low, high = (low, share) if binomial_tail(successes, number, share) > 0.025 else (share, high)
    return (low + high) / 2


def tied(p_values: Mapping[Name, float]) -> list[Name]:
    """Return those that cannot be told from the best one, given the p-values of all comparisons with it (Holm)."""
    ordered = sorted(p_values, key=lambda name: p_values[name])
    for number, name in enumerate(ordered):
        if p_values[name] * (len(ordered) - number) >= _LEVEL:
            return [other for other in p_values if other in ordered[number:]]
    return []


def ties_of_models(outcomes: Mapping[str, Assisted], order: Sequence[str]) -> list[str]:
    """Return the models that cannot be told from the best, the first in order; none if it beats the runner-up."""
    best, *others = order
    p_values = {name: rival(outcomes[best], outcomes[name]).p_value for name in others}
    if not others or p_values[others[0]] < _LEVEL:
        return []
    return [name for name in others if name in {others[0], *tied(p_values)}]


def list_names(names: Sequence[str]) -> str:
    """List names, at most five, and count the others."""
    rest = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


class Kept(NamedTuple):
    """The kept epoch of a run: its accuracy under attack, and the evaluations that cannot be told from it.

    Accuracy is corrected for selection if the epoch was chosen by it: chosen with one half of the attacked samples and
    read with the other, both ways. ``entry`` is the most robust one if no attack ran in the ``checkpoint``.
    """

    reference: str
    entry: Evaluation
    accuracy: float
    low: float
    high: float
    is_corrected: bool = False
    ties: tuple[Evaluation, ...] = ()
    checkpoint: Evaluation | None = None

    @property
    def is_checkpoint(self) -> bool:
        """Return whether a checkpoint kept the epoch of the accuracy."""
        return self.checkpoint is self.entry

    def status(self, position: str = "epoch") -> str:
        """Say what was kept, and which epoch, or step, has the accuracy."""
        own = f"{position} {self.entry[position]:g}"
        if self.checkpoint is None:
            return f"{own} most robust"
        if self.is_checkpoint:
            return f"{own} kept"
        return f"{position} {self.checkpoint[position]:g} kept, not attacked; {own} most robust"

    def describe(self, budget: str = "") -> str:
        """Say in one sentence what was kept, and how robust it is."""
        attack, at = attack_of(self.reference), f" at {budget}" if budget else ""
        kind = "robust accuracy" if budget and attack == "all attacks" else f"accuracy under {attack}"
        corrected = f", {CORRECTED}" if self.is_corrected else ""
        interval = f"95 % interval {write_interval(self.low, self.high)}, n = {self.entry['samples_attacks']:g}"
        clean = f", {write_share(self.entry['acc'])} clean" if "acc" in self.entry else ""
        would = "" if self.checkpoint else " (RobustModelCheckpoint would keep it)"
        text = f"{self.status()}{would}: {write_share(self.accuracy)} {kind}{at} ({interval}{corrected}){clean}"
        names = list_names([f"{own['epoch']:g} ({write_share(own.get('acc', math.nan))})" for own in self.ties])
        return f"{text}; not distinguishable (clean accuracy): {names}" if names else text


def kept_epoch(
    history: Sequence[Evaluation], outcomes: Outcomes | None = None, checkpoint: tuple[str, int] | None = None
) -> Kept | None:
    """Return the epoch that a checkpoint kept, given the value it went by and its step, else the most robust one.

    None if no attack ran.
    """
    by, step = checkpoint or ("", -1)
    reference = by if by.startswith("adv_acc/") else reference_of(history)
    entries = comparable(history, reference, reference)
    found = most_robust(history, reference)
    if found is None:
        return None
    saved = next((own for own in history if own["step"] == step), None) if checkpoint else None
    is_attacked = any(own is saved for own in entries)
    entry = saved if saved is not None and is_attacked else found
    is_chosen = not is_attacked or reference == by
    low, high = interval_of(entry, reference)
    kept = Kept(reference, entry, entry[reference], low, high, checkpoint=saved)
    attack, outcomes = reference.removeprefix("adv_acc/"), outcomes or {}
    steps = [int(own.get("step", -1)) for own in entries]
    known = {step: outcomes[step][attack] for step in steps if attack in outcomes.get(step, {})}
    if len(known) < len(entries) or len(entries) < 2:
        return kept
    best = known[int(entry["step"])]
    p_values = {step: rival(best, other).p_value for step, other in known.items() if step != int(entry["step"])}
    alike = set(tied(p_values))
    kept = kept._replace(ties=tuple(own for own in entries if int(own["step"]) in alike))
    are_same = all(best.positions.equal(other.positions) for other in known.values())
    if not is_chosen or not are_same or not best.has_halves:
        return kept
    accuracy = _corrected(entries, reference, known)
    shift = accuracy - kept.accuracy
    low, high = (min(max(end + shift, 0.0), 1.0) for end in (low, high))
    return kept._replace(accuracy=accuracy, low=low, high=high, is_corrected=True)


def interval_of(entry: Evaluation, name: str) -> tuple[float, float]:
    """Return the interval of an accuracy, as it was logged or, in older runs, of the plain share."""
    family, _, member = name.partition("/")
    ends = [entry.get(f"{family}_{end}/{member}", math.nan) for end in ("low", "high")]
    if not any(map(math.isnan, ends)):
        return ends[0], ends[1]
    return accuracy_interval(entry[name], entry["samples_attacks"]) if "samples_attacks" in entry else (0.0, 1.0)


def _corrected(entries: Sequence[Evaluation], reference: str, known: Mapping[int, Assisted]) -> float:
    """Choose by one half of the attacked samples and read the other, both ways."""
    read = []
    for fold in (0, 1):
        halves = [{**own, reference: known[int(own["step"])].half(fold, is_read=False)} for own in entries]
        chosen = most_robust(halves, reference)
        assert chosen is not None
        read.append(known[int(chosen["step"])].half(fold, is_read=True))
    return min(max(sum(read) / 2, 0.0), 1.0)
