import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_robustness.evaluation import ComparisonReport, RobustnessReport, SweepReport
from lightning_robustness.evaluation.reports.report import from_plain, to_plain
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


class Inner(NamedTuple):
    names: list[str]


@dataclass
class Outer:
    number: float
    count: int
    inner: dict[str, Inner]
    maybe: Inner | None
    is_there: bool = False


@given(st.from_type(Outer))
def test_reading_is_the_opposite_of_writing(value):
    plain = to_plain(value)
    json.dumps(plain)
    # NaN is not equal to itself
    assert repr(from_plain(Outer, plain)) == repr(value)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["model"], 3, r"`model` to be str but got 3"),
        (["num_classes"], True, r"`num_classes` to be int but got True"),
        (["metrics"], [1], r"`metrics` to be dict\[str, float\] but got \[1\]"),
        (["metrics", "acc"], "0.5", r"`metrics\['acc'\]` to be float but got '0.5'"),
        (["rates", "pgd", "asr"], None, r"KeyError: 'asr'"),
        (["rates", "pgd", "asr"], "x" * 99, r"to be float but got 'x{59}\.\.\."),
        (["signs"], 3, r"`signs` to be list\[.*MaskingSign\] but got 3"),
        (["signs", 0, "name"], 3, r"`signs\[0\].name` to be str but got 3"),
        (["signs", 0, "name"], None, r"`signs\[0\].name` is missing"),
        (["signs", 0, "other"], 3, r"`signs\[0\].other` is unknown"),
        (["per_sample", "y"], 3, r"`per_sample\['y'\]` to be list\[.*Any\] but got 3"),
        (["sweep"], [], r"`sweep` to be SweepReport but got \[\]"),
        (["sweep", "budgets", 0], "small", r"`sweep.budgets\[0\]` to be float but got 'small'"),
        (["sweep", "values", "accuracy", 0], [0.5], r"IndexError: list index out of range"),
        (["sweep", "values", "accuracy"], None, r"KeyError: 'accuracy'"),
        (["threat_model", "attacks", "pgd"], {}, r"`threat_model.attacks\['pgd'\].budgets` is missing"),
        (["unknown"], 3, r"`unknown` is unknown"),
        (["boundary"], None, r"`boundary` is missing"),
    ],
)
def test_fields_of_other_types(path, value, message):
    changed(make_full_report(), path, value)
    with pytest.raises(ValueError, match=f"RobustnessReport in x.json .*{message}") as error:
        RobustnessReport.from_json("x.json")
    assert str(error.value).endswith("Read a file that `to_json` or `--json` wrote.")


def test_fields_of_other_reports():
    changed(make_sweep(), ["samples"], "many")
    with pytest.raises(ValueError, match="Expected `samples` to be int but got 'many'"):
        SweepReport.from_json("x.json")
    changed(ComparisonReport({"a": make_report()}), ["reports", "a", "metrics", "rdi"], [])
    with pytest.raises(ValueError, match=r"`reports\['a'\].metrics\['rdi'\]` to be float but got \[\]"):
        ComparisonReport.from_json("x.json")


def test_deep_nesting_in_a_field():
    fields = make_report().to_dict() | {"metrics": "HERE"}
    text = json.dumps(fields).replace('"HERE"', '{"a":' * 900 + "1" + "}" * 900)
    Path("x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x.json .*(cannot be read|missing or invalid)"):
        RobustnessReport.from_json("x.json")
