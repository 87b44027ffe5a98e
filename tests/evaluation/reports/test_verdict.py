import pytest
import scipy.stats

from lightning_robustness._measurement.assisted import BoundaryCurve
from lightning_robustness._measurement.threat_model import AttackFacts, ThreatModel
from lightning_robustness.attacks import MaskingSign
from lightning_robustness.evaluation import ComparisonReport, RobustnessReport
from lightning_robustness.evaluation.reports.verdict import Share
from tests.evaluation.reports.reports import make_report, make_sweep

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


@pytest.mark.parametrize(("accuracy", "count"), [(0.5, 10), (0.613, 1000), (0.0, 7), (1.0, 7)])
def test_intervals_are_those_of_wilson(accuracy, count):
    share = Share.of(accuracy, count)
    expected = scipy.stats.binomtest(round(accuracy * count), count).proportion_ci(method="wilson")
    assert (share.low, share.high) == pytest.approx((expected.low, expected.high), abs=1e-6)


ROBUST = "61.3 % robust accuracy at 8/255 (57-65 %, n = 512), 94.1 % clean"
INTERRUPTED = "interrupted while measuring the sweep"


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (make(("pgd", "worst")), f"{ROBUST}; no signs of masked gradients."),
        (
            make(("pgd", "worst"), signs=[SIGN]),
            f"{ROBUST}; signs of masked gradients (zero_gradients), so the true value is lower.",
        ),
        (
            make(("pgd", "worst"), interrupted="the sweep"),
            f"{ROBUST}; no signs of masked gradients; {INTERRUPTED}.",
        ),
        (
            make(("pgd",), metrics={"acc": 0.9412}, interrupted="the attack cw"),
            "61.3 % accuracy under pgd at 8/255 (57-65 %, n = 512), 94.1 % clean; masked gradients were not checked; "
            "interrupted while measuring the attack cw.",
        ),
        (
            make(("pgd", "pgd_l2", "worst"), {"pgd": PGD, "pgd_l2": AttackFacts({"l2": 0.5}, "10 steps")}),
            "61.3 % robust accuracy at 8/255 and 0.5 in l2 (57-65 %, n = 512), 94.1 % clean; no signs of masked "
            "gradients.",
        ),
        (
            make(("cw", "worst"), {"cw": CW}),
            "61.3 % accuracy under cw, without a budget (57-65 %, n = 512), 94.1 % clean; no signs of masked "
            "gradients.",
        ),
        (make((), metrics={"acc": 0.9412}), "Robust accuracy is unknown, as no attack ran; 94.1 % clean."),
        (
            make(
                (),
                metrics={"acc": 0.9412, "boundary_acc": 0.5, "samples_fim": 100.0},
                boundary=BoundaryCurve("l2", [0.0, 0.5, 1.0, 1.5, 2.0], *[[0.5] * 5] * 3),
            ),
            "50.0 % robust accuracy to first order at 0.5 in l2 (40-60 %, n = 100), an estimate without attacks, "
            "94.1 % clean.",
        ),
        (
            make((), metrics={"rdi": 0.5}),
            "Accuracy is unknown, as there are no labels: only attack-free metrics were measured.",
        ),
        (
            make((), metrics={}, interrupted="the features"),
            "Nothing was measured; interrupted while measuring the features.",
        ),
        (
            make((), metrics={"acc": 0.9412}, sweep=make_sweep(worst=[0.9, 0.5, 0.1])),
            "50.0 % robust accuracy at 0.2 (40-60 %, n = 100), 90.0 % clean; masked gradients were not checked.",
        ),
    ],
)
def test_verdict_on_one_model(report, expected):
    assert report.verdict == expected


def test_verdict_on_a_sweep():
    sweep = make_sweep(worst=[0.9, 0.5, 0.1])
    assert sweep.verdict == "50.0 % robust accuracy at 0.2 (40-60 %, n = 100), 90.0 % clean."
    threat = ThreatModel({"pgd": AttackFacts({"l2": 0.1}, "10 steps")}, 100)
    sweep = make_sweep(worst=[0.9, 0.5, 0.1], threat_model=threat, interrupted=True)
    assert sweep.verdict == (
        "50.0 % robust accuracy at 0.2 in l2 (40-60 %, n = 100), 90.0 % clean; interrupted before all samples were "
        "attacked."
    )


def compared(**options):
    worst = {"a": [0.6, 0.5, 0.3], "b": [0.8, 0.7, 0.2], "c": [0.9, 0.1, 0.0]}
    reports = {name: make_report(seed, sweep=make_sweep(seed, worst=worst[name])) for seed, name in enumerate(worst)}
    return ComparisonReport(reports, **options)


def test_models_are_sorted_by_robust_accuracy_at_a_budget():
    report = compared()
    assert report.budget == 0.2
    assert report.robust_accuracy == {"a": 0.5, "b": 0.7, "c": 0.1}
    assert [row[0] for row in report.tables()[0].rows] == ["b", "a", "c"]
    assert report.verdict == (
        "b is the most robust of 3 models at 0.2: 70.0 % robust accuracy (60-78 %, n = 100), 90.0 % clean; a is next "
        "with 50.0 % (40-60 %, n = 100)."
    )
    assert report.facts["models sorted by"] == "robust accuracy at 0.2, under the worst attack"
    other = compared(budget=0.1, missing=["d"])
    assert [row[0] for row in other.tables()[0].rows] == ["c", "b", "a"]
    assert other.tables()[0].header[1] == "robust at 0.1"
    assert other.verdict.endswith("; interrupted, without d.")
    assert ComparisonReport.from_dict(other.to_dict()).budget == 0.1
    with pytest.raises(ValueError, match=r"`rank_budget`.* 0.1, 0.2, 0.3, .* 0.15"):
        compared(budget=0.15)


def test_one_model_is_the_only_one():
    report = ComparisonReport({"a": make_report(0, sweep=make_sweep(worst=[0.9, 0.5, 0.1]))})
    expected = "a is the only model at 0.2: 50.0 % robust accuracy (40-60 %, n = 100), 90.0 % clean."
    assert report.verdict == expected


def test_weights_of_cmmr_are_explained():
    report = compared()
    note = report.tables()[0].note
    assert note.startswith("CMMR weighs metrics by how much they vary (entropy method), not by how much they matter: ")
    assert all(f" {weight:.2f}" in note for weight in report.weights.values())
