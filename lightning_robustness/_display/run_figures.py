"""Figures of a training run, drawn by hand for speed: they appear on a board while it trains."""

import math
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_robustness._display.drawing import COLORS, marked, plain_figure, set_title
from lightning_robustness._display.pictures import Triples, as_images, mosaic
from lightning_robustness._measurement.keys import Key, get_key
from lightning_robustness._measurement.meters.attack import Examples
from lightning_robustness._measurement.statistics import (
    Evaluation,
    accuracy_interval,
    attack_of,
    reference_of,
)
from lightning_robustness._measurement.verdict import Kept, interval_of, kept_epoch
from lightning_robustness._numbers import write_share
from lightning_robustness.input_space import InputSpace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_MARKERS = 40
_WORST = "adv_acc/worst"
_ATTACK_FREE = ("rdi", "roby", "fim")
_ARROWS = {"higher": "↑", "lower": "↓"}
_WIDTH = 3.6  # inches
_GAP = 0.08  # between signals, relative to their width
_NUM_EXAMPLES = 4
_MAX_LINES = 8
_MAX_NAME = 12
_FONT = 9  # points, for a picture that boards show 350 pixels wide
_LINE = 50  # letters
_COLUMNS = 4  # of the legend
_BOTTOM, _ROW = 0.12, 0.046  # of the axes; of a line of text, relative to the height


def history_figure(
    history: Sequence[Evaluation], prefix: str, figure: "Figure | None" = None, kept: Kept | None = None
) -> "Figure":
    """Draw a training run: accuracy, clean and under attack, and next to it RDI, ROBY and the Fisher information.

    C&W can be below the worst case: its success counts within an l2 budget, the worst case within the other attacks'.
    """
    figure, position, kept = figure or _empty_history_figure(), _position(history), kept or kept_epoch(history)
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
            axis.axvline((kept.checkpoint or kept.entry)[position], color="0.4", linestyle=":", linewidth=1, zorder=0)
    for axis in (accuracy, others[-1]):
        axis.set_xlabel(position, fontsize=_FONT, labelpad=1)
    lines = f"{prefix}: {_title(kept, position)}".replace("; ", ";\n").splitlines()
    title = "\n".join(fill(line, _LINE) for line in lines)
    set_title(figure, title)
    _place(figure.axes, title.count("\n") + 1 + math.ceil(len(accuracy.lines) / _COLUMNS))
    return figure


def _place(axes: "Sequence[Axes]", num_rows: int) -> None:
    """Give the axes the height that the title and the legend, of this many rows of text, leave."""
    accuracy, *others = axes
    height = 0.95 - _ROW * num_rows - _BOTTOM
    accuracy.set_position((0.11, _BOTTOM, 0.47, height))
    pitch = height / len(others)
    for number, axis in enumerate(reversed(others)):
        axis.set_position((0.74, _BOTTOM + pitch * number, 0.24, pitch - 2 * _ROW))


def _empty_history_figure() -> "Figure":
    """Make the axes, which get their places once title and legend are known."""
    figure = plain_figure(_WIDTH, 3.3)
    accuracy = figure.add_axes((0.11, _BOTTOM, 0.47, 0.6), ylim=(0.0, 1.02), yticks=[0, 0.25, 0.5, 0.75, 1])
    accuracy.grid(axis="y", alpha=0.3)
    for number in range(len(_ATTACK_FREE)):
        axis = figure.add_axes((0.74, 0.58 - 0.23 * number, 0.24, 0.14))
        axis.locator_params(axis="y", nbins=3)
        if number < len(_ATTACK_FREE) - 1:
            axis.set_xticks([])
    for axis in (accuracy, figure.axes[-1]):
        axis.locator_params(axis="x", integer=True, min_n_ticks=1, nbins=5)
    for axis in figure.axes:
        axis.tick_params(labelsize=_FONT, length=2, pad=2)
    return figure


def _position(history: Sequence[Evaluation]) -> str:
    points = [(key, entry["epoch"]) for entry in history for key in entry if key not in ("epoch", "step")]
    return "epoch" if len(set(points)) == len(points) else "step"


def _title(kept: Kept | None, position: str) -> str:
    if kept is None:
        return "no attack ran"
    accuracy = f"{write_share(kept.accuracy)} under {attack_of(kept.reference)}"
    return f"{kept.status(position)}, {accuracy}"


