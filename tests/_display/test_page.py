import base64
import re

from lightning_robustness._display.drawing import COLORS, new_figure
from lightning_robustness._display.page import Page
from lightning_robustness._display.pictures import AdversarialExample
from lightning_robustness._display.table import Table


def figure(label="x"):
    drawn = new_figure(2, 1)
    axis = drawn.subplots()
    axis.plot([0, 1], [1, 0], color=COLORS[1], label=label)
    axis.legend()
    return drawn


def full_page():
    return Page(
        title="A & B",
        verdict="61.3 % < 94.1 % (n = 5)",
        facts={"norm <1>": "l2 & more"},
        notes=["note <1>"],
        figures={"curve": figure("<script>"), "again": figure()},
        tables=[Table("First table", ["a"], [[1]]), Table("Second table", ["a"], [[1]], folded=True)],
        examples=[AdversarialExample('"<b>', 3, 3, 5, 8, base64.b64encode(b"png").decode())],
        glossary=Table("Terms", ["a"], [["<i>"]]),
        provenance={"seed": "<0>"},
    ).to_html()


def test_page_needs_nothing_else():
    page = full_page()
    assert page == full_page()
    assert page.startswith("<!DOCTYPE html>")
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    assert not re.findall(r"@import|url\((?!#)|https?:", page)
    assert page.count("<svg") == page.count("</svg>") == 2


def test_everything_is_escaped():
    page = full_page()
    assert "<title>A &amp; B</title>" in page
    assert "<li>note &lt;1&gt;</li>" in page
    assert "<dt>norm &lt;1&gt;</dt><dd>l2 &amp; more</dd>" in page
    assert "<dt>seed</dt><dd>&lt;0&gt;</dd>" in page
    assert 'alt="&quot;&lt;b&gt;: class 3' in page
    assert not re.findall("<script|<b>|<i>", page)
    assert "&lt;script&gt;" in page


def test_parts_are_in_the_order_of_a_reader():
    page = full_page()
    parts = ("<h1>", 'class="verdict"', "<dl>", "curve", "note ", "First table", "again", 'alt="', "Second table")
    order = [page.index(text, page.index("<body>")) for text in (*parts, "Terms", "Provenance")]
    assert order == sorted(order)
    assert "<h2>" not in Page(title="x").to_html()  # of parts that are missing


def test_ids_are_unique_and_known():
    page = full_page()
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) > 10
    assert {*re.findall(r'href="#([^"]+)"', page), *re.findall(r"url\(#([^)]+)\)", page)} <= set(ids)


def test_figures_follow_the_colours_of_the_page():
    page = full_page()
    svg = page.partition("<svg")[2].partition("</svg>")[0]
    assert "currentColor" in svg
    assert "var(--series-1)" in svg
    assert not re.findall(f"#000000|#ffffff|{COLORS[1].lower()}", svg)
    for number, color in enumerate(COLORS):
        assert page.count(f"--series-{number}: {color};") == 1
        assert page.count(f"--series-{number}: ") == 2


def test_wide_figures_have_a_row_of_their_own():
    page = Page(title="x", figures={"first": figure(), "wide": new_figure(10, 2), "small": new_figure(4, 2)}).to_html()
    assert '<figure class="spread"><figcaption>wide</figcaption>' in page
    assert page.count('class="spread"') == 1
