"""Pictures of adversarial inputs and of a training run, drawn without pyplot and its global state."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_robustness.evaluation.figures import COLORS, MARKERS, new_figure
from lightning_robustness.measurement.attack_meter import Examples
from lightning_robustness.utilities.input_space import InputSpace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of images with one channel; others have colours of their own
_GREY: dict[str, Any] = {"cmap": "gray", "vmin": 0.0, "vmax": 1.0}
_SIGNED: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -0.5, "vmax": 0.5}
# Between samples, as a part of their width
_GAP = 0.08
_MOST_SAMPLES = 8
_MOST_LINES = 8


def as_images(x: Tensor, input_space: InputSpace) -> Tensor | None:
    """Map inputs to images with values in [0, 1], by their range or, where it has no bound, by what there is.

    Args:
        x: Inputs as the model sees them.
        input_space: Range and normalisation of the inputs.

    Returns:
        Tensor of shape ``(N, 1 or 3, H, W)``, or None if the inputs are no images.

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
    r"""Draw inputs, what an attack added to them, and the result, with labels before and after.

    Images are drawn as such, everything else as lines, one for each channel (dimension 1 of a batch). The perturbation
    of images is amplified so that the largest one spans the range of colours, by the factor that is written beside it.

    Args:
        examples: Inputs before and after an attack; the first eight are drawn.
        input_space: Range and normalisation of the inputs.
        title: What to write above.

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
    examples = Examples(*(part[:_MOST_SAMPLES] for part in examples))
    x, x_adv = (_as_matrices(_unnormalize(part, input_space)) for part in examples[:2])
    figure = new_figure(1.2 + 1.5 * len(x), 5.3)
    figure.suptitle(title)
    # One axis a row: one for each picture would take three times as long
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
    """Draw how accuracy, RDI, ROBY and Fisher information went, epoch by epoch.

    Attacks without a budget, such as that of Carlini and Wagner, which break nearly everything, are left out.

    Args:
        history: One mapping for each evaluation, with ``epoch``, ``step`` and the values that were computed. Where an
            epoch has several values of a kind, they are drawn against the step instead.
        prefix: Name of the monitor, for the title.

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
    panels = {
        "clean and adversarial accuracy\nhigher is more robust": {
            "acc": "clean",
            **{key: key.removeprefix("adv_acc/") for key in attacked},
        },
        "RDI and ROBY\nRDI: higher is more robust, ROBY: lower": {"rdi": "RDI", "roby": "ROBY"},
        "Fisher information\nlower is more robust": {"fim": "mean"},
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


def render(figure: "Figure") -> np.ndarray:
    """Draw a figure that this module made into an array of shape ``(H, W, 3)`` with values from 0 to 255."""
    canvas: Any = figure.canvas
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _unnormalize(x: Tensor, input_space: InputSpace) -> Tensor:
    return input_space.unnormalize(x.detach().cpu().float())


def _as_matrices(x: Tensor) -> Tensor:
    """Give inputs that are matrices without a channel, such as spectrograms, the channel of an image."""
    return x.unsqueeze(1) if x.ndim == 3 and x.shape[1] > _MOST_LINES else x


def _describe_labels(y: int, before: int, after: int) -> str:
    start = f"label {y}" if before == y else f"label {y}, predicted {before}"
    return f"{start}\n-> predicted {after}"


def _draw_images(axes: np.ndarray, x: Tensor, x_adv: Tensor) -> None:
    delta = x_adv - x
    largest = delta.abs().max().item() or 0.5
    factor = max(1, int(0.5 / largest + 1e-3))  # 0.1 in single precision still gives 5
    # One channel has a colour for each sign; three have grey for nothing
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
    """Whether an attack goes beyond the budget that the worst case is about, and says little by its success."""
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
