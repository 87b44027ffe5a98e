"""Reports as self-contained HTML pages, with style and figures inside."""

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from lightning_robustness._display.drawing import COLORS, inline_svg
from lightning_robustness._display.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The colours of series, lighter for dark pages
_LIGHTER = ("#4da6e0", "#ff8a3d", "#2fc79a", "#e39bc4", "#f0b93a", "#8accf2")
_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --faint: #5c6670; --back: #ffffff; --line: #d5dae0;
        --stripe: #f4f6f8; --accent: #0072b2; %s }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e9ed; --faint: #a2abb5; --back: #16191d; --line: #3a424b; --stripe: #1f242a; --accent: #56b4e9;
          %s }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 72rem; background: var(--back); color: var(--text);
       font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
       overflow-wrap: anywhere; }
h1 { margin: 0 0 .75rem; padding-bottom: .5rem; font-size: 1.5rem; border-bottom: 3px solid var(--accent); }
h2 { margin: 2.5rem 0 .75rem; font-size: 1.2rem; }
.verdict { margin: 0 0 1rem; font-size: 1.35rem; line-height: 1.35; font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; align-content: start; gap: .15rem 1rem;
     margin: 0 0 1.25rem; font-size: .92rem; }
dt { color: var(--faint); }
dd { margin: 0; }
figure { margin: 0 0 2rem; min-width: 0; }
figcaption, summary { margin-bottom: .4rem; font-weight: 600; }
summary { cursor: pointer; }
details { margin: 0 0 1rem; }
.top { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%%, 26rem), 1fr)); gap: 0 2rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%%, 28rem), 1fr)); gap: 0 2rem; }
.figures .spread { grid-column: 1 / -1; }
.drawing { display: block; max-width: 100%%; height: auto; }
.top .drawing { width: 34rem; }
.drawing text { fill: currentColor; font-family: inherit !important; }
.phone { display: none; }
.examples { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%%, 10.5rem), 1fr)); gap: 1rem; }
.examples figure { margin: 0; font-size: .85rem; }
.examples figcaption { font-weight: 400; }
.examples img { display: block; width: 100%%; image-rendering: pixelated; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { color: var(--faint); font-weight: 600; }
th.number, td.number { text-align: right; }
td.number { overflow-wrap: normal; }
tbody tr:nth-child(even) { background: var(--stripe); }
ul.notes { padding: .75rem 1rem .75rem 2.2rem; background: var(--stripe); border-left: 4px solid var(--accent); }
table + p { margin: .4rem 0 0; color: var(--faint); font-size: .92rem; }
footer { margin-top: 3rem; padding-top: 1rem; border-top: 1px solid var(--line); }
@media (max-width: 600px) {
  body { padding: 1.25rem 1rem 3rem; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: .4rem; }
  .desk { display: none; }
  .phone { display: block; }
  table.wide, table.wide tbody, table.wide tr { display: block; }
  table.wide thead { display: none; }
  table.wide tr { padding: .4rem 0; border-bottom: 1px solid var(--line); }
  table.wide td { display: inline-block; padding: 0 1rem 0 0; border: 0; text-align: left; overflow-wrap: anywhere; }
  table.wide td:first-child { display: block; font-weight: 600; text-align: left; }
  table.wide td:empty { display: none; }
  table.wide td::before { content: attr(data-name) " "; color: var(--faint); }
}
"""


class Picture(NamedTuple):
    """A small image of a page: its caption, and a PNG file in base64."""

    caption: str
    png: str


@dataclass(frozen=True, kw_only=True)
class Page:
    """A report, in the order in which a reader needs its parts."""

    title: str
    verdict: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    figures: Mapping[str, "Figure"] = field(default_factory=dict)
    phone_figures: Mapping[str, "Figure"] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    examples: Sequence[Picture] = ()
    glossary: Table | None = None
    provenance: Mapping[str, str] = field(default_factory=dict)

    def to_html(self) -> str:
        """Write the page, which needs no other file, with all text escaped.

        Example:
            >>> from lightning_robustness._display.page import Page
            >>> "<li>1 &lt; 2</li>" in Page(title="Robustness", notes=["1 < 2"]).to_html()
            True

        """
        title = html.escape(self.title)
        first, *others = [self._figure(number, caption) for number, caption in enumerate(self.figures)] or [""]
        body = [
            f"<h1>{title}</h1>",
            f'<p class="verdict">{_keep_together(html.escape(self.verdict))}</p>' if self.verdict else "",
            f'<div class="top">{_describe(self.facts)}{first}</div>',
            f'<ul class="notes">{"".join(f"<li>{html.escape(note)}</li>" for note in self.notes)}</ul>'
            if self.notes
            else "",
            _section("Results", *(table.to_html() for table in self.tables if not table.folded)),
            _section("Figures", f'<div class="figures">{"".join(others)}</div>') if others else "",
            self._show_examples(),
            _section("Details", *(table.to_html() for table in self.tables if table.folded)),
            _section("Glossary", self.glossary.to_html()) if self.glossary else "",
            f"<footer><h2>Provenance</h2>{_describe(self.provenance)}</footer>" if self.provenance else "",
        ]
        content = "\n".join(part for part in body if part)
        return (
            f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
            f"<style>{_STYLE % (_series(COLORS), _series(_LIGHTER))}</style>\n</head>\n"
            f"<body>\n{content}\n</body>\n</html>\n"
        )

    def _figure(self, number: int, caption: str) -> str:
        label, figure, phone = html.escape(caption), self.figures[caption], self.phone_figures.get(caption)
        drawing = inline_svg(figure, label, f"figure-{number}")
        if phone is not None:
            narrow = inline_svg(phone, label, f"phone-figure-{number}")
            drawing = f'<div class="desk">{drawing}</div><div class="phone">{narrow}</div>'
        spread = ' class="spread"' if phone is not None else ""
        return f"<figure{spread}><figcaption>{label}</figcaption>{drawing}</figure>"

    def _show_examples(self) -> str:
        if not self.examples:
            return ""
        shown = "".join(
            f'<figure><img alt="{html.escape(picture.caption)}" src="data:image/png;base64,{html.escape(picture.png)}">'
            f"<figcaption>{html.escape(picture.caption)}</figcaption></figure>"
            for picture in self.examples
        )
        legend = "<p>Clean image, perturbation (grey is zero), adversarial image.</p>"
        return _section("Adversarial examples", f'{legend}<div class="examples">{shown}</div>')


def _keep_together(text: str) -> str:
    """Break no line within an interval, or between a number and its unit."""
    text = text.replace(" %", "&nbsp;%").replace("n = ", "n&nbsp;=&nbsp;")
    return re.sub(r"(?<=\d)-(?=\d)", "&#8209;", text)  # a hyphen at which no line is broken


def _section(title: str, *parts: str) -> str:
    return "\n".join([f"<h2>{html.escape(title)}</h2>", *parts]) if parts else ""


def _describe(entries: Mapping[str, str]) -> str:
    rows = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in entries.items())
    return f"<dl>{rows}</dl>" if rows else ""


def _series(colors: Sequence[str]) -> str:
    return " ".join(f"--series-{number}: {color};" for number, color in enumerate(colors))
