import math
import re

import pytest
import scipy.stats

from lightning_robustness._measurement.assisted import BoundaryCurve
from lightning_robustness._measurement.findings import ClassAccuracy
from lightning_robustness._measurement.threat_model import AttackFacts, ThreatModel
from lightning_robustness.attacks import MaskingSign
from lightning_robustness.evaluation import RobustnessReport
from tests.evaluation.reports.reports import make_full_report, make_report, make_sweep

PGD, CW = AttackFacts({"linf": 8 / 255}, "10 steps"), AttackFacts({}, "50 steps")
SIGN = MaskingSign("zero_gradients", "evidence", "explanation", "remedy")


def rate(accuracy, count=512, correct=480):
    parts = dict.fromkeys(("asr", "asr_low", "asr_high", "error_rate", "distortion"), 0.5)
    ends = scipy.stats.binomtest(round(accuracy * count), count).proportion_ci(method="wilson")
    parts |= {"adv_acc_low": ends.low, "adv_acc_high": ends.high}
    return parts | {"adv_acc": accuracy, "count": count, "correct": correct}


def make(attacks=("pgd",), facts=None, metrics=None, **fields):
    rates = {name: rate(314 / 512) for name in attacks}
    facts = {name: PGD for name in attacks if name != "worst"} if facts is None else facts
    metrics = {"acc": 0.9412, "masking": 0.0} if metrics is None else metrics
    return RobustnessReport("Net", 10, metrics, rates, threat_model=ThreatModel(facts, 512), **fields)


def table_of(report, title):
    return {table.title: table for table in report.tables()}[title]


def test_text_has_all_values():
    report = make_full_report()
    text = str(report)
    assert "\n\nRobustness of Network\n\n" in text
    assert f"ROBY                             {report.metrics['roby']:.4f}  lower" in text
    assert f"RDI                              {report.metrics['rdi']:.4f}  higher" in text
    rate = report.rates["pgd"]
    numbers = [f"{rate[name]:.4f}" for name in ("asr", "asr_low", "asr_high", "adv_acc", "distortion")]
    (row,) = [line.split() for line in text.splitlines() if line.startswith("pgd  ")]
    assert row == ["pgd", *numbers, "9", "10"]
    assert "zero_gradients" in text
    assert f"features   {report.metrics['seconds/features']:.4f}" in text


def test_summary_has_labels_and_directions():
    metrics = {"fim_inverse": 3.0, "clever": 2.0, "samples": 10.0, "acc": 0.75, "rdi_intra": 1.0, "asr/pgd": 0.25}
    report = RobustnessReport("Network", 10, metrics, rates={"worst": make_report().rates["worst"] | {"adv_acc": 0.5}})
    assert report.tables()[0].rows == [
        ["accuracy", 0.75, ""],
        ["Fisher, inverse", 3.0, ""],
        ["CLEVER", 2.0, "higher"],
        ["accuracy under the worst attack", 0.5, "higher"],
    ]


def test_attacks_have_a_mean_without_the_worst_case():
    rate = make_report().rates["pgd"]
    values = {"a": (0.25, 0.5), "b": (0.75, 0.0), "worst": (1.0, 0.0)}
    rates = {name: rate | {"asr": asr, "adv_acc": adv_acc} for name, (asr, adv_acc) in values.items()}
    rows = table_of(make_report(rates=rates), "Attacks").rows
    assert rows[-1] == ["mean of the attacks", 0.5, "", "", 0.25, "", "", ""]


def test_attacks_under_different_threats_have_no_mean():
    same, other = make(("a", "b", "worst")), make(("a", "b", "worst"), {"a": PGD, "b": CW})
    assert [row[0] for row in table_of(same, "Attacks").rows] == ["a", "b", "worst", "mean of the attacks"]
    assert [row[0] for row in table_of(other, "Attacks").rows] == ["a", "b", "worst"]


def test_samples_that_are_wrong_before_an_attack_are_not_missing():
    report = make(("pgd",))
    table = table_of(report, "Attacks")
    assert dict(zip(table.header[-2:], table.rows[0][-2:], strict=True)) == {"right before": 480, "of": 512}
    assert report.facts["samples"] == "512; misclassified ones need no attack"
    assert "wrong before an attack" in table.note


