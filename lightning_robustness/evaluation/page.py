"""Reports as self-contained HTML pages, with style and figures inside."""

import base64
import html
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lightning_robustness.evaluation.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --faint: #5c6670; --back: #ffffff; --line: #d5dae0;
        --stripe: #f4f6f8; --accent: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e9ed; --faint: #a2abb5; --back: #16191d; --line: #3a424b; --stripe: #1f242a; --accent: #56b4e9; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 72rem; background: var(--back); color: var(--text);
       font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { margin: 0 0 .5rem; padding-bottom: .5rem; font-size: 1.7rem; border-bottom: 3px solid var(--accent); }
h2 { margin: 2.5rem 0 .75rem; font-size: 1.2rem; }
figure { margin: 0 0 2rem; }
figcaption { margin-bottom: .4rem; font-weight: 600; }
figure.picture { padding: .75rem; background: #ffffff; border: 1px solid var(--line); border-radius: 6px;
                 color: #1b1f24; }
figure.picture img { display: block; margin: 0 auto; max-width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { color: var(--faint); font-weight: 600; white-space: nowrap; }
th.number, td.number { text-align: right; white-space: nowrap; }
tbody tr:nth-child(even) { background: var(--stripe); }
ul.notes { padding: .75rem 1rem .75rem 2.2rem; background: var(--stripe); border-left: 4px solid var(--accent); }
"""


def render_page(title: str, tables: Sequence[Table], figures: Mapping[str, "Figure"], notes: Sequence[str] = ()) -> str:
    """Write a page with notes, figures by caption, and tables; the first, a summary, comes before the figures.

    Example:
        >>> from lightning_robustness.evaluation.page import render_page
        >>> page = render_page("Robustness", [], {}, notes=["1 < 2"])
        >>> "<li>1 &lt; 2</li>" in page
        True

    """
    escaped = html.escape(title)
    listed = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    body = [f"<h1>{escaped}</h1>", f'<ul class="notes">{listed}</ul>' if notes else ""]
    body += ["<h2>Summary</h2>", tables[0].to_html()] if tables else []
    body += ["<h2>Figures</h2>", *(_picture(*item) for item in figures.items())] if figures else []
    body += ["<h2>Details</h2>", *(table.to_html() for table in tables[1:])] if len(tables) > 1 else []
    content = "\n".join(part for part in body if part)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escaped}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{content}\n</body>\n</html>\n"
    )


def _picture(caption: str, figure: "Figure") -> str:
    import matplotlib

    file = io.BytesIO()
    # No date and no random ids, so that the same figure gives the same page
    with matplotlib.rc_context({"svg.hashsalt": "lightning-robustness"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    # As a separate image: the ids of several inline drawings would clash
    source = base64.b64encode(file.getvalue()).decode()
    text = html.escape(caption)
    return (
        f'<figure class="picture"><figcaption>{text}</figcaption>'
        f'<img alt="{text}" src="data:image/svg+xml;base64,{source}"></figure>'
    )
