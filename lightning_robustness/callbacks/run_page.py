"""A training run as a page."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_robustness.callbacks.monitor_settings import MonitorSettings
from lightning_robustness.callbacks.run_summary import RunSummary
from lightning_robustness.measurement.glossary import glossary
from lightning_robustness.measurement.keys import KEYS, find_key, get_key
from lightning_robustness.measurement.threat_model import ThreatModel
from lightning_robustness.measurement.trust import Evaluation
from lightning_robustness.utilities.number_text import write_interval, write_share
from lightning_robustness.utilities.page import Page
from lightning_robustness.utilities.provenance import describe_run
from lightning_robustness.utilities.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PARTS = (
    ("attacks", "Attacks, by epoch"),
    ("features", "RDI, ROBY and accuracy, by epoch"),
    ("fim", "Fisher information and distance to the boundary, by epoch"),
    ("clever", "CLEVER, by epoch"),
)


def run_page(history: Sequence[Evaluation], settings: MonitorSettings, figure: "Figure") -> Page:
    """Make the page of a training run.

    Args:
        history: The evaluations of the run, as the monitor keeps them.
        settings: The settings of the monitor.
        figure: The picture of the run.

    """
    summary = RunSummary.of(history)
    samples = summary.num_samples or settings.attack_samples
    l2_budget = next((entry["l2_budget"] for entry in reversed(history) if "l2_budget" in entry), None)
    threat = ThreatModel.of(settings.attacks, settings.input_space, samples, l2_budget=l2_budget)
    names = list(dict.fromkeys(name for entry in history for name in entry))
    return Page(
        title=f"Training run, {settings.prefix}",
        verdict=run_verdict(summary, history, threat.budget),
        facts=threat.describe(),
        figures={"The run": figure} if history else {},
        tables=[table for table in _tables(history, summary, settings, names) if table.rows],
        glossary=glossary(names),
        provenance=describe_run() | {"seed": str(settings.seed)},
    )


def run_verdict(summary: RunSummary, history: Sequence[Evaluation], budget: str) -> str:
    """Say in one sentence which epoch is the most robust, and whether that can be trusted."""
    if not history:
        return "Nothing was measured: there was no validation epoch to watch."
    if summary.reference is None:
        return f"The most robust of {len(history)} evaluations is unknown, as no attack ran."
    name = summary.reference.removeprefix("adv_acc/")
    what = f"robust accuracy at {budget}" if budget and name == "worst" else f"accuracy under {name}"
    what += f" at {budget}" if budget and name != "worst" else ""
    best = next(entry for entry in history if entry["epoch"] == summary.epoch and summary.reference in entry)
    clean = f", {write_share(best['acc'])} clean" if "acc" in best else ""
    epochs = ", ".join(map(str, summary.masked_epochs))
    if epochs:
        masking = f"signs of masked gradients in epochs {epochs}, so the true value may be lower"
    else:
        checked = any("masking" in entry for entry in history)
        masking = "no signs of masked gradients" if checked else "masked gradients were not checked"
    return (
        f"Epoch {summary.epoch} is the most robust: {write_share(summary.accuracy)} {what} "
        f"({write_interval(*summary.interval)}, n = {summary.num_samples}){clean}; {masking}."
    )


def _tables(
    history: Sequence[Evaluation], summary: RunSummary, settings: MonitorSettings, names: Sequence[str]
) -> list[Table]:
    choices = [
        [get_key(name).label, c.epoch, c.cost, c.guarded_epoch, c.guarded_cost, c.trust]
        for name, c in summary.choices.items()
    ]
    return [
        Table(
            "Epochs that attack-free metrics would have picked",
            ["metric", "epoch", "points lost", "guarded epoch", "points lost, guarded", "trust"],
            choices,
            note="Points lost: accuracy under attack below that of the most robust epoch. Guarded: only epochs within "
            "two points of the best clean accuracy count. Trust: Kendall's tau-b with accuracy under attack.",
        ),
        *(_history_table(title, history, [name for name in names if _part(name) == part]) for part, title in _PARTS),
        Table("Time", ["part", "seconds"], [[name, value] for name, value in summary.seconds.items()], folded=True),
        Table("Settings", ["setting", "value"], list(settings.describe().items()), folded=True),
    ]


def _part(name: str) -> str:
    key = find_key(name)  # None for epoch and step
    return "" if key is None or key.role == "bookkeeping" else key.part


def _history_table(title: str, history: Sequence[Evaluation], names: Sequence[str]) -> Table:
    order = {key.name.partition("<")[0]: number for number, key in enumerate(KEYS)}
    names = sorted(names, key=lambda name: order.get(name, order.get(f"{name.partition('/')[0]}/", len(order))))
    rows = [[int(entry["epoch"]), *(entry.get(name, math.nan) for name in names)] for entry in history]
    return Table(title, ["epoch", *names], rows if names else [], folded=True)
