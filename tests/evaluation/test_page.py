import base64
import re

from lightning_robustness.evaluation.page import render_page
from lightning_robustness.evaluation.table import Table
from lightning_robustness.utilities.drawing import new_figure


def figure():
    drawn = new_figure(2, 1)
    drawn.subplots().plot([0, 1], [1, 0])
    return drawn


def test_page_needs_nothing_else():
    page = render_page("A & B", [Table("First", ["a"], [[1]])], {"curve": figure(), "again": figure()}, ["note <1>"])
    assert page.startswith("<!DOCTYPE html>")
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert "@import" not in page
    assert "url(" not in page
    assert "<title>A &amp; B</title>" in page
    assert "<li>note &lt;1&gt;</li>" in page
    pictures = re.findall(r"data:image/svg\+xml;base64,([^\"]+)", page)
    assert len(pictures) == 2
    assert b"<svg" in base64.b64decode(pictures[0])


def test_same_content_gives_the_same_page():
    assert render_page("x", [], {"curve": figure()}) == render_page("x", [], {"curve": figure()})


def test_summary_stands_above_figures_and_details_below():
    tables = [Table("First table", ["a"], [[1]]), Table("Second table", ["a"], [[1]])]
    page = render_page("x", tables, {"curve": figure()})
    order = [page.index(text) for text in ("Summary", "First table", "Figures", "curve", "Details", "Second table")]
    assert order == sorted(order)
    empty = render_page("x", [], {})
    assert not any(f"<h2>{name}</h2>" in empty for name in ("Summary", "Figures", "Details"))
