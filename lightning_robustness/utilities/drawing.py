"""Colours, markers and empty figures for everything that is drawn, without pyplot and its global state."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The palette of Okabe and Ito, which colour-blind readers can tell apart, without yellow: it is too light for lines
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "os^DvPX"


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
