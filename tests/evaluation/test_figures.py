import math

import numpy as np
import pytest
import scipy.stats

from lightning_robustness.evaluation import ComparisonReport, figures
from lightning_robustness.evaluation.decision_space import DecisionSpace
from lightning_robustness.evaluation.verdict import Share
from lightning_robustness.measurement.threat_model import AttackFacts, ThreatModel
from tests.evaluation.reports import ATTACKS, EPS, make_full_report, make_report, make_sweep


def lines(axis):
    return {line.get_label(): np.asarray(line.get_ydata()).tolist() for line in axis.lines}


def test_attack_curves_start_at_clean_accuracy():
    sweep = make_sweep()
    (axis,) = figures.attack_curves(sweep).axes
    expected = dict(zip([*ATTACKS, "worst of all"], [*sweep.values["accuracy"], sweep.worst], strict=True))
    assert lines(axis) == {name: [0.9, *values] for name, values in expected.items()}
    assert axis.lines[0].get_xdata().tolist() == [0.0, *EPS]
    assert [text.get_text() for text in axis.get_legend().texts] == list(expected)


def test_model_curves_have_a_panel_for_every_attack():
    sweeps = {"a": make_sweep(1), "b": make_sweep(2)}
    axes = figures.model_curves(sweeps).axes
    assert [axis.get_title() for axis in axes] == [*ATTACKS, "worst of all"]
    assert lines(axes[1]) == {name: [0.9, *sweep.values["accuracy"][1]] for name, sweep in sweeps.items()}
    assert lines(axes[2]) == {name: [0.9, *sweep.worst] for name, sweep in sweeps.items()}


def test_boundary_curve_has_its_confidence_interval():
    curve = make_full_report().boundary
    (axis,) = figures.boundary_curve(curve).axes
    assert (axis.lines[0].get_xdata().tolist(), axis.lines[0].get_ydata().tolist()) == (curve.eps, curve.share)
    corners = axis.collections[0].get_paths()[0].vertices
    for ends in (curve.low, curve.high):
        assert {*zip(curve.eps, ends, strict=True)} <= {tuple(corner) for corner in corners.tolist()}
    assert axis.get_ylabel() == "robust accuracy to first order"
    assert "linf" in axis.get_xlabel()


def test_cmmr_curves():
    (axis,) = figures.cmmr_curves(EPS, {"a": [0.9, 0.5, 0.1], "b": [0.8, 0.6, 0.2]}).axes
    assert lines(axis) == {"a": [0.9, 0.5, 0.1], "b": [0.8, 0.6, 0.2]}
    assert "higher is more robust" in axis.get_ylabel()


def test_composite_map_has_one_scale_for_all_models():
    composite = {
        "a": {"fgsm": [0.9, 0.5, 0.3], "pgd": [0.8, 0.4, 0.2]},
        "b": {"fgsm": [0.7, 0.5, 0.1], "pgd": [0.6] * 3},
    }
    figure = figures.composite_map(EPS, composite)
    images = [axis.images[0] for axis in figure.axes if axis.images]
    assert len(images) == 2
    assert all(image.get_clim() == (0.1, 0.9) for image in images)
    np.testing.assert_allclose(images[1].get_array(), [[0.7, 0.5, 0.1], [0.6] * 3])
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == ["fgsm", "pgd"]


def test_rank_map_shows_every_rank():
    figure = figures.rank_map({"CMMR": {"a": 1, "b": 2}, "RDI": {"a": 2, "b": 1}}, ["a", "b"])
    (axis,) = figure.axes
    assert [(text.get_position(), text.get_text()) for text in axis.texts] == [
        ((0, 0), "1"),
        ((1, 0), "2"),
        ((0, 1), "2"),
        ((1, 1), "1"),
    ]


def test_scatter_fits_a_line():
    series = [figures.Series("RDI", [0.1, 0.2, 0.4], 1.0), figures.Series("Fisher", [1.0, 1.0, 1.0], math.nan)]
    first, second = figures.scatter(series, {"a": 0.3, "b": 0.5, "c": 0.9}).axes
    # The points are on the line y = 0.1 + 2 x
    assert first.lines[0].get_xdata().tolist() == [0.1, 0.4]
    assert first.lines[0].get_ydata().tolist() == pytest.approx([0.3, 0.9])
    assert [points.get_offsets().tolist() for points in first.collections] == [[[0.1, 0.3]], [[0.2, 0.5]], [[0.4, 0.9]]]
    assert first.get_title() == "r = 1.00, n = 3"
    assert len(second.lines) == 0
    assert second.get_xlabel() == "Fisher"


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 1.0])
def test_accuracies_have_intervals(accuracy):
    share = Share(accuracy, max(accuracy - 0.1, 0), min(accuracy + 0.2, 1), 50)
    (axis,) = figures.accuracies({"pgd": share, "cw": share}, unbounded={"cw": "l2 <= 0.2"}, budget="8/255").axes
    assert axis.lines[0].get_xdata().tolist() == [share.low, share.high]
    assert axis.lines[1].get_xdata().tolist() == [accuracy]
    assert axis.texts[0].get_text() == f"{100 * accuracy:.1f} %"
    assert [tick.get_text() for tick in axis.get_yticklabels()] == ["pgd", "cw, l2 <= 0.2"]
    assert axis.get_xlabel() == "accuracy, attacks at 8/255, 95 % intervals"


