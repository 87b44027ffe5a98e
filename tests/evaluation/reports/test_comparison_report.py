import math

import numpy as np
import pytest
import scipy.stats
import torch

from lightning_robustness._measurement.assisted import assist
from lightning_robustness._measurement.rows import Rows
from lightning_robustness.evaluation import ComparisonReport
from lightning_robustness.evaluation.cmmr import composite_scores
from tests.evaluation.reports.reports import ATTACKS, EPS, make_report, make_sweep

METRICS = ("accuracy", "ssim", "psnr", "mse", "ald2")
BENEFIT = (True, True, True, False, False)
SCATTER = "Attack-free metrics against mean robust accuracy"


@pytest.fixture
def reports():
    return {name: make_report(seed) for seed, name in enumerate(("a", "b", "c", "d"))}


def table(reports):
    """Models by attacks by budgets by metrics."""
    return np.array(
        [
            [[[r.sweep.values[m][a][e] for m in METRICS] for e in range(len(EPS))] for a in range(len(ATTACKS))]
            for r in reports.values()
        ]
    )


@pytest.mark.parametrize("weighting", ["entropy", "printed", "correlation"])
def test_scores_are_those_of_the_table(reports, weighting):
    report = ComparisonReport(reports, prior={"accuracy": 3.0}, balance=0.08, weighting=weighting)
    expected = composite_scores(torch.tensor(table(reports)), BENEFIT, (3.0, 1.0, 1.0, 1.0, 1.0), 0.08, weighting)
    assert list(report.scores.values()) == pytest.approx(expected.scores.tolist())
    assert list(report.weights) == list(METRICS)
    assert list(report.weights.values()) == pytest.approx(expected.weights.tolist())
    assert list(report.entropy_weights.values()) == pytest.approx(expected.entropy_weights.tolist())
    assert report.curves["c"] == pytest.approx(expected.curves[2].tolist())
    assert report.composite["b"]["pgd"] == pytest.approx(expected.composite[1, 1].tolist())
    assert ("correlation" in report.tables()[0].note) == (weighting == "correlation")


def test_validation_equals_scipy(reports):
    report = ComparisonReport(reports)
    m = np.array([[report.composite[name][attack] for name in reports] for attack in ATTACKS]).reshape(2, -1)
    cmmr = np.array([report.curves[name] for name in reports]).flatten()
    values = table(reports)
    for row, attack in enumerate(ATTACKS):
        assert report.attack_pearson[attack] == pytest.approx(scipy.stats.pearsonr(cmmr, m[row])[0])
        for column, (metric, benefit) in enumerate(zip(METRICS, BENEFIT, strict=True)):
            series = values[:, row, :, column].flatten() * (1 if benefit else -1)
            assert report.metric_pearson[attack][metric] == pytest.approx(scipy.stats.pearsonr(m[row], series)[0])
    # With two judges, W is (1 + Spearman's correlation) / 2
    assert report.concordance == pytest.approx((1 + scipy.stats.spearmanr(*m)[0]) / 2)


def test_correlations_equal_scipy(reports):
    report = ComparisonReport(reports)
    accuracy = [np.mean(r.sweep.worst) for r in reports.values()]
    assert list(report.mean_robust_accuracy.values()) == pytest.approx(accuracy)
    assert list(report.correlations) == ["rdi", "roby", "fim", "lipschitz"]
    for key, row in report.correlations.items():
        values = [r.metrics[key] for r in reports.values()]
        assert row["pearson"] == pytest.approx(scipy.stats.pearsonr(values, accuracy)[0])
        assert row["spearman"] == pytest.approx(scipy.stats.spearmanr(values, accuracy)[0])
        assert row["kendall"] == pytest.approx(scipy.stats.kendalltau(values, accuracy)[0])


