"""Figures of adversarial inputs and of a training run, drawn without pyplot and its global state."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_robustness.measurement.attack_meter import Examples
from lightning_robustness.measurement.boundary_curve import BoundaryCurve
from lightning_robustness.measurement.keys import get_key
from lightning_robustness.utilities.drawing import COLORS, MARKERS, new_figure
from lightning_robustness.utilities.input_space import InputSpace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colour maps of images with one channel
_GREY: dict[str, Any] = {"cmap": "gray", "vmin": 0.0, "vmax": 1.0}
_SIGNED: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -0.5, "vmax": 0.5}
# Space between samples, relative to their width
_GAP = 0.08
_MAX_SAMPLES = 8
_MAX_LINES = 8


def as_images(x: Tensor, input_space: InputSpace) -> Tensor | None:
    """Map inputs to images with values in [0, 1], by the range of the input space or, if unbounded, of the batch.

    Returns:
        Tensor of shape ``(N, 1 or 3, H, W)``, or None if the inputs are not images.

    Example:
        >>> import torch
        >>> from lightning_robustness.callbacks.figures import as_images
        >>> from lightning_robustness.utilities.input_space import InputSpace
        >>> as_images(torch.tensor([-2.0, 2.0]).reshape(1, 1, 1, 2), InputSpace(mean=0.5, std=0.25))
        tensor([[[[0., 1.]]]])

    """
    if x.ndim != 4 or x.shape[1] not in (1, 3) or x.numel() == 0:
        return None
    x = _unnormalize(x, input_space)
    low = x.min().item() if input_space.low is None else input_space.low
    high = x.max().item() if input_space.high is None else input_space.high
    return ((x - low) / ((high - low) or 1.0)).clamp(0.0, 1.0)


def perturbation_figure(examples: Examples, input_space: InputSpace, title: str) -> "Figure":
    r"""Draw the first eight clean inputs, perturbations and adversarial inputs, with labels and predictions.

    Non-image inputs are drawn as lines, one per channel (dimension 1 of a batch). Perturbations of images are
    amplified so that the largest spans the colour range; the factor is written next to them.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed; the extra ``plot`` brings it.

    Example:
        >>> import torch
        >>> from lightning_robustness.callbacks.figures import perturbation_figure
        >>> from lightning_robustness.measurement.attack_meter import Examples
        >>> from lightning_robustness.utilities.input_space import InputSpace
        >>> x, y = torch.zeros(2, 1, 8, 8), torch.tensor([3, 5])
        >>> figure = perturbation_figure(Examples(x, x + 0.1, y, y, y + 1), InputSpace(), "pgd")
        >>> [label.get_text() for label in figure.axes[0].get_xticklabels()]
        ['label 3\n-> predicted 4', 'label 5\n-> predicted 6']

    """
    examples = Examples(*(part[:_MAX_SAMPLES] for part in examples))
    x, x_adv = (_as_matrices(_unnormalize(part, input_space)) for part in examples[:2])
    figure = new_figure(1.2 + 1.5 * len(x), 5.3)
    figure.suptitle(title)
    # One axis per row: one per image takes three times as long
    axes = figure.subplots(3)
    images = as_images(torch.cat([x, x_adv]), InputSpace(input_space.low, input_space.high))
    if images is not None:
        _draw_images(axes, *images.chunk(2))
    else:
        _draw_lines(axes, x, x_adv)
    for axis in axes:
        axis.set(xlim=(-_GAP, len(x)), xticks=[])
    labels = [_describe_labels(*row) for row in zip(*(part.tolist() for part in examples[2:]), strict=True)]
    axes[0].set_xticks([column + (1 - _GAP) / 2 for column in range(len(x))], labels)
    axes[0].tick_params(length=0, labelsize=9, top=True, labeltop=True, bottom=False, labelbottom=False)
    return figure


def history_figure(history: Sequence[Mapping[str, float]], prefix: str) -> "Figure":
    """Draw accuracy, RDI, ROBY and Fisher information over the epochs.

    Attacks without a perturbation budget, such as C&W, are left out: they break nearly every sample.

    Args:
        history: One mapping per evaluation, with ``epoch``, ``step`` and the measured values. If an epoch has several
            values of one kind, all are drawn against the step instead.
        prefix: Prefix of the monitor, for the title.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed; the extra ``plot`` brings it.

    Example:
        >>> from lightning_robustness.callbacks.figures import history_figure
        >>> history = [{"epoch": 0, "step": 9, "acc": 0.5, "rdi": 0.1}, {"epoch": 1, "step": 19, "acc": 0.75}]
        >>> figure = history_figure(history, "robustness")
        >>> [line.get_ydata().tolist() for line in figure.axes[0].lines]
        [[0.5, 0.75]]

    """
    position = _position(history)
    keys = dict.fromkeys(key for entry in history for key in entry if key.startswith("adv_acc/"))
    attacked = sorted((key for key in keys if not _is_below_worst(history, key)), key=_is_worst)
    rdi, roby, fim = (get_key(name) for name in ("rdi", "roby", "fim"))
    panels = {
        f"clean and adversarial accuracy\n{get_key('adv_acc/worst').direction} is more robust": {
            "acc": "clean",
            **{key: key.removeprefix("adv_acc/") for key in attacked},
        },
        f"{rdi.label} and {roby.label}\n{rdi.label}: {rdi.direction} is more robust, {roby.label}: {roby.direction}": {
            key.name: key.label for key in (rdi, roby)
        },
        f"{fim.label}\n{fim.direction} is more robust": {"fim": "mean"},
    }
    figure = new_figure(10.0, 4.2)
    figure.suptitle(f"{prefix}, {position} by {position}")
    accuracy, _, fisher = axes = figure.subplots(1, len(panels))
    for axis, (title, labels) in zip(axes, panels.items(), strict=True):
        _draw_curves(axis, history, labels, position)
        axis.set_title(title, fontsize=10)
    accuracy.set_ylim(-0.03, 1.03)
    values = [value for line in fisher.lines for value in line.get_ydata()]
    if values and 0 < 100 * min(values) < max(values):
        fisher.set_yscale("log")
    return figure


def boundary_figure(curves: Mapping[int, BoundaryCurve]) -> "Figure":
    """Draw robust accuracy to first order over budgets, a line for each epoch, from light to dark.

    Args:
        curves: Curves by epoch, at least one.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed; the extra ``plot`` brings it.

    Example:
        >>> import torch
        >>> from lightning_robustness.callbacks.figures import boundary_figure
        >>> from lightning_robustness.measurement.boundary_curve import BoundaryCurve
        >>> curve = BoundaryCurve.of(torch.tensor([-0.1, 0.1, 0.3, 0.9]), "linf", eps=0.2)
        >>> [line.get_label() for line in boundary_figure({0: curve, 5: curve, 9: curve}).axes[0].lines]
        ['epoch 0', '_epoch 5', 'epoch 9']

    """
    figure = new_figure(6.4, 4.2)
    axis = figure.subplots()
    epochs = sorted(curves)
    for number, epoch in enumerate(epochs):
        # Only the first and the last line have a name: a label that starts with an underscore is not in the legend
        name = f"epoch {epoch}" if epoch in (epochs[0], epochs[-1]) else f"_epoch {epoch}"
        darkness = (number + 1) / len(epochs)
        axis.plot(curves[epoch].eps, curves[epoch].share, color=COLORS[0], alpha=0.15 + 0.85 * darkness, label=name)
    axis.set(xlabel=f"perturbation budget (units of the input, {curves[epochs[-1]].norm})", ylim=(-0.03, 1.03))
    axis.set(ylabel=get_key("boundary_acc").axis_label)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=9, frameon=False)
    return figure


def render(figure: "Figure") -> np.ndarray:
    """Render a figure of this module as an array of shape ``(H, W, 3)`` with values from 0 to 255."""
    canvas: Any = figure.canvas
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _unnormalize(x: Tensor, input_space: InputSpace) -> Tensor:
    return input_space.unnormalize(x.detach().cpu().float())


def _as_matrices(x: Tensor) -> Tensor:
    """Add a channel to matrices without one, such as spectrograms, so that they are drawn as images."""
    return x.unsqueeze(1) if x.ndim == 3 and x.shape[1] > _MAX_LINES else x


def _describe_labels(y: int, before: int, after: int) -> str:
    start = f"label {y}" if before == y else f"label {y}, predicted {before}"
    return f"{start}\n-> predicted {after}"


def _draw_images(axes: np.ndarray, x: Tensor, x_adv: Tensor) -> None:
    delta = x_adv - x
    largest = delta.abs().max().item() or 0.5
    factor = max(1, int(0.5 / largest + 1e-3))  # 0.1 in float32 still gives 5
    # Zero is white with one channel, which has a colour for each sign, and grey with three
    amplified = factor * delta if x.shape[1] == 1 else (0.5 + factor * delta).clamp(0.0, 1.0)
    rows = {"clean": x, f"perturbation,\n{factor} times": amplified, "adversarial": x_adv}
    height = (1 - _GAP) * x.shape[2] / x.shape[3]
    for axis, colors, (label, images) in zip(axes, (_GREY, _SIGNED, _GREY), rows.items(), strict=True):
        for column, image in enumerate(images.permute(0, 2, 3, 1).numpy()):
            axis.imshow(image, extent=(column, column + 1 - _GAP, 0.0, height), **colors)
        axis.set(ylabel=label, ylim=(-_GAP, height + _GAP), yticks=[], facecolor="0.9")


def _draw_lines(axes: np.ndarray, x: Tensor, x_adv: Tensor) -> None:
    rows = {"clean": x, "perturbation": x_adv - x, "adversarial": x_adv}
    for axis, color, (label, values) in zip(axes, (COLORS[0], "black", COLORS[1]), rows.items(), strict=True):
        lines = values.flatten(2) if values.ndim > 2 else values.unsqueeze(1)
        marker = "." if lines.shape[2] <= 32 else None
        for column, signal in enumerate(lines):
            positions = np.linspace(column, column + 1 - _GAP, lines.shape[2])
            axis.plot(positions, signal.T.numpy(), color=color, marker=marker, linewidth=0.8)
        axis.set_ylabel(label)


def _position(history: Sequence[Mapping[str, float]]) -> str:
    points = [(key, entry["epoch"]) for entry in history for key in entry if key not in ("epoch", "step")]
    return "epoch" if len(set(points)) == len(points) else "step"


def _is_worst(key: str) -> bool:
    return key == "adv_acc/worst"


def _is_below_worst(history: Sequence[Mapping[str, float]], key: str) -> bool:
    """Return whether an attack exceeds the budget of the worst case, so that its success says little."""
    return any(entry[key] < entry["adv_acc/worst"] for entry in history if key in entry and "adv_acc/worst" in entry)


def _draw_curves(
    axis: "Axes", history: Sequence[Mapping[str, float]], labels: Mapping[str, str], position: str
) -> None:
    for index, (key, label) in enumerate(labels.items()):
        points = [(entry[position], entry[key]) for entry in history if math.isfinite(entry.get(key, math.nan))]
        if points:
            color, linestyle = ("black", "--") if _is_worst(key) else (COLORS[index % len(COLORS)], "-")
            marker = MARKERS[index % len(MARKERS)]
            axis.plot(*zip(*points, strict=True), linestyle, color=color, marker=marker, markersize=4, label=label)
    axis.set_xlabel(position)
    axis.locator_params(axis="x", integer=True, min_n_ticks=1)
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend(fontsize=9, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    else:
        axis.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axis.transAxes)
