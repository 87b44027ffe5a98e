import math

import numpy as np
import pytest
import torch

from lightning_robustness._display import report_figures as figures
from lightning_robustness._measurement.assisted import BoundaryCurve, assist
from lightning_robustness._measurement.rows import Rows

EPS = [0.1, 0.2, 0.3]


def corners(axis):
    return {tuple(corner) for corner in axis.collections[0].get_paths()[0].vertices.tolist()}


def curve_up_to(largest):
    sample = Rows(torch.arange(20), {})
    distances = torch.linspace(-0.1, largest, 20)
    return BoundaryCurve.of(distances, "l2", 0.1, lambda robust: assist(None, 0, sample, robust))


def test_lines_become_darker_from_one_curve_to_the_next():
    drawn = {f"epoch {n}": curve_up_to(0.3 + 0.1 * n) for n in (0, 2, 4)}
    (axis,) = figures.boundary_figure(drawn).axes
    *shares, budget = axis.lines
    assert [line.get_ydata().tolist() for line in shares] == [curve.share for curve in drawn.values()]
    assert [line.get_xdata()[-1] for line in shares] == pytest.approx([0.4] * 3)
    opacities = [line.get_alpha() for line in shares]
    assert opacities == sorted(opacities)
    assert opacities[-1] == 1
    assert budget.get_xdata() == pytest.approx([0.1, 0.1])
    assert [text.get_text() for text in axis.get_legend().texts] == ["epoch 0", "epoch 4"]
    assert axis.get_xlabel() == "perturbation budget (units of the input, l2)"
    assert axis.get_ylabel() == "robust accuracy to first order"


def test_the_last_boundary_curve_has_its_confidence_interval():
    last = curve_up_to(0.3)
    (axis,) = figures.boundary_figure({"a": last._replace(low=last.share, high=last.share), "b": last}).axes
    assert len(axis.collections) == 1
    assert corners(axis) >= {*zip(last.eps, last.low, strict=True), *zip(last.eps, last.high, strict=True)}
    (alone,) = figures.boundary_figure({"": last}).axes
    assert alone.get_legend() is None


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


def test_scatter_fits_a_line():
    series = {"RDI": ({"a": 0.1, "b": 0.2, "c": 0.4}, 1.0), "Fisher": (dict.fromkeys("abc", 1.0), math.nan)}
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
    share = accuracy, max(accuracy - 0.1, 0), min(accuracy + 0.2, 1)
    (axis,) = figures.accuracies({"pgd": share, "cw": share}, unbounded={"cw": "l2 <= 0.2"}, budget="8/255").axes
    assert axis.lines[0].get_xdata().tolist() == list(share[1:])
    assert axis.lines[1].get_xdata().tolist() == [accuracy]
    assert axis.texts[0].get_text() == f"{100 * accuracy:.1f} %"
    assert [tick.get_text() for tick in axis.get_yticklabels()] == ["pgd", "cw, l2 <= 0.2"]
    assert axis.get_xlabel() == "accuracy, attacks at 8/255, 95 % intervals"


def test_budgets_of_images_are_fractions_of_255():
    figure = figures.curves([0.0, 2 / 255, 8 / 255], {"a": [0.9, 0.5, 0.1]}, "", figures.Scale(True, "linf"))
    figure.canvas.draw()
    (axis,) = figure.axes
    assert {"0", "2/255", "8/255"} <= {tick.get_text() for tick in axis.get_xticklabels()}
    assert axis.get_xlabel() == "perturbation budget (pixels from 0 to 1, linf)"


def test_decision_space_has_a_cloud_for_every_class():
    points = [[float(number), 0.0] for number in range(24)]
    labels = [number % 12 for number in range(24)]
    clean, adversarial = figures.clouds({"clean": points, "under pgd": points[::-1]}, labels, "PCA").axes
    assert [cloud.get_label() for cloud in clean.collections] == [str(label) for label in range(12)]
    assert clean.collections[3].get_offsets().tolist() == [[3.0, 0.0], [15.0, 0.0]]
    assert adversarial.collections[3].get_offsets().tolist() == [[20.0, 0.0], [8.0, 0.0]]
    assert adversarial.get_title() == "under pgd"
    looks = {(tuple(c.get_facecolor()[0]), len(c.get_paths()[0].vertices)) for c in clean.collections}
    assert len(looks) == 12  # colours repeat from the eleventh class on, but not together with markers
