"""Pages as a browser shows them, on a phone, a tablet and a desk."""

import pytest

from lightning_robustness import RobustnessMonitor
from lightning_robustness.evaluation import ComparisonReport
from tests.browser import WIDTHS, show
from tests.evaluation.reports.reports import make_full_report, make_report, make_sweep

# Pixels; matplotlib's own default on a page is 13
SMALLEST_TEXT = 8.5
LONG = "a_very_long_name_of_a_model_without_any_space_that_a_line_could_be_broken_at_" * 2


def make_monitor():
    monitor = RobustnessMonitor(eps=8 / 255)
    values = {"acc": 0.75, "rdi": 0.5, "fim": 2.0, "adv_acc/pgd": 0.5, "adv_acc/worst": 0.25, "samples_attacks": 64}
    monitor.history.extend({"epoch": epoch, "step": 9 * epoch, **values} for epoch in range(30))
    return monitor


@pytest.fixture(scope="module")
def pages():
    models = {"natural": make_full_report(), LONG: make_report(1, settings={LONG: LONG}), "c": make_report(2)}
    return {
        "one model": make_full_report().to_html(),
        "a sweep": make_sweep().to_html(),
        "several models": ComparisonReport(models).to_html(),
        "a training run": make_monitor().to_html(),
    }


@pytest.mark.parametrize("name", ["one model", "a sweep", "several models", "a training run"])
def test_page_fits_all_screens(pages, name, tmp_path):
    shown = show(pages[name].replace("<details>", "<details open>"), tmp_path)
    assert shown.by_width.keys() == {*WIDTHS}
    assert {width: found["overflow"] for width, found in shown.by_width.items()} == dict.fromkeys(WIDTHS, 0)
    assert all(found["texts"] > 0 for found in shown.by_width.values())
    assert [found["cut"] for found in shown.by_width.values()] == [[]] * len(WIDTHS)
    assert (shown.console, shown.requests) == ([], [])
    assert min(found["smallest"] for found in shown.by_width.values()) >= SMALLEST_TEXT


def test_figures_are_light_on_dark_pages(pages, tmp_path):
    ink = {}
    for dark in (False, True):
        folder = tmp_path / str(dark)
        folder.mkdir()
        found = show(pages["one model"], folder, dark).by_width[820]
        ink[dark] = (sum_of(found["background"]), sum_of(found["ink"]))
    assert ink[False][0] > 700 > 200 > ink[False][1]
    assert ink[True][0] < 200 < 600 < ink[True][1]


def sum_of(color):
    return sum(int(part) for part in color.removeprefix("rgb(").removesuffix(")").split(", "))


def test_the_browser_finds_what_is_wrong(tmp_path):
    wrong = (
        '<div style="width: 900px">wide</div><img src="http://example.org/x.png"><script>missing()</script>'
        '<svg width="60" height="60" viewBox="0 0 600 600"><text x="500" y="300">far too long to be seen</text></svg>'
    )
    shown = show(f"<!DOCTYPE html><html><head></head><body>{wrong}</body></html>", tmp_path)
    assert {width: found["overflow"] > 0 for width, found in shown.by_width.items()} == {
        390: True,
        820: True,
        1400: False,
    }
    assert any("missing is not defined" in line for line in shown.console)
    assert shown.requests == ["http://example.org/x.png"]
    assert shown.by_width[390]["cut"] == ["far too long to be seen"]
    assert shown.by_width[390]["smallest"] < SMALLEST_TEXT
