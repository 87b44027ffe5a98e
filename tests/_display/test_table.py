import math

import pytest

from lightning_robustness._display.table import NumberText, Table, cell_text, glossary
from lightning_robustness._measurement.keys import KEYS


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (None, "-"),
        (math.nan, "-"),
        (0.0, "0.0000"),
        (0.123456, "0.1235"),
        (0.00123456, "0.001235"),
        (-2.5, "-2.5000"),
        (123456.7, "1.235e+05"),
        (12, "12"),
        ("PGD", "PGD"),
    ],
)
def test_cells(cell, text):
    assert cell_text(cell) == text


def test_text_is_aligned():
    table = Table("Title", ["name", "x", "number"], [["a", 1.0, 5], ["long name", math.nan, 12345]])
    assert table.to_text().splitlines() == [
        "Title",
        "name            x  number",
        "a          1.0000       5",
        "long name       -   12345",
    ]
    assert Table("Title", ["a", "bc"], []).to_text() == "Title\na  bc"


def test_html_is_escaped():
    page = Table("<title>", ["a & b"], [["<script>"]]).to_html()
    assert "<script>" not in page
    assert all(text in page for text in ("&lt;script&gt;", "&lt;title&gt;", '<th class="word">a &amp; b</th>'))


def test_written_numbers_are_aligned_as_numbers():
    table = Table("Title", ["name", "distance"], [["a", NumberText("3.1/255")], ["b", 0.25]], note="In <pixels>.")
    assert table.to_text().splitlines() == [
        *("Title", "name  distance", "a      3.1/255", "b       0.2500", "In <pixels>.")
    ]
    assert '<td class="number">3.1/255</td>' in table.to_html()
    assert "<p>In &lt;pixels&gt;.</p>" in table.to_html()


@pytest.mark.parametrize(
    ("rows", "folded", "tag"), [(24, False, "figure"), (25, False, "details"), (1, True, "details")]
)
def test_long_tables_are_folded(rows, folded, tag):
    assert Table("Title", ["a"], [[1]] * rows, folded=folded).to_html().startswith(f"<{tag}>")


def test_each_family_is_explained_once():
    table = glossary(["epoch", "asr/pgd", "asr/cw", "rdi", "seconds/pgd", "samples"])
    assert [row[0] for row in table.rows] == ["rdi", "asr/<attack>"]
    assert table.rows[0][1:] == [next(key.glossary for key in KEYS if key.name == "rdi"), "", "higher"]
    assert glossary([]).rows == []
    assert glossary(iter(["rdi", "acc"])).rows == glossary(["acc", "rdi"]).rows
