"""Figure of a training run, drawn without pyplot and its global state."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_robustness.measurement.intervals import accuracy_interval
from lightning_robustness.measurement.keys import Key, get_key
from lightning_robustness.measurement.trust import Evaluation, candidates, comparable, pick, reference_of
from lightning_robustness.utilities.drawing import COLORS, MARKERS, plain_figure, set_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_MARKERS = 40
_WORST = "adv_acc/worst"
_ATTACK_FREE = ("rdi", "roby", "fim")
_ARROWS = {"higher": "↑", "lower": "↓"}


def history_figure(history: Sequence[Evaluation], prefix: str, figure: "Figure | None" = None) -> "Figure":
    """Draw a training run: accuracy, clean and under attack, and beside it RDI, ROBY and the Fisher information.

    Bands are 95 % confidence intervals. A dotted line marks the epoch that would be kept: the most robust one of those
    whose clean accuracy is within two points of the best. Triangles mark the evaluations in which all attacks ran, if
    only some of them ran in others. Arrows point to what is more robust. C&W can be below the worst case: its success
    counts within an l2 budget, the worst case within that of the other attacks.

    Args:
        history: One mapping per evaluation, with ``epoch``, ``step`` and the measured values. If an epoch has several
            values of one kind, all are drawn against the step instead.
        prefix: Prefix of the monitor, for the title.
        figure: A figure that this function returned earlier, to redraw in half the time.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed; the extra ``plot`` brings it.

    Example:
        >>> from lightning_robustness.callbacks.history_figure import history_figure
        >>> history = [{"epoch": 0, "step": 9, "acc": 0.5, "rdi": 0.1}, {"epoch": 1, "step": 19, "acc": 0.75}]
        >>> figure = history_figure(history, "robustness")
        >>> [line.get_ydata().tolist() for line in figure.axes[0].lines]
        [[0.5, 0.75]]

    """
    figure, position, kept = figure or _empty_history_figure(), _position(history), _kept(history)
    before = [[*axis.texts, *axis.collections, *axis.lines] for axis in figure.axes]
    for artist in (*figure.texts, *(artist for artists in before for artist in artists)):
        artist.remove()
    accuracy, *others = figure.axes
    _draw_accuracy(accuracy, history, position)
    for axis, name in zip(others, _ATTACK_FREE, strict=True):
        _draw_attack_free(axis, get_key(name), _points(history, name, position))
    for axis in figure.axes:
        axis.relim()
        if kept is not None:
            axis.axvline(kept[position], color="0.4", linestyle=":", linewidth=1, zorder=0)
    for axis in (accuracy, others[-1]):
        axis.set_xlabel(position, fontsize=8, labelpad=1)
    title = f"{prefix}: no attack so far" if kept is None else f"{prefix}: {_describe_kept(kept, history, position)}"
    set_title(figure, title)
    return figure


def _empty_history_figure() -> "Figure":
    figure = plain_figure(4.2, 3.0)
    accuracy = figure.add_axes((0.1, 0.12, 0.5, 0.64), ylim=(0.0, 1.02), yticks=[0, 0.25, 0.5, 0.75, 1])
    accuracy.grid(axis="y", alpha=0.3)
    for number in range(len(_ATTACK_FREE)):
        axis = figure.add_axes((0.74, 0.605 - 0.2425 * number, 0.24, 0.155))
        axis.locator_params(axis="y", nbins=3)
        if number < len(_ATTACK_FREE) - 1:
            axis.set_xticks([])
    for axis in (accuracy, figure.axes[-1]):
        axis.locator_params(axis="x", integer=True, min_n_ticks=1, nbins=5)
    for axis in figure.axes:
        axis.tick_params(labelsize=8, length=2, pad=2)
    return figure


def _position(history: Sequence[Evaluation]) -> str:
    points = [(key, entry["epoch"]) for entry in history for key in entry if key not in ("epoch", "step")]
    return "epoch" if len(set(points)) == len(points) else "step"


def _kept(history: Sequence[Evaluation]) -> Evaluation | None:
    """Return the evaluation that a guarded checkpoint would keep; None if no attack ran."""
    reference = reference_of(history)
    attacked = candidates(comparable(history, reference, reference))
    return pick(attacked, reference) if attacked else None


def _describe_kept(kept: Evaluation, history: Sequence[Evaluation], position: str) -> str:
    reference = reference_of(history)
    name = reference.removeprefix("adv_acc/")
    attack = "all attacks" if name == "worst" else name
    return f"{position} {kept[position]:g} would be kept, {100 * kept[reference]:.1f} % under {attack}"


def _points(history: Sequence[Evaluation], key: str, position: str) -> list[tuple[float, float]]:
    return [(entry[position], entry[key]) for entry in history if math.isfinite(entry.get(key, math.nan))]


def _draw_accuracy(axis: "Axes", history: Sequence[Evaluation], position: str) -> None:
    keys = dict.fromkeys(key for entry in history for key in entry if key.startswith("adv_acc/"))
    attacked = [key for key in keys if key != _WORST]
    labels = {"acc": "clean", "boundary_acc": "first order", **{key: key.removeprefix("adv_acc/") for key in attacked}}
    labels |= {_WORST: "worst"} if _WORST in keys else {}
    for number, (key, label) in enumerate(labels.items()):
        color, style = ("black", "--") if key == _WORST else (COLORS[number % len(COLORS)], "-")
        style = ":" if key == "boundary_acc" else style
        _draw_curve(axis, _points(history, key, position), label, color, style, MARKERS[number % len(MARKERS)])
        if key in ("acc", reference_of(history), _WORST):
            _draw_band(axis, history, key, position, color)
    worst = [entry[position] for entry in history if _WORST in entry]
    if 0 < len(worst) < len([entry for entry in history if any(key in entry for key in attacked)]):
        axis.plot(worst, [0.0] * len(worst), "k^", markersize=4, clip_on=False, label="all attacks")
    if axis.lines:
        places: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.2, 0.99), "ncols": 4}
        axis.legend(fontsize=8, frameon=False, handlelength=1.6, columnspacing=1.2, labelspacing=0.2, **places)
    else:
        axis.text(0.5, 0.5, "not measured", fontsize=8, ha="center", va="center", transform=axis.transAxes)


def _draw_curve(
    axis: "Axes",
    points: Sequence[tuple[float, float]],
    label: str,
    color: str,
    style: str = "-",
    marker: str = "o",
) -> None:
    if points:
        size = 3 if len(points) <= _MAX_MARKERS else 0
        axis.plot(*zip(*points, strict=True), style, color=color, marker=marker, markersize=size, label=label)


def _draw_band(axis: "Axes", history: Sequence[Evaluation], key: str, position: str, color: str) -> None:
    """Draw the confidence interval of an accuracy."""
    number = "samples" if key == "acc" else "samples_attacks"
    entries = [entry for entry in history if not math.isnan(entry.get(key, math.nan) + entry.get(number, math.nan))]
    if entries:
        ends = [accuracy_interval(entry[key], entry[number]) for entry in entries]
        places = [entry[position] for entry in entries]
        lows, highs = zip(*ends, strict=True)
        axis.fill_between(places, lows, highs, color=color, alpha=0.15, linewidth=0)


def _draw_attack_free(axis: "Axes", key: Key, points: Sequence[tuple[float, float]]) -> None:
    """Draw one value, over a logarithmic axis if it spans two orders of magnitude."""
    _draw_curve(axis, points, key.label, color=COLORS[2])
    values = [value for _, value in points]
    if values and 0 < 100 * min(values) < max(values):
        axis.set_yscale("log")
    # Much faster than a title, for which matplotlib looks for space
    title = f"{key.label} {_ARROWS[key.direction]}"
    axis.text(1, 1.08, title, fontsize=8, ha="right", transform=axis.transAxes)
    if not values:
        axis.text(0.5, 0.5, "not measured", fontsize=8, ha="center", va="center", transform=axis.transAxes)
