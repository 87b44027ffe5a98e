"""Figures of the reports, drawn without pyplot and its global state."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_robustness.measurement.boundary_curve import BoundaryCurve
from lightning_robustness.measurement.keys import get_key
from lightning_robustness.utilities.drawing import COLORS, MARKERS, new_figure
from lightning_robustness.utilities.number_text import write_budget, write_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lightning_robustness.evaluation.decision_space import DecisionSpace
    from lightning_robustness.evaluation.sweep_report import SweepReport
    from lightning_robustness.evaluation.verdict import Share

# Petroff's ten colours, for classes
_CLASS_COLORS = (
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
)
_WIDTH = 4.8  # of a figure with one panel: a phone can show it without making the text too small
_MAX_TICKS = 6
_MAX_NAME = 24
_MAX_MARKERS = 20


class Series(NamedTuple):
    """A metric in a scatter plot: its label, its value for each model, and their correlation with the accuracy."""

    label: str
    values: Sequence[float]
    correlation: float


def attack_curves(sweep: "SweepReport") -> "Figure":
    """Draw the accuracy of one model against the budget, one curve per attack and one for their worst case."""
    figure = new_figure(_WIDTH, 3.5)
    axis = figure.subplots()
    for index, (name, values) in enumerate(zip(sweep.attacks, sweep.values["accuracy"], strict=True)):
        line = _line(index, len(sweep.eps))
        axis.plot([0.0, *sweep.eps], [sweep.clean_accuracy, *values], label=_text(name), **line)
    if len(sweep.attacks) > 1:
        axis.plot([0.0, *sweep.eps], [sweep.clean_accuracy, *sweep.worst], "k--", label="worst of all")
    axis.set(xlabel=_write_budgets(axis, sweep.has_pixels, sweep.norm), ylabel="accuracy under attack")
    axis.set_ylim(-0.03, 1.03)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=9, frameon=False)
    return figure


def worst_curves(sweeps: Mapping[str, "SweepReport"], budget: float) -> "Figure":
    """Draw the accuracy of several models under the worst of all attacks, with confidence intervals."""
    first = next(iter(sweeps.values()))
    figure = new_figure(_WIDTH, 3.7)
    axis = figure.subplots()
    for index, (name, sweep) in enumerate(sweeps.items()):
        shares = [sweep.robust_accuracy(eps) for eps in (0.0, *sweep.eps)]
        line = _line(index, len(sweep.eps))
        low, high = [share.low for share in shares], [share.high for share in shares]
        axis.fill_between([0.0, *sweep.eps], low, high, color=line["color"], alpha=0.12, linewidth=0)
        axis.plot([0.0, *sweep.eps], [sweep.clean_accuracy, *sweep.worst], label=_text(name), **line)
    axis.axvline(budget, color="0.5", linestyle=":", linewidth=1.2)
    axis.set(xlabel=_write_budgets(axis, first.has_pixels, first.norm), ylabel="robust accuracy", ylim=(-0.03, 1.03))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=9, frameon=False)
    return figure


def model_curves(sweeps: Mapping[str, "SweepReport"], columns: int = 3) -> "Figure":
    """Draw the accuracy of several models against the budget, one panel per attack."""
    first = next(iter(sweeps.values()))
    panels = [*first.attacks, "worst of all"] if len(first.attacks) > 1 else first.attacks
    figure, axes = _grid(len(panels), 3.4, 2.9, columns, shared="all")
    for number, (axis, panel) in enumerate(zip(axes, panels, strict=True)):
        for index, (name, sweep) in enumerate(sweeps.items()):
            values = sweep.values["accuracy"][number] if number < len(sweep.attacks) else sweep.worst
            accuracies, line = [sweep.clean_accuracy, *values], _line(index, len(sweep.eps))
            axis.plot([0.0, *sweep.eps], accuracies, label=_text(name), **line)
        axis.set_title(_text(panel), fontsize=10)
        axis.set_ylim(-0.03, 1.03)
        axis.grid(alpha=0.3)
    _share_legend(figure, axes[0])
    figure.supxlabel(_write_budgets(axes[0], first.has_pixels, first.norm), fontsize=10)
    figure.supylabel("accuracy under attack", fontsize=10)
    return figure


def cmmr_curves(
    eps: Sequence[float], curves: Mapping[str, Sequence[float]], has_pixels: bool = False, norm: str | None = None
) -> "Figure":
    """Draw the CMMR of several models against the budget."""
    figure = new_figure(_WIDTH, 3.5)
    axis = figure.subplots()
    for index, (name, values) in enumerate(curves.items()):
        axis.plot(eps, values, label=_text(name), **_line(index, len(eps)))
    axis.set(xlabel=_write_budgets(axis, has_pixels, norm), ylabel="CMMR (higher is more robust)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=9, frameon=False)
    return figure


def composite_map(
    eps: Sequence[float], composite: Mapping[str, Mapping[str, Sequence[float]]], columns: int = 2
) -> "Figure":
    """Draw the composite metric M as one heat map per model, attacks by budgets."""
    num_attacks = len(next(iter(composite.values())))
    figure, axes = _grid(len(composite), 4.2, 0.9 + 0.35 * num_attacks, min(columns, 2), shared="x")
    values = np.array([list(rows.values()) for rows in composite.values()])
    for axis, cells, (name, rows) in zip(axes, values, composite.items(), strict=True):
        axis.imshow(cells, aspect="auto", cmap="viridis", vmin=values.min(), vmax=values.max())
        axis.set_title(_text(name), fontsize=10)
        axis.set_yticks(range(num_attacks), [_text(attack) for attack in rows], fontsize=9)
        step = math.ceil(len(eps) / 5)
        axis.set_xticks(range(0, len(eps), step), [write_budget(value) for value in eps[::step]], fontsize=9)
    figure.supxlabel("perturbation budget", fontsize=10)
    figure.colorbar(axes[0].images[0], ax=axes, label="M (higher is more robust)")
    return figure


def rank_map(ranks: Mapping[str, Mapping[str, int]], models: Sequence[str]) -> "Figure":
    """Draw the rank of every model by every metric, 1 for the most robust."""
    cells = np.array([[ranks[metric][name] for name in models] for metric in ranks])
    figure = new_figure(2.2 + 1.1 * len(models), 1.2 + 0.32 * len(ranks))
    axis = figure.subplots()
    # One hue, from dark to light, still reads when printed in grey
    axis.imshow(cells, aspect="auto", cmap="Blues_r", vmin=1, vmax=max(len(models), 2) * 1.4)
    for (row, column), rank in np.ndenumerate(cells):
        is_dark = rank - 1 < 0.45 * max(len(models) * 1.4 - 1, 1)
        axis.text(column, row, str(rank), ha="center", va="center", color="white" if is_dark else "black")
    slant: dict[str, Any] = {"rotation": 20, "ha": "left"} if len(models) > 3 else {}
    axis.set_xticks(range(len(models)), [_text(name) for name in models], fontsize=9, **slant)
    axis.set_yticks(range(len(ranks)), list(ranks), fontsize=9)
    axis.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axis.set_title("rank, 1 is most robust", fontsize=10)
    return figure


def scatter(series: Sequence[Series], accuracies: Mapping[str, float], columns: int = 3) -> "Figure":
    """Draw attack-free metrics against adversarial accuracy, one point per model, with a fitted line."""
    figure, axes = _grid(len(series), 3.4, 2.6, columns, shared="y")
    accuracy = np.array(list(accuracies.values()))
    for axis, metric in zip(axes, series, strict=True):
        values = np.array(metric.values, dtype=float)
        for index, (name, value) in enumerate(zip(accuracies, values, strict=True)):
            color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
            axis.scatter([value], [accuracy[index]], label=_text(name), zorder=3, color=color, marker=marker)
        if not math.isnan(metric.correlation):
            slope, offset = np.polyfit(values, accuracy, 1)
            ends = np.array([values.min(), values.max()])
            axis.plot(ends, slope * ends + offset, color="0.5", linewidth=1)
        axis.set_title(f"r = {metric.correlation:.2f}, n = {len(values)}", fontsize=9)
        axis.set_xlabel(metric.label, fontsize=9)
        axis.tick_params(labelsize=9)
        axis.locator_params(axis="x", nbins=4)
        axis.grid(alpha=0.3)
    _share_legend(figure, axes[0])
    figure.supylabel("adversarial accuracy", fontsize=10)
    return figure


def accuracies(shares: Mapping[str, "Share"], unbounded: Mapping[str, str] | None = None, budget: str = "") -> "Figure":
    """Draw the accuracy without an attack and under each of them, with confidence intervals.

    Args:
        shares: Accuracies by name: ``"clean"``, attacks, and their worst case ``"worst"``.
        unbounded: Attacks without a budget of their own, and the sizes at which their success counts.
        budget: Budget of the others, as text.

    """
    figure, unbounded = new_figure(_WIDTH, 1.1 + 0.42 * len(shares)), unbounded or {}
    axis = figure.subplots()
    for row, (name, share) in enumerate(shares.items()):
        color = {"clean": COLORS[2], "worst": COLORS[1]}.get(name, "0.5" if name in unbounded else COLORS[0])
        axis.plot([share.low, share.high], [row, row], color=color, linewidth=4, alpha=0.45)
        axis.plot([share.value], [row], "o", color=color)
        side = 8 if share.high < 0.8 else -8
        axis.annotate(
            write_share(share.value),
            (share.high if side > 0 else share.low, row),
            xytext=(side, 0),
            textcoords="offset points",
            ha="left" if side > 0 else "right",
            va="center",
            fontsize=10,
        )
    names = [f"{_text(name)}, {unbounded[name]}" if name in unbounded else _text(name) for name in shares]
    axis.set_yticks(range(len(shares)), names)
    axis.set_ylim(len(shares) - 0.5, -0.5)
    axis.set_xlim(-0.02, 1.02)
    axis.set_xlabel(f"accuracy{f', attacks at {budget}' if budget else ''}, 95 % intervals")
    axis.grid(axis="x", alpha=0.3)
    return figure


def boundary_curve(curve: BoundaryCurve, has_pixels: bool = False) -> "Figure":
    """Draw robust accuracy to first order against the budget, with its confidence interval."""
    figure = new_figure(_WIDTH, 3.5)
    axis = figure.subplots()
    axis.fill_between(curve.eps, curve.low, curve.high, color=COLORS[0], alpha=0.2, linewidth=0)
    axis.plot(curve.eps, curve.share, color=COLORS[0])
    axis.set(xlabel=_write_budgets(axis, has_pixels, curve.norm), ylabel=get_key("boundary_acc").label)
    axis.set_ylim(-0.03, 1.03)
    axis.grid(alpha=0.3)
    return figure


def decision_space_figure(space: "DecisionSpace", columns: int = 2) -> "Figure":
    """Draw two-dimensional embeddings of clean and adversarial samples, coloured by true class."""
    figure, axes = _grid(2, 4.2, 3.8, columns, shared="all")
    labels = np.array(space.labels)
    classes = np.unique(labels)
    panels = {"clean samples": space.clean, f"under {space.attack}": space.adversarial}
    for axis, (title, points) in zip(axes, panels.items(), strict=True):
        for number, label in enumerate(classes):
            rows = np.array(points)[labels == label]
            color, marker = _CLASS_COLORS[number % len(_CLASS_COLORS)], MARKERS[number % len(MARKERS)]
            # Thousands of points as shapes would make a page slow
            look: dict[str, Any] = {"s": 14, "linewidths": 0, "alpha": 0.75, "rasterized": True}
            axis.scatter(rows[:, 0], rows[:, 1], color=color, marker=marker, label=str(label), **look)
        axis.set(title=title, xticks=[], yticks=[])
    if len(classes) <= 20:
        _share_legend(figure, axes[0], title="true class", markerscale=2)
    figure.supxlabel(f"{space.method} of the embeddings, on the same axes", fontsize=9)
    return figure


def _write_budgets(axis: "Axes", has_pixels: bool, norm: str | None) -> str:
    """Set the ticks of budgets and return the label of their axis."""
    unit = "units of the input"
    axis.locator_params(axis="x", nbins=_MAX_TICKS)
    if has_pixels:
        from matplotlib.ticker import FuncFormatter, MultipleLocator

        steps = 255 * axis.get_xlim()[1]
        size = 2 ** max(math.ceil(math.log2(steps / _MAX_TICKS)), -3)
        axis.xaxis.set_major_locator(MultipleLocator(size / 255))
        axis.xaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{round(255 * value, 3):g}/255" if value else "0")
        )
        unit = "pixels from 0 to 1"
    return f"perturbation budget ({unit}{f', {norm}' if norm else ''})"


def _text(name: str) -> str:
    """Escape dollar signs, which start a formula, and a leading underscore, which hides a name from legends.

    Of a long name, which would leave no room for the curves, the middle is left out.
    """
    name = name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME // 2]}...{name[-_MAX_NAME // 3 :]}"
    escaped = name.replace("$", "\\$")
    return f" {escaped}" if name.startswith("_") else escaped


def _line(index: int, length: int) -> dict[str, Any]:
    return {
        "color": COLORS[index % len(COLORS)],
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 4,
        "markevery": max(length // _MAX_MARKERS, 1),
        "linewidth": 1.4,
    }


def _grid(
    number: int, width: float, height: float, columns: int = 3, shared: str = ""
) -> tuple["Figure", list["Axes"]]:
    """Make a figure with this many axes, filled row by row."""
    columns = min(columns, number)
    rows = math.ceil(number / columns)
    figure = new_figure(0.6 + width * columns, 0.9 + height * rows)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=shared in ("x", "all"), sharey=shared in ("y", "all"))
    used = list(axes.flat)
    for axis in used[number:]:
        axis.remove()
    for axis in used[max(number - columns, 0) : number]:
        axis.tick_params(labelbottom=True)  # the axis below may have been removed
    return figure, used[:number]


def _share_legend(figure: "Figure", axis: "Axes", **options: Any) -> None:
    """Put one legend above all axes, with as many columns as fit."""
    handles, labels = axis.get_legend_handles_labels()
    inches = 0.6 + 0.075 * max(map(len, labels))
    columns = min(len(labels), max(int(figure.get_figwidth() / inches), 1))
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, fontsize=9, frameon=False, **options)
