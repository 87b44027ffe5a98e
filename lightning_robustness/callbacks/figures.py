"""Figures of adversarial inputs, budgets and classes, drawn without pyplot and its global state."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_robustness.measurement.attack_meter import Examples
from lightning_robustness.measurement.boundary_curve import REACH, BoundaryCurve
from lightning_robustness.measurement.keys import get_key
from lightning_robustness.measurement.threat_model import is_image
from lightning_robustness.utilities.drawing import COLORS, amplification, plain_figure, set_title
from lightning_robustness.utilities.input_space import InputSpace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# In inches
_WIDTH = 3.6
# Space between samples, relative to their size
_GAP = 0.08
_NUM_EXAMPLES = 4
_MAX_LINES = 8
_MAX_NAME = 12


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
    if not is_image(x) or x.numel() == 0:
        return None
    x = _unnormalize(x, input_space)
    low = x.min().item() if input_space.low is None else input_space.low
    high = x.max().item() if input_space.high is None else input_space.high
    return ((x - low) / ((high - low) or 1.0)).clamp(0.0, 1.0)


def perturbation_figure(
    examples: Examples, input_space: InputSpace, title: str, class_names: Sequence[str] | None = None
) -> "Figure":
    r"""Draw the first four clean inputs, perturbations and adversarial inputs, with true and predicted classes.

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
        ['3\n→ 4', '5\n→ 6']

    """
    examples = Examples(*(part[:_NUM_EXAMPLES] for part in examples))
    x, x_adv = (_as_matrices(_unnormalize(part, input_space)) for part in examples[:2])
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


def boundary_figure(curves: Mapping[int, BoundaryCurve]) -> "Figure":
    """Draw robust accuracy to first order over budgets, a line for each epoch, from light to dark.

    The last one has its 95 % confidence interval; a dotted line marks the budget of the attacks.

    Args:
        curves: Curves by epoch, at least one.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed; the extra ``plot`` brings it.

    Example:
        >>> import torch
        >>> from lightning_robustness.callbacks.figures import boundary_figure
        >>> from lightning_robustness.measurement.boundary_curve import BoundaryCurve
        >>> curve = BoundaryCurve.of(torch.tensor([-0.1, 0.1, 0.3, 0.9]), "linf", eps=0.2)
        >>> figure = boundary_figure({0: curve, 5: curve, 9: curve})
        >>> [line.get_label() for line in figure.axes[0].lines[:3]]
        ['epoch 0', '_epoch 5', 'epoch 9']

    """
    figure = plain_figure(3.6, 2.8)
    axis = figure.add_axes((0.12, 0.17, 0.85, 0.72))
    epochs = sorted(curves)
    last = curves[epochs[-1]]
    for number, epoch in enumerate(epochs):
        # Only the first and the last line have a name: a label that starts with an underscore is not in the legend
        name = f"epoch {epoch}" if epoch in (epochs[0], epochs[-1]) else f"_epoch {epoch}"
        darkness = (number + 1) / len(epochs)
        axis.plot(curves[epoch].eps, curves[epoch].share, color=COLORS[0], alpha=0.15 + 0.85 * darkness, label=name)
    axis.fill_between(last.eps, last.low, last.high, color=COLORS[0], alpha=0.15, linewidth=0)
    axis.axvline(last.eps[-1] / REACH, color="0.4", linestyle=":", linewidth=1, zorder=0)
    axis.text(last.eps[-1] / REACH, 1.0, " eps", fontsize=8, va="top")
    axis.set(ylim=(-0.03, 1.03), yticks=[0, 0.25, 0.5, 0.75, 1], xlim=(0, last.eps[-1]))
    axis.locator_params(axis="x", nbins=5)
    axis.set_xlabel(f"perturbation budget ({last.norm}, units of the input)", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(axis="y", alpha=0.3)
    axis.legend(fontsize=8, frameon=False, loc="upper right")
    set_title(figure, f"{get_key('boundary_acc').label}, over budgets")
    return figure


def class_figure(rates: Mapping[int, Tensor], class_names: Sequence[str], attack: str) -> "Figure":
    """Draw the robust accuracy of each class as a map of epochs by classes; grey where a class has no sample.

    Args:
        rates: Rates of all classes by epoch, at least one; NaN without samples.
        class_names: Names of the classes.
        attack: Name of the attack.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed; the extra ``plot`` brings it.

    Example:
        >>> import torch
        >>> from lightning_robustness.callbacks.figures import class_figure
        >>> figure = class_figure({0: torch.tensor([0.5, 1.0]), 5: torch.tensor([0.25, 0.75])}, ["cat", "dog"], "pgd")
        >>> figure.axes[0].images[0].get_array().tolist()
        [[0.5, 0.25], [1.0, 0.75]]

    """
    figure, epochs = plain_figure(3.6, 2.8), sorted(rates)
    axis, scale = figure.add_axes((0.25, 0.16, 0.6, 0.74)), figure.add_axes((0.875, 0.16, 0.03, 0.74))
    shares = torch.stack([rates[epoch] for epoch in epochs], dim=1).numpy()
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


def _unnormalize(x: Tensor, input_space: InputSpace) -> Tensor:
    return input_space.unnormalize(x.detach().cpu().float())


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
    delta = x_adv - x
    factor = amplification(delta)
    # Zero is white with one channel, which has a colour for each sign, and grey with three
    amplified = _signed_colors(factor * delta) if x.shape[1] == 1 else (0.5 + factor * delta).clamp(0.0, 1.0)
    rows = {"clean": x, f"change \u00d7{factor}": amplified, "adversarial": x_adv}
    height, width = x.shape[2:]
    gap = max(1, round(_GAP * max(height, width)))
    strips = [pad(part.expand(-1, 3, -1, -1), (0, gap, 0, gap), value=1.0) for part in rows.values()]
    mosaic = torch.cat([torch.cat(list(strip), dim=2) for strip in strips], dim=1).permute(1, 2, 0)
    mosaic = mosaic[:-gap, :-gap]
    left, bottom, top = 0.22, 0.02, 0.56  # inches around the images
    scale = (_WIDTH - left - bottom) / mosaic.shape[1]
    total = top + bottom + scale * mosaic.shape[0]
    figure = plain_figure(_WIDTH, total)
    axis = figure.add_axes((left / _WIDTH, bottom / total, 1 - (left + bottom) / _WIDTH, 1 - (top + bottom) / total))
    axis.imshow(mosaic.numpy(), aspect="auto")
    middles = [row * (height + gap) + (height - 1) / 2 for row in range(3)]
    axis.set_yticks(middles, list(rows), rotation=90, va="center", fontsize=8)
    axis.tick_params(length=0)
    axis.set_frame_on(False)
    return figure, [column * (width + gap) + (width - 1) / 2 for column in range(len(x))]


def _signed_colors(delta: Tensor) -> Tensor:
    """Colour values from -0.5, blue, to 0.5, red, as images with three channels."""
    from matplotlib import colormaps

    colors = colormaps["RdBu_r"](delta.squeeze(1).numpy() + 0.5)[..., :3]
    return torch.from_numpy(colors).permute(0, 3, 1, 2).float()


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
