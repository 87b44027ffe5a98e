import html
import json
import math
import sys

import pandas as pd
import pytest

from lightning_robustness.evaluation import ComparisonReport, RobustnessReport, SweepReport
from lightning_robustness.evaluation.reports.report import read_json, to_floats
from tests.evaluation.reports.reports import make_full_report, make_report, make_sweep

REPORTS = pytest.mark.parametrize(
    "report",
    [
        make_sweep(),
        make_full_report(),
        ComparisonReport({"a": make_report(1), "b": make_full_report()}, {"mse": 0.5}, 0.1, ["c"], ["d"]),
    ],
    ids=lambda report: type(report).__name__,
)


@REPORTS
def test_json_and_back(report, tmp_path):
    text = report.to_json(tmp_path / "report.json")
    assert json.loads(text) == json.loads((tmp_path / "report.json").read_text())
    again = type(report).from_json(tmp_path / "report.json")
    assert again.to_dict() == report.to_dict()
    assert str(again) == str(report)


LATER = ("boundary", "threat_model", "classes", "adversarial_examples", "provenance", "budget", "robust_accuracy")


def without_later_fields(fields):
    """Take everything out that reports of earlier versions did not have."""
    if not isinstance(fields, dict):
        return fields
    return {name: without_later_fields(entry) for name, entry in fields.items() if name not in LATER}


@REPORTS
def test_reports_of_earlier_versions_can_be_read(report, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(without_later_fields(json.loads(report.to_json()))))
    again = type(report).from_json(path)
    assert again.provenance == {}
    assert {"norm": "unknown"}.items() <= again.facts.items()
    assert "unknown, from a report of an earlier version" in again.to_html()
    if isinstance(report, RobustnessReport):
        assert again.threat_model is None
        assert (again.classes, again.adversarial_examples) == ([], [])
        assert "robust accuracy at an unknown budget" in again.verdict


@REPORTS
def test_text_and_page_begin_with_the_verdict(report):
    assert str(report).startswith(f"{report.verdict}\n\nnorm: ")
    page = html.unescape(report.to_html()).replace("\u00a0", " ").replace("\u2011", "-")
    assert page.index(report.title, page.index("<h1>")) < page.index(report.verdict) < page.index("<svg")


def test_reports_of_earlier_versions_have_no_curve(tmp_path):
    report, path = make_full_report(), tmp_path / "report.json"
    fields = report.to_dict()
    del fields["boundary"]
    path.write_text(json.dumps(fields))
    assert RobustnessReport.from_json(path).boundary is None
    report.to_json(path)
    assert RobustnessReport.from_json(path).boundary == report.boundary


@REPORTS
def test_page_shows_every_table_and_figure(report, tmp_path):
    page = report.to_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == page
    assert page.count("<table>") == len(report.tables()) + 1  # and the glossary
    assert all(f"<figcaption>{caption}</figcaption>" in page for caption in report.figures())
    assert page.count("<svg") == len(report.figures()) > 0
    assert "<b>" not in page


def test_numbers_that_json_does_not_know_become_null(tmp_path):
    report = make_sweep(breaking_eps={"fgsm": [0.1, math.inf]})
    report.values["ssim"][0][1] = report.worst[0] = report.clean_accuracy = math.nan
    text = report.to_json(tmp_path / "report.json")
    assert "NaN" not in text
    assert "Infinity" not in text
    again = SweepReport.from_json(tmp_path / "report.json")
    assert math.isnan(again.values["ssim"][0][1])
    assert math.isnan(again.worst[0])
    assert math.isnan(again.clean_accuracy)
    assert again.breaking_eps == {"fgsm": [0.1, math.inf]}


def test_missing_numbers_become_nan():
    values = to_floats({"a": [1.0, None], "b": {"c": None}})
    assert values["a"][0] == 1.0
    assert math.isnan(values["a"][1])
    assert math.isnan(values["b"]["c"])


def test_data_frames():
    sweep = make_sweep()
    frame = sweep.to_frame()
    assert isinstance(frame, pd.DataFrame)
    assert frame.columns.tolist() == ["attack", "eps", "accuracy", "ssim", "psnr", "mse", "ald2"]
    assert frame[frame.attack == "pgd"].accuracy.tolist() == sweep.values["accuracy"][1]
    report = make_report()
    assert report.to_frame().rdi.tolist() == [report.metrics["rdi"]]
    comparison = ComparisonReport({"a": make_report(1), "b": make_report(2)})
    assert comparison.to_frame().set_index("model").cmmr.to_dict() == comparison.scores
    assert comparison.to_frame().set_index("model")["rank/fim"].to_dict() == comparison.ranks["fim"]


def test_pandas_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match="pandas"):
        make_sweep().to_frame()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "x.json .*cannot be read"),
        ("[1]", "x.json but got list"),
        ("{}", "RobustnessReport .*x.json .*None"),
        (
            '{"kind": "RobustnessReport"}',
            "RobustnessReport .*x.json .*'metrics'",
        ),
        (make_sweep().to_json(), "RobustnessReport .*x.json .*SweepReport"),
    ],
)
def test_files_with_something_else(tmp_path, content, message):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        RobustnessReport.from_json(tmp_path / "x.json")


def test_file_that_is_no_text(tmp_path):
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="but it cannot be read"):
        read_json(tmp_path / "x.json")