def test_worst_curves_have_wilson_intervals():
    sweep = make_sweep()
    (axis,) = figures.worst_curves({"a": sweep}, budget=0.2).axes
    line, mark = axis.lines
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([0.0, *EPS], [0.9, *sweep.worst])
    assert mark.get_xdata() == [0.2, 0.2]
    corners = axis.collections[0].get_paths()[0].vertices.tolist()
    for eps, accuracy in zip([0.0, *EPS], [0.9, *sweep.worst], strict=True):
        interval = scipy.stats.binomtest(round(100 * accuracy), 100).proportion_ci(method="wilson")
        found = sorted(value for place, value in corners if place == eps)
        # The made-up accuracies are not multiples of a hundredth
        assert [found[0], found[-1]] == pytest.approx([interval.low, interval.high], abs=6e-3)


def test_budgets_of_images_are_fractions_of_255():
    threat = ThreatModel({"pgd": AttackFacts({"linf": 2 / 255}, "10 steps")}, 100, is_image=True)
    sweep = make_sweep(eps=[2 / 255, 4 / 255, 8 / 255], threat_model=threat)
    figure = figures.attack_curves(sweep)
    figure.canvas.draw()
    (axis,) = figure.axes
    assert {"0", "2/255", "8/255"} <= {tick.get_text() for tick in axis.get_xticklabels()}
    assert axis.get_xlabel() == "perturbation budget (pixels from 0 to 1, linf)"


@pytest.mark.parametrize("columns", [1, 3])
def test_panels_are_arranged_in_columns(columns):
    sweeps = {"a": make_sweep(1), "b": make_sweep(2)}
    for figure in (
        figures.model_curves(sweeps, columns),
        figures.scatter([figures.Series(name, [0.1, 0.2], 1.0) for name in "abc"], {"a": 0.3, "b": 0.5}, columns),
    ):
        assert figure.axes[0].get_gridspec().ncols == columns
        assert len(figure.axes) == 3


def test_decision_space_has_a_cloud_for_every_class():
    points = [[float(number), 0.0] for number in range(24)]
    space = DecisionSpace("PCA", "pgd", [number % 12 for number in range(24)], points, points[::-1])
    clean, adversarial = space.plot().axes
    assert [cloud.get_label() for cloud in clean.collections] == [str(label) for label in range(12)]
    assert clean.collections[3].get_offsets().tolist() == [[3.0, 0.0], [15.0, 0.0]]
    assert adversarial.collections[3].get_offsets().tolist() == [[20.0, 0.0], [8.0, 0.0]]
    assert adversarial.get_title() == "under pgd"
    # Colours repeat from the eleventh class on, but not together with markers
    looks = {(tuple(c.get_facecolor()[0]), len(c.get_paths()[0].vertices)) for c in clean.collections}
    assert len(looks) == 12


def test_colors_and_markers_tell_lines_apart():
    (axis,) = figures.cmmr_curves(EPS, {str(number): [number] * 3 for number in range(20)}).axes
    assert len({(line.get_color(), line.get_marker()) for line in axis.lines}) == 20


def test_comparison_draws_every_kind():
    report = ComparisonReport({name: make_report(seed) for seed, name in enumerate("abc")})
    drawn = report.figures()
    assert len(drawn) == 5
    assert next(iter(drawn)) == "Robust accuracy under the worst of all attacks"
    assert report.plot().axes[0].get_ylabel() == "robust accuracy"
    assert drawn["CMMR against the budget"].axes[0].get_ylabel() == "CMMR (higher is more robust)"
    axes = report.plot_correlations().axes
    assert [axis.get_title() for axis in axes] == [
        f"r = {r['pearson']:.2f}, n = 3" for r in report.correlations.values()
    ]
    assert [axis.get_xlabel() for axis in axes] == [
        "RDI (higher is more robust)",
        "ROBY (lower is more robust)",
        "Fisher information (lower is more robust)",
        "Lipschitz constant (lower is more robust)",
    ]


def test_names_are_drawn_as_they_are():
    names = ["_a", "res$net$", "x$y^"]
    curves = figures.cmmr_curves(EPS, {name: [0.9, 0.5, 0.1] for name in names})
    assert [text.get_text() for text in curves.axes[0].get_legend().texts] == [" _a", "res\\$net\\$", "x\\$y^"]
    page = ComparisonReport({name: make_report(seed) for seed, name in enumerate(names)}).to_html()
    assert page.count("<figcaption>") == 5 + 4
    assert ">res$net$</text>" in page
