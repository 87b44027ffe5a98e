import html
import json
import math
import sys

import pandas as pd
import pytest

from lightning_robustness.evaluation import ComparisonReport, RobustnessReport, SweepReport
from tests.evaluation.reports.reports import make_full_report, make_report, make_sweep

MODELS = {"a": make_report(1), "b": make_full_report()}
REPORTS = pytest.mark.parametrize(
    "report",
    [
        make_sweep(),
        make_full_report(),
        ComparisonReport(MODELS, prior={"mse": 0.5}, balance=0.1, missing=["c"], left_out=["d"]),
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


@REPORTS
def test_text_and_page_begin_with_the_verdict_and_show_every_table_and_figure(report, tmp_path):
    assert str(report).startswith(f"{report.verdict}\n\nnorm: ")
    page = report.to_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == page
    text = html.unescape(page).replace("\u00a0", " ").replace("\u2011", "-")
    assert text.index(report.title, text.index("<h1>")) < text.index(report.verdict) < text.index("<svg")
    assert page.count("<table>") == len(report.tables()) + 1  # and the glossary
    assert all(f"<figcaption>{caption}</figcaption>" in page for caption in report.figures())
    assert page.count("<svg") == len(report.figures()) > 0
    assert "<b>" not in page


def test_numbers_that_json_does_not_know_become_null(tmp_path):
    report = make_sweep(breaking_eps={"fgsm": [0.1, math.inf]})
    report.values["ssim"][0][1] = report.worst[0] = report.clean_accuracy = math.nan
    text = report.to_json(tmp_path / "report.json")
    assert not {"NaN", "Infinity"} & set(text.replace(",", "").split())
    again = SweepReport.from_json(tmp_path / "report.json")
    assert all(math.isnan(value) for value in (again.values["ssim"][0][1], again.worst[0], again.clean_accuracy))
    assert again.breaking_eps == {"fgsm": [0.1, math.inf]}


def test_text_has_no_empty_paragraphs():
    for report in (make_sweep(), make_report(), RobustnessReport("Network", 10, {})):
        assert "\n\n\n" not in str(report)


def test_data_frames(monkeypatch):
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
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match="pandas"):
        make_sweep().to_frame()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "x.json .*cannot be read"),
        ("[" * 100_000 + "]" * 100_000, "x.json .*cannot be read"),
        ('{"kind": "RobustnessReport"}', "x.json .*`adversarial_examples` is missing"),
        (make_sweep().to_json(), "RobustnessReport .*x.json .*SweepReport"),
    ],
)
def test_files_with_something_else(tmp_path, content, message):
    (tmp_path / "x.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        RobustnessReport.from_json(tmp_path / "x.json")