def test_notes_name_what_a_reader_must_know():
    first, second, *_ = make_full_report().notes
    assert "interrupted while it measured the decision space" in first
    assert "masked (zero_gradients)" in second
    rates = {name: {"asr": asr} for name, asr in (("cw", 1.0), ("pgd", 0.5), ("worst", 0.6))}
    assert "'worst' counts an attack without a budget only where" in make_report(rates=rates).notes[-1]
    assert make_report(rates={"pgd": {"asr": 0.5}, "worst": {"asr": 0.5}}).notes == []


def test_plot_shows_rates_or_curves():
    report = make_report(sweep=None)
    assert report.plot().axes[0].get_xlabel().startswith("accuracy")
    assert make_report().plot().axes[0].get_ylabel() == "accuracy under attack"
    with pytest.raises(ValueError, match="attacks or a sweep to plot"):
        make_report(sweep=None, rates={}).plot()


def test_parts_that_are_missing_have_no_figure_and_no_table():
    assert len(make_full_report().figures()) == 4
    report = RobustnessReport("Network", 10, {"rdi": 0.5})
    assert report.figures() == {}
    assert [table.title for table in report.tables()] == ["Robustness"]


@pytest.mark.parametrize(("norm", "is_image"), [("linf", True), ("linf", False), ("l2", True)])
def test_distances_between_images_are_in_steps_of_pixels(norm, is_image):
    curve = BoundaryCurve(norm, [0.0, 0.1], [0.9, 0.5], [0.8, 0.4], [1.0, 0.6])
    for value, text in ((0.0122, "3.1/255"), (math.inf, math.inf)):
        report = make_report(
            metrics={"boundary": value, "rdi": 0.0122}, boundary=curve, threat_model=ThreatModel(is_image=is_image)
        )
        assert report._cell("boundary") == (text if norm == "linf" and is_image else value)
        assert report._cell("rdi") == 0.0122


def test_table_has_the_least_robust_classes():
    classes = [ClassAccuracy(label, 3, 1.0, label / 100) for label in reversed(range(30))]
    table = table_of(make_report(classes=classes), "Classes, the least robust first (20 of 30)")
    assert table.rows == [[label, 1.0, label / 100, 3] for label in range(20)]


UNDER_L2 = {"pgd": PGD, "pgd_l2": AttackFacts({"l2": 0.5}, "10 steps")}
FIRST_ORDER = {"acc": 0.9412, "samples_fim": 100.0, "boundary_acc": 0.5, "boundary_acc_low": 0.4}
FIRST_ORDER |= {"boundary_acc_high": 0.6}
CURVE = BoundaryCurve("l2", [0.0, 0.5, 1.0, 1.5, 2.0], *[[0.5] * 5] * 3)
CLEAN = {"acc": 0.9412}


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (make(("pgd", "worst")), r"^61.3 % robust.* 8/255 \(57-65 %, n = 512\), 94.1 % clean; no signs of masked"),
        (
            make(("pgd", "worst"), signs=[SIGN] * 3),
            r"; signs of masked gradients \(zero_gradients\), .*may be lower\.$",
        ),
        (make(("pgd", "worst"), interrupted="the sweep"), r"; no signs .*; interrupted .* the sweep\.$"),
        (make(("pgd",), metrics=CLEAN), "^61.3 % accuracy under pgd at 8/255 .*; masked gradients were not checked"),
        (make(("pgd", "pgd_l2", "worst"), UNDER_L2), "61.3 % robust accuracy at 8/255 and 0.5 in l2 "),
        (make(("cw", "worst"), {"cw": CW}), r"^61.3 % accuracy under cw, without a budget \("),
        (make((), metrics=CLEAN), "^Robust accuracy is unknown.* no attack.* 94.1 % clean"),
        (
            make((), metrics=FIRST_ORDER, boundary=CURVE),
            r"^50.0 % .* first order at 0.5 in l2 \(40-60 %, n = 100\), .*94.1",
        ),
        (make((), metrics={"rdi": 0.5}), "^Accuracy is unknown.* no labels"),
        (make((), metrics={}, interrupted="the features"), "^Nothing was measured; interrupted .* the features"),
        (
            make((), metrics=CLEAN, sweep=make_sweep(worst=[0.9, 0.5, 0.1])),
            "^50.0 % robust .* 0.2 .*90.0 % clean; masked",
        ),
    ],
)
def test_verdict_on_one_model(report, expected):
    assert re.search(expected, report.verdict), report.verdict
