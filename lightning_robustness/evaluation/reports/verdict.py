"""The result of a report in one sentence."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import Self

from lightning_robustness._measurement.statistics import accuracy_interval
from lightning_robustness._measurement.verdict import list_names
from lightning_robustness._numbers import write_interval, write_share

if TYPE_CHECKING:
    from lightning_robustness.evaluation.reports.robustness_report import RobustnessReport
    from lightning_robustness.evaluation.reports.sweep_report import SweepReport


class Share(NamedTuple):
    """A share of samples with its 95 % interval, and the number of samples it is estimated from."""

    value: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, value: float, samples: float) -> Self:
        """Compute the interval of a share of this many samples."""
        if math.isnan(value):
            return cls(value, 0.0, 1.0, int(samples))
        return cls(value, *accuracy_interval(value, samples), int(samples))

    @classmethod
    def of_rates(cls, rates: Mapping[str, float]) -> Self:
        """Return the accuracy under an attack."""
        return cls(rates["adv_acc"], rates["adv_acc_low"], rates["adv_acc_high"], int(rates["count"]))

    def __str__(self) -> str:
        return f"({write_interval(self.low, self.high)}, n = {self.samples})"


def model_verdict(report: "RobustnessReport") -> str:
    """Say how robust one model is: its robust accuracy, or what there is instead, and whether that can be trusted."""
    parts = [_robustness(report)]
    if report.signs:
        names = ", ".join(sign.name for sign in report.signs)
        parts.append(f"signs of masked gradients ({names}), so the true value is lower")
    elif report.metrics.get("masking") == 0:
        parts.append("no signs of masked gradients")
    elif report.rates or report.sweep is not None:
        parts.append("masked gradients were not checked")
    if report.interrupted is not None:
        parts.append(f"interrupted while measuring {report.interrupted}")
    return f"{'; '.join(parts)}."


def comparison_verdict(shares: Mapping[str, Share], ties: Sequence[str], budget: str, clean: float) -> str:
    """Say which of several models is the most robust, or that the best ones cannot be told apart."""
    first, *others = shares
    share = shares[first]
    number = f"{write_share(share.value)} robust accuracy {share}, {write_share(clean)} clean"
    if ties:
        return (
            f"{first} and {list_names(ties)} are not distinguishable at n = {share.samples}, of {len(shares)} models "
            f"at {budget}: {first} has {number}, {ties[0]} {write_share(shares[ties[0]].value)} {shares[ties[0]]}"
        )
    place = f"the most robust of {len(shares)} models" if others else "the only model"
    text = f"{first} is {place} at {budget}: {number}"
    if others:
        second = shares[others[0]]
        text += f"; {others[0]} is next with {write_share(second.value)} {second}"
    return text


def sweep_verdict(sweep: "SweepReport") -> str:
    """Say how robust one model is at the middle budget of a sweep."""
    interrupted = "; interrupted before all samples were attacked" if sweep.interrupted else ""
    return f"{_of_sweep(sweep)}{interrupted}."


def _robustness(report: "RobustnessReport") -> str:
    clean = report.metrics.get("acc", math.nan)
    if report.rates:
        return _of_attacks(report, clean)
    if report.sweep is not None:
        return _of_sweep(report.sweep)
    if not report.metrics:
        return "Nothing was measured"
    if math.isnan(clean):
        return "Accuracy is unknown, as there are no labels: only attack-free metrics were measured"
    count, first_order = report.metrics.get("samples_fim", 0), report.metrics.get("boundary_acc", math.nan)
    if count and not math.isnan(first_order):
        budget = report._boundary_budget
        share = Share.of(first_order, count)
        ends = [report.metrics.get(f"boundary_acc_{end}", math.nan) for end in ("low", "high")]
        if not math.isnan(sum(ends)):
            share = share._replace(low=ends[0], high=ends[1])
        return (
            f"{write_share(first_order)} robust accuracy to first order{f' at {budget}' if budget else ''} "
            f"{share}, an estimate without attacks, {write_share(clean)} clean"
        )
    return f"Robust accuracy is unknown, as no attack ran; {write_share(clean)} clean"


def _of_attacks(report: "RobustnessReport", clean: float) -> str:
    name = "worst" if "worst" in report.rates else min(report.rates, key=lambda key: report.rates[key]["adv_acc"])
    rate = report.rates[name]
    budget = report.threat_model.budget
    share = Share.of_rates(rate)
    clean = rate["correct"] / rate["count"] if math.isnan(clean) and rate["count"] else clean
    if not budget:
        what = f"accuracy under {', '.join(other for other in report.rates if other != 'worst')}, without a budget"
    elif name == "worst":
        what = f"robust accuracy at {budget}"
    else:
        what = f"accuracy under {name} at {budget}"
    return f"{write_share(share.value)} {what} {share}, {write_share(clean)} clean"


def _of_sweep(sweep: "SweepReport") -> str:
    share, clean = sweep.robust_accuracy(), write_share(sweep.clean_accuracy)
    return f"{write_share(share.value)} robust accuracy at {sweep._budget_text} {share}, {clean} clean"