def _points(history: Sequence[Evaluation], key: str, position: str) -> list[tuple[float, float]]:
    return [(entry[position], entry[key]) for entry in history if math.isfinite(entry.get(key, math.nan))]


def _draw_accuracy(axis: "Axes", history: Sequence[Evaluation], position: str) -> None:
    keys = dict.fromkeys(key for entry in history for key in entry if key.startswith("adv_acc/"))
    attacked = [key for key in keys if key != _WORST]
    labels = {"acc": "clean", "boundary_acc": "first order", **{key: key.removeprefix("adv_acc/") for key in attacked}}
    labels |= {_WORST: "worst"} if _WORST in keys else {}
    for number, (key, label) in enumerate(labels.items()):
        look = marked(number) | {"linestyle": ":" if key == "boundary_acc" else "-"}
        look |= {"color": "black", "linestyle": "--"} if key == _WORST else {}
        _draw_curve(axis, _points(history, key, position), label, **look)
        if key in ("acc", reference_of(history), _WORST):
            _draw_band(axis, history, key, position, look["color"])
    if axis.lines:
        places: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.26, 0.99), "ncols": _COLUMNS}
        axis.legend(fontsize=_FONT, frameon=False, handlelength=1.4, columnspacing=1.0, labelspacing=0.2, **places)
    else:
        _draw_nothing(axis)


def _draw_curve(axis: "Axes", points: Sequence[tuple[float, float]], label: str, **look: Any) -> None:
    if points:
        axis.plot(*zip(*points, strict=True), markersize=3 if len(points) <= _MAX_MARKERS else 0, label=label, **look)


def _draw_nothing(axis: "Axes") -> None:
    axis.text(0.5, 0.5, "not measured", fontsize=_FONT, ha="center", va="center", transform=axis.transAxes)


def _draw_band(axis: "Axes", history: Sequence[Evaluation], key: str, position: str, color: str) -> None:
    """Draw the confidence interval of an accuracy."""
    number = "samples" if key == "acc" else "samples_attacks"
    entries = [entry for entry in history if not math.isnan(entry.get(key, math.nan) + entry.get(number, math.nan))]
    if entries:
        ends = [
            accuracy_interval(entry[key], entry[number]) if key == "acc" else interval_of(entry, key)
            for entry in entries
        ]
        places = [entry[position] for entry in entries]
        lows, highs = zip(*ends, strict=True)
        axis.fill_between(places, lows, highs, color=color, alpha=0.15, linewidth=0)


def _draw_attack_free(axis: "Axes", key: Key, points: Sequence[tuple[float, float]]) -> None:
    """Draw one value, over a logarithmic axis if it spans two orders of magnitude."""
    _draw_curve(axis, points, key.label, color=COLORS[2], marker="o")
    values = [value for _, value in points]
    if values and 0 < 100 * min(values) < max(values):
        axis.set_yscale("log")
    # Much faster than a title, for which matplotlib looks for space
    title = f"{key.label} {_ARROWS[key.direction]}"
    axis.text(1, 1.08, title, fontsize=_FONT, ha="right", transform=axis.transAxes)
    if not values:
        _draw_nothing(axis)


def perturbation_figure(
    examples: Examples, input_space: InputSpace, title: str, class_names: Sequence[str] | None = None
) -> "Figure":
    """Draw the first four clean inputs, perturbations and adversarial inputs, with true and predicted classes.

    Perturbations of images are amplified to span the colour range, by the factor that is written next to them.
    """
    examples = Examples(*(part[:_NUM_EXAMPLES] for part in examples))
    x, x_adv = (_as_matrices(input_space.unnormalize(part.detach().cpu().float())) for part in examples[:2])
    images = as_images(torch.cat([x, x_adv]), InputSpace(input_space.low, input_space.high))
    if images is None:
        figure, columns = _line_figure(x, x_adv)
    else:
        figure, columns = _image_figure(*images.chunk(2))
    set_title(figure, title)
    names = [[_name(label, class_names) for label in part.tolist()] for part in examples[2:]]
    labels = [_describe_classes(*row) for row in zip(*names, strict=True)]
    figure.axes[0].set_xticks(columns, labels)
    figure.axes[0].tick_params(length=0, labelsize=9, top=True, labeltop=True, bottom=False, labelbottom=False)
    return figure


