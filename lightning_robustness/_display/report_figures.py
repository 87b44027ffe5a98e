"""Figures of reports, drawn without pyplot and its global state."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_robustness._display.drawing import COLORS, marked, new_figure, plain_figure
from lightning_robustness._measurement.assisted import BoundaryCurve
from lightning_robustness._measurement.keys import get_key
from lightning_robustness._numbers import write_budget, write_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Petroff's ten colours, for classes
_CLASS_COLORS = (
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
)
_WIDTH = 4.8  # of a figure with one panel
_MAX_TICKS = 6
_MAX_NAME = 24
_MAX_MARKERS = 20
# The curve that is the worst case of the others
WORST = "worst of all"
_LIMITS = (-0.03, 1.03)  # of an axis of shares


class Scale(NamedTuple):
    """How budgets are written: in steps of 8-bit pixels or as plain numbers, and their common norm if they have one."""

    has_pixels: bool = False
    norm: str | None = None


_PLAIN = Scale()


def curves(
    budgets: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    ylabel: str,
    scale: Scale = _PLAIN,
    bands: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    mark: float | None = None,
    limits: tuple[float, float] | None = _LIMITS,
) -> "Figure":
    """Draw lines over budgets, with bands from low to high, and a mark at one of the budgets."""
    figure = new_figure(_WIDTH, 3.6)
    axis = figure.subplots()
    _draw_curves(axis, budgets, lines, limits)
    for number, (low, high) in enumerate([] if bands is None else bands.values()):
        axis.fill_between(budgets, low, high, color=marked(number)["color"], alpha=0.12, linewidth=0)
    if mark is not None:
        axis.axvline(mark, color="0.5", linestyle=":", linewidth=1.2)
    axis.set(xlabel=_write_budgets(axis, scale), ylabel=ylabel)
    axis.legend(fontsize=9, frameon=False)
    return figure


def panels_of_curves(
    budgets: Sequence[float], panels: Mapping[str, Mapping[str, Sequence[float]]], ylabel: str, scale: Scale = _PLAIN
) -> "Figure":
    """Draw lines over budgets in several panels, all with the same lines."""
    figure, axes = _grid(len(panels), 3.4, 2.9, columns=3, shared="all")
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        _draw_curves(axis, budgets, lines, _LIMITS)
        axis.set_title(_text(title), fontsize=10)
    _share_legend(figure, axes[0])
    figure.supxlabel(_write_budgets(axes[0], scale), fontsize=10)
    figure.supylabel(ylabel, fontsize=10)
    return figure


def boundary_figure(curves: Mapping[str, BoundaryCurve], has_pixels: bool = False) -> "Figure":
    """Draw robust accuracy to first order over budgets, a line for each curve, from light to dark.

    The last one has its 95 % confidence interval; a dotted line marks the budget of the attacks.
    """
    figure = plain_figure(3.6, 2.8)
    axis = figure.add_axes((0.16, 0.17, 0.77, 0.8))
    *_, last = curves.values()
    for number, (name, curve) in enumerate(curves.items()):
        # Only the first and the last line have a name: a label that starts with an underscore is not in the legend
        label = name if number in (0, len(curves) - 1) else f"_{name}"
        opacity = 0.15 + 0.85 * (number + 1) / len(curves)
        axis.plot(curve.eps, curve.share, color=COLORS[0], alpha=opacity, label=label)
    axis.fill_between(last.eps, last.low, last.high, color=COLORS[0], alpha=0.15, linewidth=0)
    axis.axvline(last.budget, color="0.4", linestyle=":", linewidth=1, zorder=0)
    axis.text(last.budget, 1.0, " eps", fontsize=8, va="top")
    axis.set(ylim=_LIMITS, yticks=[0, 0.25, 0.5, 0.75, 1], xlim=(0, last.eps[-1]))
    axis.set_xlabel(_write_budgets(axis, Scale(has_pixels, last.norm)), fontsize=8)
    axis.set_ylabel(get_key("boundary_acc").label, fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(axis="y", alpha=0.3)
    if len(curves) > 1:
        axis.legend(fontsize=8, frameon=False, loc="upper right")
    return figure


def composite_map(budgets: Sequence[float], composite: Mapping[str, Mapping[str, Sequence[float]]]) -> "Figure":
    """Draw the composite metric M as one heat map per model, attacks by budgets."""
    num_attacks = len(next(iter(composite.values())))
    figure, axes = _grid(len(composite), 4.2, 0.9 + 0.35 * num_attacks, columns=2, shared="x")
    values = np.array([list(rows.values()) for rows in composite.values()])
    for axis, cells, (name, rows) in zip(axes, values, composite.items(), strict=True):
        axis.imshow(cells, aspect="auto", cmap="viridis", vmin=values.min(), vmax=values.max())
        axis.set_title(_text(name), fontsize=10)
        axis.set_yticks(range(num_attacks), [_text(attack) for attack in rows], fontsize=9)
        step = math.ceil(len(budgets) / 5)
        axis.set_xticks(range(0, len(budgets), step), [write_budget(value) for value in budgets[::step]], fontsize=9)
    figure.supxlabel("perturbation budget", fontsize=10)
    figure.colorbar(axes[0].images[0], ax=axes, label="M (higher is more robust)")
    return figure


def scatter(series: Mapping[str, tuple[Mapping[str, float], float]], accuracies: Mapping[str, float]) -> "Figure":
    """Draw attack-free metrics against mean robust accuracy, one point per model, with a fitted line.

    Each series has a label, the values of the models, and their correlation with the accuracy.
    """
    figure, axes = _grid(len(series), 3.4, 2.6, columns=3, shared="y")
    for axis, (label, (values, correlation)) in zip(axes, series.items(), strict=True):
        for number, (name, value) in enumerate(values.items()):
            axis.scatter([value], [accuracies[name]], label=_text(name), zorder=3, **marked(number))
        if not math.isnan(correlation):
            slope, offset = np.polyfit(list(values.values()), [accuracies[name] for name in values], 1)
            ends = np.array([min(values.values()), max(values.values())])
            axis.plot(ends, slope * ends + offset, color="0.5", linewidth=1)
        axis.set_title(f"r = {correlation:.2f}, n = {len(values)}", fontsize=9)
        axis.set_xlabel(label, fontsize=9)
        axis.tick_params(labelsize=9)
        axis.locator_params(axis="x", nbins=4)
        axis.grid(alpha=0.3)
    _share_legend(figure, axes[0])
    figure.supylabel("mean robust accuracy", fontsize=10)
    return figure


def accuracies(
    shares: Mapping[str, tuple[float, float, float]], unbounded: Mapping[str, str], budget: str = ""
) -> "Figure":
    """Draw the accuracy without an attack and under each of them, with the ends of their confidence intervals."""
    figure = new_figure(_WIDTH, 1.1 + 0.42 * len(shares))
    axis = figure.subplots()
    for row, (name, (value, low, high)) in enumerate(shares.items()):
        color = {"clean": COLORS[2], "worst": COLORS[1]}.get(name, "0.5" if name in unbounded else COLORS[0])
        axis.plot([low, high], [row, row], color=color, linewidth=4, alpha=0.45)
        axis.plot([value], [row], "o", color=color)
        end, side, alignment = (high, 8, "left") if high < 0.8 else (low, -8, "right")
        place: dict[str, Any] = {"xytext": (side, 0), "textcoords": "offset points", "ha": alignment, "va": "center"}
        axis.annotate(write_share(value), (end, row), fontsize=10, **place)
    names = [f"{_text(name)}, {unbounded[name]}" if name in unbounded else _text(name) for name in shares]
    axis.set_yticks(range(len(shares)), names)
    axis.set(ylim=(len(shares) - 0.5, -0.5), xlim=(-0.02, 1.02))
    axis.set_xlabel(f"accuracy{f', attacks at {budget}' if budget else ''}, 95 % intervals")
    axis.grid(axis="x", alpha=0.3)
    return figure


def clouds(panels: Mapping[str, Sequence[Sequence[float]]], labels: Sequence[int], method: str) -> "Figure":
    """Draw embeddings in two dimensions, one panel for each set of points, coloured by true class."""
    figure, axes = _grid(len(panels), 4.2, 3.8, columns=2, shared="all")
    classes = np.unique(labels)
    for axis, (title, points) in zip(axes, panels.items(), strict=True):
        for number, label in enumerate(classes):
            rows = np.array(points)[np.array(labels) == label]
            # Thousands of points as shapes would make a page slow
            look = {"s": 14, "linewidths": 0, "alpha": 0.75, "rasterized": True} | marked(number, _CLASS_COLORS)
            axis.scatter(rows[:, 0], rows[:, 1], label=str(label), **look)
        axis.set(title=title, xticks=[], yticks=[])
    if len(classes) <= 20:
        _share_legend(figure, axes[0], title="true class", markerscale=2)
    figure.supxlabel(f"{method} of the embeddings, on the same axes", fontsize=9)
    return figure


def _write_budgets(axis: "Axes", scale: Scale) -> str:
    """Set the ticks of budgets and return the label of their axis."""
    unit = "units of the input"
    axis.locator_params(axis="x", nbins=_MAX_TICKS)
    if scale.has_pixels:
        from matplotlib.ticker import FuncFormatter, MultipleLocator

        steps = 255 * axis.get_xlim()[1]
        size = 2 ** max(math.ceil(math.log2(steps / _MAX_TICKS)), -3)
        axis.xaxis.set_major_locator(MultipleLocator(size / 255))
        axis.xaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{round(255 * value, 3):g}/255" if value else "0")
        )
        unit = "pixels from 0 to 1"
    return f"perturbation budget ({unit}{f', {scale.norm}' if scale.norm else ''})"


def _text(name: str) -> str:
    """Escape dollar signs, which start a formula, and a leading underscore, which hides a name from legends.

    Of a long name, which would leave no room for the curves, the middle is left out.
    """
    name = name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME // 2]}...{name[-_MAX_NAME // 3 :]}"
    escaped = name.replace("$", "\\$")
    return f" {escaped}" if name.startswith("_") else escaped


def _draw_curves(
    axis: "Axes",
    budgets: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    limits: tuple[float, float] | None,
) -> None:
    step = max(len(budgets) // _MAX_MARKERS, 1)
    for number, (name, values) in enumerate(lines.items()):
        look = {"markersize": 4, "markevery": step, "linewidth": 1.4} | marked(number)
        axis.plot(budgets, values, label=_text(name), **({"color": "k", "linestyle": "--"} if name == WORST else look))
    axis.set_ylim(limits)
    axis.grid(alpha=0.3)


def _grid(number: int, width: float, height: float, columns: int, shared: str) -> tuple["Figure", list["Axes"]]:
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
