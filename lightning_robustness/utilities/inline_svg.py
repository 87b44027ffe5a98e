import io
import re
from typing import TYPE_CHECKING

from lightning_robustness.utilities.drawing import COLORS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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

    Args:
        figure: The figure.
        label: Text for readers who cannot see it, already escaped.
        prefix: Start of all ids, which have to be unique on the page.

    Example:
        >>> from lightning_robustness.utilities.drawing import new_figure
        >>> from lightning_robustness.utilities.inline_svg import inline_svg
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
