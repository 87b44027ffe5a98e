import html
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightning_robustness._measurement.keys import KEYS, find_key


class NumberText(str):
    """A number that is already written, such as ``3.1/255``; a table aligns it as a number."""

    __slots__ = ()


Cell = str | float | int | None
# Rows from which a table of a page is folded
_MANY_ROWS = 24


class Table(NamedTuple):
    """A table with a title, for text and HTML."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    folded: bool = False

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
        return "\n".join([self.title, *lines, *([self.note] if self.note else [])])

    def to_html(self) -> str:
        """Return an HTML table with all text escaped, folded if it is long."""
        kinds = ["word" if self._holds_words(column) else "number" for column in range(len(self.header))]
        head = _row("th", self.header, kinds)
        body = "".join(f"{_row('td', [cell_text(cell) for cell in row], kinds)}\n" for row in self.rows)
        table = f"<table><thead>{head}</thead>\n<tbody>{body}</tbody></table>"
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        title = html.escape(self.title)
        if self.folded or len(self.rows) > _MANY_ROWS:
            return f"<details><summary>{title}</summary>{table}{note}</details>"
        return f"<figure><figcaption>{title}</figcaption>{table}{note}</figure>"

    def _holds_words(self, column: int) -> bool:
        cells = [row[column] for row in self.rows]
        return not cells or any(isinstance(cell, str) and not isinstance(cell, NumberText) for cell in cells)


def _row(tag: str, texts: Iterable[str], kinds: Iterable[str]) -> str:
    cells = (f'<{tag} class="{kind}">{html.escape(text)}</{tag}>' for text, kind in zip(texts, kinds, strict=True))
    return f"<tr>{''.join(cells)}</tr>"


def cell_text(cell: Cell) -> str:
    """Return the text of a cell: integers unchanged, other numbers with four digits, None and NaN as a dash."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return "-"
    if isinstance(cell, float):
        return f"{cell:.4f}" if 1e-2 <= abs(cell) < 1e4 or cell == 0 else f"{cell:.4g}"
    return str(cell)


def glossary(names: Iterable[str]) -> Table:
    """Explain values, one line for each, and one for all members of a family."""
    explained = {key.glossary for key in map(find_key, names) if key is not None}
    known = [key for key in KEYS if key.glossary in explained and key.role != "bookkeeping"]
    rows = [[key.name, key.glossary, key.unit, key.direction] for key in known]
    return Table("Terms", ["key", "meaning", "unit", "more robust"], rows, folded=True)
