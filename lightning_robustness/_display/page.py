"""Reports as self-contained HTML pages, with style and figures inside."""

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING

from lightning_robustness._display.drawing import inline_svg
from lightning_robustness._display.pictures import AdversarialExample
from lightning_robustness._display.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Inches from which a figure takes a row of its own, and is scrolled on a narrow screen
_WIDE = 6.0


@dataclass(frozen=True, kw_only=True)
class Page:
    """A report, in the order in which a reader needs its parts."""

    title: str
    verdict: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    figures: Mapping[str, "Figure"] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    examples: Sequence[AdversarialExample] = ()
    glossary: Table | None = None
    provenance: Mapping[str, str] = field(default_factory=dict)

    def to_html(self) -> str:
        """Write the page, which needs no other file, with all text escaped."""
        title = html.escape(self.title)
        first, *others = [_figure(number, *item) for number, item in enumerate(self.figures.items())] or [""]
        style = files("lightning_robustness._display").joinpath("page.css").read_text(encoding="utf-8")
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
            f"<style>\n{style}</style>\n</head>\n"
            f"<body>\n{content}\n</body>\n</html>\n"
        )

    def _show_examples(self) -> str:
        if not self.examples:
            return ""
        captions = [html.escape(f"{example.attack}: {example.caption}") for example in self.examples]
        shown = "".join(
            f'<figure><img alt="{caption}" src="data:image/png;base64,{html.escape(example.png)}">'
            f"<figcaption>{caption}</figcaption></figure>"
            for caption, example in zip(captions, self.examples, strict=True)
        )
        legend = "<p>Clean image, perturbation (none is grey or, in one channel, white), adversarial image.</p>"
        return _section("Adversarial examples", f'{legend}<div class="examples">{shown}</div>')


def _figure(number: int, caption: str, figure: "Figure") -> str:
    label = html.escape(caption)
    spread = ' class="spread"' if figure.get_figwidth() > _WIDE else ""
    drawing = inline_svg(figure, label, f"figure-{number}")
    return f"<figure{spread}><figcaption>{label}</figcaption>{drawing}</figure>"


def _keep_together(text: str) -> str:
    """Break no line within an interval, or between a number and its unit."""
    text = text.replace(" %", "&nbsp;%").replace("n = ", "n&nbsp;=&nbsp;")
    return re.sub(r"(?<=\d)-(?=\d)", "&#8209;", text)  # a hyphen at which no line is broken


def _section(title: str, *parts: str) -> str:
    return "\n".join([f"<h2>{html.escape(title)}</h2>", *parts]) if parts else ""


def _describe(entries: Mapping[str, str]) -> str:
    rows = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in entries.items())
    return f"<dl>{rows}</dl>" if rows else ""
