import html
import math
from collections.abc import Sequence
from typing import NamedTuple

Cell = str | float | int | None


class Table(NamedTuple):
    """A table with a title, for text and HTML.

    Args:
        title: Title.
        header: Names of the columns.
        rows: Cells; numbers are written with four digits, None and NaN as a dash.

    Example:
        >>> from lightning_robustness.evaluation.table import Table
        >>> print(Table("Ranks", ["model", "RDI"], [["natural", 0.5], ["robust", None]]).to_text())
        Ranks
        model       RDI
        natural  0.5000
        robust        -

    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def to_text(self) -> str:
        """Return aligned columns: words to the left, numbers to the right."""
        cells = [list(self.header), *([cell_text(cell) for cell in row] for row in self.rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(self.header))]
        are_words = [self._holds_words(column) for column in range(len(self.header))]
        lines = [
            "  ".join(
                cell.ljust(width) if words else cell.rjust(width)
                for cell, width, words in zip(row, widths, are_words, strict=True)
            ).rstrip()
            for row in cells
        ]
        return "\n".join([self.title, *lines])

    def to_html(self) -> str:
        """Return an HTML table with all text escaped."""
        kinds = ["word" if self._holds_words(column) else "number" for column in range(len(self.header))]
        head = "".join(f'<th class="{k}">{html.escape(name)}</th>' for name, k in zip(self.header, kinds, strict=True))
        body = "".join(
            "<tr>"
            + "".join(f'<td class="{k}">{html.escape(cell_text(c))}</td>' for c, k in zip(row, kinds, strict=True))
            + "</tr>\n"
            for row in self.rows
        )
        return (
            f"<figure><figcaption>{html.escape(self.title)}</figcaption>"
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div></figure>'
        )

    def _holds_words(self, column: int) -> bool:
        return any(isinstance(row[column], str) for row in self.rows) or not self.rows


def cell_text(cell: Cell) -> str:
    """Return the text of a cell: integers unchanged, other numbers with four digits, None and NaN as a dash."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return "-"
    if isinstance(cell, float):
        return f"{cell:.4f}" if 1e-2 <= abs(cell) < 1e4 or cell == 0 else f"{cell:.4g}"
    return str(cell)
