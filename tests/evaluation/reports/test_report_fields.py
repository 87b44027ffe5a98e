import json
from pathlib import Path

import pytest

from lightning_robustness.evaluation import ComparisonReport, RobustnessReport, SweepReport
from lightning_robustness.evaluation.reports.report import check_fields
from tests.evaluation.reports.reports import make_full_report, make_report, make_sweep


def changed(report, path, value):
    """Write a report with another value somewhere."""
    fields = report.to_dict()
    *parents, last = path
    place = fields
    for key in parents:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    Path("x.json").write_text(json.dumps(fields))


@pytest.fixture(autouse=True)
def _directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("report", [make_full_report(), make_report(), make_sweep()], ids=lambda r: type(r).__name__)
def test_own_reports_fit(report):
    assert check_fields(report) is report


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["model"], 3, "`model` .* str .* 3"),
        (["num_classes"], 2.5, "`num_classes` .* int .* 2.5"),
        (["num_classes"], True, "`num_classes` .* int .* True"),
        (["metrics"], [1], r"`metrics` .*dict\[str, float\] .*\[1\]"),
        (["metrics", "acc"], "0.5", r"`metrics\['acc'\]` .* float .*'0.5'"),
        (["rates", "pgd"], 1, r"`rates\['pgd'\]` .*dict\[str, float\] .* 1"),
        (["rates", "pgd", "asr"], None, r"KeyError: 'asr'"),
        (["rates", "pgd", "asr"], "x" * 99, r"to be float but got 'x{59}\.\.\."),
        (["signs"], 3, r"TypeError: 'int' object is not iterable"),
        (["signs", 0, "name"], 3, r"`signs\[0\].name` .* str .* 3"),
        (["signs", 0, "other"], 3, "TypeError: .*'other'"),
        (["settings"], {"seed": 0}, r"`settings\['seed'\]` .* str .* 0"),
        (["per_sample", "y"], 3, r"`per_sample\['y'\]` .* list.* 3"),
        (["sweep"], [], r"TypeError|AttributeError"),
        (["sweep", "eps", 0], "small", r"`eps\[0\]` .* float .*'small'"),
        (["sweep", "values", "accuracy", 0], [0.5], r"IndexError: list index out of range"),
        (["sweep", "values", "accuracy"], None, r"KeyError: 'accuracy'"),
        (["decision_space", "labels", 1], "a", r"`decision_space.labels\[1\]` .* int"),
        (["unknown"], 3, "TypeError: .*'unknown'"),
        (["metrics"], None, r"KeyError: 'metrics'"),
    ],
)
def test_fields_of_other_types(path, value, message):
    changed(make_full_report(), path, value)
    with pytest.raises(ValueError, match=f"RobustnessReport in x.json .*{message}") as error:
        RobustnessReport.from_json("x.json")
    assert str(error.value).endswith("Read a file that `to_json` or `--json` wrote.")


def test_fields_of_other_reports():
    changed(make_sweep(), ["samples"], "many")
    with pytest.raises(ValueError, match=r"`samples` .* int .*'many'"):
        SweepReport.from_json("x.json")
    changed(ComparisonReport({"a": make_report()}), ["reports", "a", "metrics", "rdi"], [])
    with pytest.raises(ValueError, match=r"`metrics\['rdi'\]` .* float .*\[\]"):
        ComparisonReport.from_json("x.json")


@pytest.mark.parametrize("nested", ["[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000])
def test_deep_nesting(nested):
    Path("x.json").write_text(nested)
    with pytest.raises(ValueError, match=r"x.json .*cannot be read"):
        RobustnessReport.from_json("x.json")


def test_deep_nesting_in_a_field():
    fields = make_report().to_dict() | {"metrics": "HERE"}
    text = json.dumps(fields).replace('"HERE"', '{"a":' * 900 + "1" + "}" * 900)
    Path("x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x.json .*(cannot be read|missing or invalid)"):
        RobustnessReport.from_json("x.json")