def test_ranks_follow_the_direction_of_each_metric(reports):
    values = {"a": (0.7, 0.3e-20), "b": (0.5, (0.1 + 0.2) * 1e-20), "c": (0.5, 0.2e-20), "d": (0.1, 0.4e-20)}
    for name, (rdi, fim) in values.items():
        reports[name].metrics |= {"rdi": rdi, "fim": fim}
    report = ComparisonReport(reports)
    assert report.ranks["rdi"] == {"a": 1, "b": 2, "c": 2, "d": 4}
    assert report.ranks["fim"] == {"a": 2, "b": 2, "c": 1, "d": 4}  # rounding makes no difference
    order = sorted(report.scores, key=report.scores.get, reverse=True)
    assert [report.ranks["cmmr"][name] for name in order] == [1, 2, 3, 4]
    assert list(report.ranks)[:4] == ["robust_accuracy", "mean_robust_accuracy", "cmmr", "acc"]
    models, ranks = report.tables()[2].header[1:], {row[0]: row[1:] for row in report.tables()[2].rows}
    assert dict(zip(models, ranks["RDI"], strict=True)) == report.ranks["rdi"]


def test_misleading_metrics_are_shown_but_rank_nothing(reports):
    for number, report in enumerate(reports.values()):
        report.metrics |= {"fim_inverse": number, "fim_geometric": 2.0 * number}
    report = ComparisonReport(reports)
    assert not {"fim_inverse", "fim_geometric"} & report.ranks.keys()
    assert report.correlations["fim_inverse"] == pytest.approx(report.correlations["fim_geometric"])
    records = report._records()
    assert [record["fim_inverse"] for record in records] == [0, 1, 2, 3]
    assert not any(name.startswith("rank/fim_") for name in records[0])
    values, correlations = report.tables()[1], report.tables()[4]
    for table in (values, correlations):
        directions = {row[0]: row[1] for row in table.rows}
        assert directions["Fisher, inverse"] == directions["Fisher, geometric mean"] == ""
        assert directions["Fisher information"] == "lower"
    assert "Fisher, inverse" in [axis.get_xlabel() for axis in report.figures()[SCATTER].axes]


def test_order_of_models_does_not_matter(reports):
    reports["twin"] = make_report(0)
    forth, back = ComparisonReport(reports), ComparisonReport(dict(reversed(reports.items())))
    assert back.scores == pytest.approx(forth.scores)
    assert back.weights == pytest.approx(forth.weights)
    assert back.ranks == forth.ranks
    assert all(rank["twin"] == rank["a"] for rank in forth.ranks.values())
    assert back.concordance == pytest.approx(forth.concordance)
    assert [row[0] for row in back.tables()[0].rows] == [row[0] for row in forth.tables()[0].rows]


def test_metric_that_not_all_have_is_left_out(reports):
    del reports["b"].metrics["lipschitz"]
    reports["c"].metrics["roby"] = math.nan
    report = ComparisonReport(reports)
    assert {"rdi", "fim"} == report.correlations.keys()
    assert not {"lipschitz", "roby"} & report.ranks.keys()


@pytest.mark.parametrize(("filler", "reason"), [(math.nan, "is not defined for these inputs"), (0.5, "is constant")])
def test_metric_without_information_is_noted(reports, filler, reason):
    for report in reports.values():
        report.sweep.values["ssim"] = [[filler] * len(EPS)] * len(ATTACKS)
    report = ComparisonReport(reports)
    assert report.weights["ssim"] == 0
    assert f"SSIM (ASS) {reason}: it carries no information and has weight 0 in CMMR." in report.notes


def test_notes_on_few_models_and_interruption(reports):
    assert ComparisonReport(reports).notes == []
    two = ComparisonReport(dict(list(reports.items())[:2]), missing=["c", "d"], left_out=["e"])
    interruption, left_out, few = two.notes
    assert interruption.endswith("interrupted: no results for c, d.")
    assert left_out.startswith("e is left out: ")
    assert "fewer than three models" in few
    reports["a"].interrupted = "the attack pgd"
    assert ComparisonReport(reports).notes[0].startswith("a: The run was interrupted while it measured the attack pgd")