def class_figure(rates: Mapping[int, Sequence[float]], class_names: Sequence[str], attack: str) -> "Figure":
    """Draw the robust accuracy of each class as a map of epochs by classes; grey where a class has no sample."""
    figure, epochs = plain_figure(3.6, 2.8), sorted(rates)
    axis, scale = figure.add_axes((0.25, 0.16, 0.6, 0.74)), figure.add_axes((0.875, 0.16, 0.03, 0.74))
    shares = torch.tensor([rates[epoch] for epoch in epochs]).T.numpy()
    image = axis.imshow(shares, aspect="auto", vmin=0, vmax=1, interpolation="nearest")
    axis.set_facecolor("0.8")
    columns = range(0, len(epochs), -(-len(epochs) // 8))
    axis.set_xticks(list(columns), [str(epochs[column]) for column in columns])
    rows = range(0, len(class_names), -(-len(class_names) // 20))
    axis.set_yticks(list(rows), [_shorten(class_names[row]) for row in rows])
    axis.tick_params(labelsize=8, length=2)
    axis.set_xlabel("epoch", fontsize=8)
    figure.colorbar(image, cax=scale, ticks=[0, 0.5, 1]).ax.tick_params(labelsize=8)
    set_title(figure, f"robust accuracy of each class, {attack}")
    return figure


def _as_matrices(x: Tensor) -> Tensor:
    """Add a channel to matrices without one, such as spectrograms, so that they are drawn as images."""
    return x.unsqueeze(1) if x.ndim == 3 and x.shape[1] > _MAX_LINES else x


def _name(label: int, class_names: Sequence[str] | None) -> str:
    return str(label) if class_names is None else _shorten(class_names[label])


def _shorten(name: str) -> str:
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 1]}…"


def _describe_classes(y: str, before: str, after: str) -> str:
    return f"{y}\n→ {after}" if before == y else f"{y}\n{before} → {after}"


def _image_figure(x: Tensor, x_adv: Tensor) -> tuple["Figure", list[float]]:
    """Draw all images as one, since an axis for each takes many times as long; return the middle of each column."""
    triples = Triples.of(x, x_adv)
    drawn, gap = mosaic(triples[:3])
    left, bottom, top = 0.22, 0.02, 0.56  # inches around the images
    scale = (_WIDTH - left - bottom) / drawn.shape[1]
    total = top + bottom + scale * drawn.shape[0]
    figure = plain_figure(_WIDTH, total)
    axis = figure.add_axes((left / _WIDTH, bottom / total, 1 - (left + bottom) / _WIDTH, 1 - (top + bottom) / total))
    axis.imshow(drawn.numpy(), aspect="auto")
    height, width = x.shape[2:]
    middles = [row * (height + gap) + (height - 1) / 2 for row in range(3)]
    names = ["clean", f"change \u00d7{triples.factor}", "adversarial"]
    axis.set_yticks(middles, names, rotation=90, va="center", fontsize=8)
    axis.tick_params(length=0)
    axis.set_frame_on(False)
    return figure, [column * (width + gap) + (width - 1) / 2 for column in range(len(x))]


def _line_figure(x: Tensor, x_adv: Tensor) -> tuple["Figure", list[float]]:
    """Draw signals as lines; return the middle of each column."""
    figure = plain_figure(_WIDTH, 3.6)
    rows = {"clean": x, "change": x_adv - x, "adversarial": x_adv}
    for row, (color, (label, values)) in enumerate(zip((COLORS[0], "black", COLORS[1]), rows.items(), strict=True)):
        axis = figure.add_axes((0.16, 0.59 - 0.28 * row, 0.82, 0.24))
        lines = values.flatten(2) if values.ndim > 2 else values.unsqueeze(1)
        marker = "." if lines.shape[2] <= 32 else None
        for column, signal in enumerate(lines):
            positions = np.linspace(column, column + 1 - _GAP, lines.shape[2])
            axis.plot(positions, signal.T.numpy(), color=color, marker=marker, linewidth=0.8)
        axis.set(xlim=(-_GAP, len(x)), xticks=[])
        axis.set_ylabel(label, fontsize=8)
        axis.tick_params(labelsize=7)
    return figure, [column + (1 - _GAP) / 2 for column in range(len(x))]
