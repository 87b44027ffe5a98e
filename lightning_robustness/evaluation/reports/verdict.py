"""The result of a report in one sentence."""

import math
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import Self

from lightning_robustness._measurement.statistics import accuracy_interval
from lightning_robustness._numbers import write_interval, write_share

if TYPE_CHECKING:
    from lightning_robustness.evaluation.reports.robustness_report import RobustnessReport
    from lightning_robustness.evaluation.reports.sweep_report import SweepReport


class Share(NamedTuple):
    """A share of samples with its 95 % Wilson interval."""

    value: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, value: float, samples: float) -> Self:
        """Compute the interval of a share of this many samples.

        Example:
            >>> from lightning_robustness.evaluation.reports.verdict import Share
            >>> str(Share.of(0.8, 10))
            '(49-94 %, n = 10)'

        """
        if math.isnan(value):
            return cls(value, 0.0, 1.0, int(samples))
        return cls(value, *accuracy_interval(value, samples), int(samples))

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
        return (
            f"{write_share(first_order)} robust accuracy to first order{f' at {budget}' if budget else ''} "
            f"{Share.of(first_order, count)}, an estimate without attacks, {write_share(clean)} clean"
        )
    return f"Robust accuracy is unknown, as no attack ran; {write_share(clean)} clean"


def _of_attacks(report: "RobustnessReport", clean: float) -> str:
    name = "worst" if "worst" in report.rates else min(report.rates, key=lambda key: report.rates[key]["adv_acc"])
    rate, budget = report.rates[name], report.threat_model.budget
    share = Share.of(rate["adv_acc"], rate["count"])
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
