"""Generated pages are up to date; that of the papers names what exists, and leaves no numbered item out."""

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
specification = importlib.util.spec_from_file_location("make_papers", ROOT / "docs" / "make_papers.py")
make_papers = importlib.util.module_from_spec(specification)
specification.loader.exec_module(make_papers)
PAPERS = make_papers.read()
VERDICTS = {"equal", "differs", "measured", "not reproduced", "open", "derivation"}
ROMAN = {
    name: number for number, name in enumerate(["I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X"], start=1)
}
# Equations, tables and figures of the papers, by the first word of the title
NUMBERS = {"RDI:": (9, 4, 5), "ROBY:": (10, 10, 11), "CMMR:": (9, 3, 11), "Measuring": (184, 25, 0)}


def exists(where):
    if "/" in where:
        return (ROOT / where.partition("#")[0]).is_file()
    module, _, name = where.rpartition(".")
    return hasattr(importlib.import_module(f"lightning_robustness.{module}"), name)


@pytest.mark.parametrize("title", PAPERS)
def test_everything_named_exists(title):
    for entry in PAPERS[title]:
        assert entry.where, entry
        assert [where for where in entry.where if not exists(where)] == [], entry
        assert entry.verdict in VERDICTS
        assert not re.search(r"\w/\w+\.py", entry.note), entry  # files are named where it is tested that they exist
        assert entry.note or entry.verdict in ("equal", "measured", "derivation"), entry


@pytest.mark.parametrize("title", PAPERS)
def test_no_number_is_left_out(title):
    items = ", ".join(entry.item for entry in PAPERS[title])
    for kind, last in zip(("[Ee]qs?\\.?", "Tables?", "Figures?"), NUMBERS[title.split()[0]], strict=True):
        found = set()
        for first, end in re.findall(rf"{kind} ([0-9IVX]+)(?:-([0-9IVX]+))?", items):
            low, high = (ROMAN.get(number) or int(number) for number in (first, end or first))
            found |= set(range(low, high + 1))
        assert found == set(range(1, last + 1)), (kind, found ^ set(range(1, last + 1)))


def test_the_pages_are_up_to_date():
    assert make_papers.PAGE.read_text() == make_papers.render(), "python docs/make_papers.py"
    assert make_papers.SETTINGS.search(make_papers.ATTACKS.read_text())
    assert make_papers.ATTACKS.read_text() == make_papers.render_attacks(), "python docs/make_papers.py"
