import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The palette of Okabe and Ito, which colour-blind readers can tell apart, without yellow: it is too light for lines
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "os^DvPX"
# Figures of 3.6 inches then have a bit more dots than a card of TensorBoard, which is 350 wide
_DPI = 120


def marked(number: int, colors: Sequence[str] = COLORS) -> dict[str, Any]:
    """Return a color and a marker that tell the series of this number from others."""
    return {"color": colors[number % len(colors)], "marker": MARKERS[number % len(MARKERS)]}


def new_figure(width: float, height: float) -> "Figure":
    """Make an empty figure of a size in inches."""
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


_PIXELS_PER_INCH = 96
_RESOLUTION = 144  # of the parts that are drawn as pixels, such as clouds of points
# Colours that differ between light and dark pages, and the variables of the style sheet that stand for them
_VARIABLES = {
    "#000000": "currentColor",
    "#ffffff": "var(--back)",
    **{c.lower(): f"var(--series-{n})" for n, c in enumerate(COLORS)},
}


def inline_svg(figure: "Figure", label: str, prefix: str) -> str:
    """Draw a figure as an SVG element that takes font and colours from the page around it.

    Example:
        >>> from lightning_robustness._display.drawing import new_figure
        >>> from lightning_robustness._display.drawing import inline_svg
        >>> inline_svg(new_figure(4, 3), "curve", "first")[:94]
        '<svg class="drawing" role="img" aria-label="curve" width="384" height="288" viewBox="0 0 288 2'

    """
    import matplotlib

    file = io.StringIO()
    # No date and no random ids, so that the same figure gives the same page; text stays text
    with matplotlib.rc_context({"svg.hashsalt": "lightning-robustness", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None}, transparent=True, dpi=_RESOLUTION)
    drawing = re.sub(r"^.*?<svg[^>]*>|<metadata>.*?</metadata>|</svg>\s*$", "", file.getvalue(), flags=re.DOTALL)
    drawing = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", drawing)
    drawing = re.sub(r"(?<=: )#[0-9a-f]{6}\b", lambda match: _VARIABLES.get(match[0], match[0]), drawing)
    width, height = figure.get_size_inches().tolist()
    size = f'width="{_PIXELS_PER_INCH * width:.0f}" height="{_PIXELS_PER_INCH * height:.0f}"'
    box = f'viewBox="0 0 {72 * width:g} {72 * height:g}"'
    return f'<svg class="drawing" role="img" aria-label="{label}" {size} {box}>{drawing.strip()}</svg>'