def test_settings_are_shown(reports):
    for report in reports.values():
        report.sweep.settings["seed"] = "3"
    assert dict(ComparisonReport(reports, balance=0.08).tables()[-1].rows) == {
        "attacks": "fgsm, pgd",
        "budgets": "0.1, 0.2, 0.3",
        "attacked samples": "100",
        "balancing weight": "0.08",
        "seed": "3",
    }


def test_settings_that_differ_are_noted(reports):
    del reports["d"]
    for name, report in reports.items():
        report.sweep.settings = {"pgd at eps = 0.1": "PGD(steps=10)", "normalisation": f"mean 0.5, std {name}"}
        report.settings["Fisher information"] = "eps 0.1"
    assert ComparisonReport(reports).notes == []
    reports["b"].sweep.settings["pgd at eps = 0.1"] = "PGD(steps=1)"
    reports["b"].settings["Fisher information"] = "eps 0.2"
    attack, fisher = ComparisonReport(reports).notes
    assert "pgd at eps = 0.1: PGD(steps=10) (a); PGD(steps=1) (b); PGD(steps=10) (c)." in attack
    assert "different settings: eps 0.1 (a); eps 0.2 (b); eps 0.1 (c)." in fisher


def test_one_model_has_curves_but_no_correlation(reports):
    report = ComparisonReport({"a": reports["a"]})
    assert report.scores["a"] > 0
    assert math.isnan(report.correlations["rdi"]["pearson"])
    assert SCATTER not in report.figures()
    assert report.verdict.startswith("a is the only model at 0.2: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sweep": None}, r"'b' has none.*`evaluate\(\.\.\., sweep_budgets="),
        ({"num_classes": 5}, r"classes .* 10 \(a\), 5 \(b\)"),
        ({"sweep": make_sweep(attacks=["fgsm", "bim"])}, r"fgsm, pgd \(a\), fgsm, bim \(b\)"),
        ({"sweep": make_sweep(budgets=[0.1, 0.2, 0.4])}, r"0.2, 0.3 \(a\), 0.1, 0.2, 0.4 \(b\)"),
        ({"sweep": make_sweep(samples=7)}, r"samples .* 100 \(a\), 7 \(b\)"),
        ({"sweep": make_sweep(clean_accuracy=0.0)}, "no correct prediction from 'b'"),
    ],
)
def test_reports_that_cannot_be_compared(change, message):
    with pytest.raises(ValueError, match=message):
        ComparisonReport({"a": make_report(), "b": make_report(**change)})


def test_comparison_draws_every_kind(reports):
    report = ComparisonReport(reports)
    drawn = report.figures()
    assert len(drawn) == 5
    assert next(iter(drawn)) == "Robust accuracy under the worst of all attacks"
    assert drawn["CMMR against the budget"].axes[0].get_ylabel() == "CMMR (higher is more robust)"
    titles = {axis.get_xlabel().partition(" (")[0]: axis.get_title() for axis in drawn[SCATTER].axes}
    assert list(titles) == ["RDI", "ROBY", "Fisher information", "Lipschitz constant"]
    assert list(titles.values()) == [f"r = {row['pearson']:.2f}, n = 4" for row in report.correlations.values()]
    axes = drawn["Accuracy against the budget, for every attack"].axes
    assert [axis.get_title() for axis in axes] == [*ATTACKS, "worst of all"]
    for axis, number in zip(axes, (0, 1, None), strict=True):
        for line, report in zip(axis.lines, reports.values(), strict=True):
            values = report.sweep.worst if number is None else report.sweep.values["accuracy"][number]
            assert line.get_ydata().tolist() == [0.9, *values]


def test_robust_accuracy_has_its_intervals(reports):
    (axis,) = ComparisonReport({"a": reports["a"]}).plot().axes
    accuracies = [0.9, *reports["a"].sweep.worst]
    line, mark = axis.lines
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([0.0, *EPS], accuracies)
    assert mark.get_xdata() == [0.2, 0.2]
    assert axis.get_ylabel() == "robust accuracy"
    corners = axis.collections[0].get_paths()[0].vertices.tolist()
    shares = [reports["a"].sweep.robust_accuracy(eps) for eps in (0, *EPS)]
    for eps, share in zip([0.0, *EPS], shares, strict=True):
        found = sorted(value for place, value in corners if place == eps)
        assert [found[0], found[-1]] == pytest.approx([share.low, share.high])


