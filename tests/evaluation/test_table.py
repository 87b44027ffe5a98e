import math

import pytest

from lightning_robustness.evaluation.table import Table, cell_text


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


def test_html_is_escaped():
    page = Table("<title>", ["a & b"], [["<script>"]]).to_html()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "&lt;title&gt;" in page
    assert '<th class="word">a &amp; b</th>' in page


def test_empty_table_has_its_header():
    assert Table("Title", ["a", "bc"], []).to_text() == "Title\na  bc"
