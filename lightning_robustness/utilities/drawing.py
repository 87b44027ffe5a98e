"""Colours, markers, empty figures and rendering for everything that is drawn, without pyplot and its global state."""

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The palette of Okabe and Ito, which colour-blind readers can tell apart, without yellow: it is too light for lines
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "os^DvPX"
# Figures of 3.6 inches then have a bit more dots than a card of TensorBoard, which is 350 wide
_DPI = 120


def new_figure(width: float, height: float) -> "Figure":
    """Make an empty figure of a size in inches.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.

    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Expected matplotlib, which draws figures, but it is not installed: "
            'pip install "lightning-robustness[plot]"'
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain_figure(width: float, height: float) -> "Figure":
    """Make a figure whose axes are placed by hand, which takes half the time of a layout engine."""
    figure = new_figure(width, height)
    figure.set_layout_engine("none")
    figure.set_dpi(_DPI)
    return figure


def set_title(figure: "Figure", title: str) -> None:
    """Write a title above the axes of a plain figure."""
    figure.text(0.5, 0.995, title, fontsize=9, ha="center", va="top")


def render(figure: "Figure") -> np.ndarray:
    """Render a figure as an array of shape ``(H, W, 3)`` with values from 0 to 255."""
    canvas: Any = figure.canvas
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def amplification(delta: Tensor) -> int:
    """Return the whole number by which perturbations of pixels in [0, 1] are multiplied to be seen, without clipping.

    Example:
        >>> import torch
        >>> from lightning_robustness.utilities.drawing import amplification
        >>> amplification(torch.tensor([-8 / 255, 4 / 255])), amplification(torch.tensor([0.75]))
        (15, 1)

    """
    largest = delta.abs().max().item() or 0.5
    return max(1, int(0.5 / largest + 1e-3))  # 0.1 in float32 still gives 5