def test_any_name_of_a_model_can_be_drawn():
    page = ComparisonReport({name: make_report(seed) for seed, name in enumerate(["_a", "res$net$", "x$y^"])}).to_html()
    assert page.count("<figcaption>") == 5 + 4
    assert ">res$net$</text>" in page


def compared(**options):
    worst = {"a": [0.6, 0.5, 0.3], "b": [0.8, 0.7, 0.2], "c": [0.9, 0.1, 0.0]}
    reports = {name: make_report(seed, sweep=make_sweep(seed, worst=worst[name])) for seed, name in enumerate(worst)}
    return ComparisonReport(reports, **options)


def test_models_are_sorted_by_robust_accuracy_at_a_budget():
    report = compared()
    assert report.rank_budget == 0.2
    assert report.robust_accuracy == {"a": 0.5, "b": 0.7, "c": 0.1}
    assert [row[0] for row in report.tables()[0].rows] == ["b", "a", "c"]
    first, second = "70.0 % robust accuracy (60-78 %, n = 100), 90.0 % clean", "50.0 % (40-60 %, n = 100)"
    assert report.verdict == f"b is the most robust of 3 models at 0.2: {first}; a is next with {second}."
    assert report.facts["models sorted by"] == "robust accuracy at 0.2, under the worst attack"
    note = report.tables()[0].note
    assert note.startswith("CMMR weighs metrics by how much they vary (entropy method), not by how much they matter: ")
    assert all(f" {weight:.2f}" in note for weight in report.weights.values())
    other = compared(rank_budget=0.1, missing=["d"])
    assert [row[0] for row in other.tables()[0].rows] == ["c", "b", "a"]
    assert other.tables()[0].header[1] == "robust at 0.1"
    assert other.verdict.endswith("; interrupted, without d.")
    assert ComparisonReport.from_dict(other.to_dict()).rank_budget == 0.1
    with pytest.raises(ValueError, match=r"`rank_budget`.* 0.1, 0.2, 0.3, .* 0.15"):
        compared(rank_budget=0.15)


def test_budgets_may_differ_by_rounding():
    reports = {"a": make_report(1), "b": make_report(2)}
    expected = ComparisonReport(reports)
    rounded = make_report(2, sweep=make_sweep(2, budgets=np.float32(EPS).astype(float).tolist()))
    report = ComparisonReport({"a": reports["a"], "b": rounded})
    assert str(report) == str(expected)
    assert report.to_html() == expected.to_html()
    assert (
        ComparisonReport({"b": rounded, "a": reports["a"]}, rank_budget=0.2).rank_budget
        == rounded.sweep.budgets[1]
        != 0.2
    )


def test_models_that_are_tied_are_marked():
    half = assist(None, 0, Rows(torch.arange(100), {}), torch.arange(100) % 2 == 0).to_plain()
    none = assist(None, 0, Rows(torch.arange(100), {}), torch.arange(100) < 0).to_plain()
    outcomes = {"a": half, "b": half, "c": none}
    reports = {name: make_report(sweep=make_sweep(outcomes=[own] * 3)) for name, own in outcomes.items()}
    table = ComparisonReport(reports).tables()[0]
    assert "" not in table.header
    assert {row[0]: row[table.header.index("tied")] for row in table.rows} == {"a": "", "b": "yes", "c": ""}
    assert "tied" not in compared().tables()[0].header
    columns = [dict(zip(table.header, row, strict=True)) for row in table.rows]
    assert len(columns[0]) == len(table.header)  # no two columns have one name
    difference = [columns[2][f"difference {end}"] for end in ("to the best", "from", "to")]
    assert columns[2]["model"] == "c"
    assert difference == ComparisonReport(reports).differences["c"]
    assert difference[0] == -0.5
