import io

import numpy as np
import pytest
import scipy.stats
from matplotlib.colors import to_hex
from PIL import Image

from lightning_robustness._display.drawing import render
from lightning_robustness._display.run_figures import history_figure
from lightning_robustness._measurement.verdict import kept_epoch

OKABE_ITO = {"#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"}
HISTORY = (
    {"epoch": 0, "step": 10, "acc": 0.5, "rdi": 0.1, "roby": 0.6, "fim": 100.0, "adv_acc/worst": 0.05}
    | {"adv_acc/square": 0.2, "adv_acc/pgd": 0.1, "adv_acc/cw": 0.0, "boundary_acc": 0.15},
    {"epoch": 1, "step": 20, "acc": 0.7, "rdi": 0.2, "roby": float("nan"), "fim": 10.0, "skipped": 0.0},
    {"epoch": 2, "step": 30, "skipped": 1.0},
    {"epoch": 3, "step": 40, "acc": 0.9, "rdi": 0.4, "roby": 0.3, "fim": 1.0, "adv_acc/pgd": 0.3}
    | {"adv_acc/worst": 0.25},
)


def title(figure):
    return figure.texts[0].get_text().replace("\n", " ")


def curves(axis):
    lines = {line.get_label(): [*zip(*line.get_data(), strict=True)] for line in axis.lines}
    return {label: points for label, points in lines.items() if not label.startswith("_")}


def test_points_that_are_there_are_joined_and_named():
    figure = history_figure(HISTORY, "test_robustness")
    assert title(figure) == "test_robustness: epoch 3 most robust, 25.0 % under all attacks"
    accuracy, rdi, roby, fisher = figure.axes
    assert curves(accuracy) == {
        "clean": [(0, 0.5), (1, 0.7), (3, 0.9)],
        "first order": [(0, 0.15)],
        "square": [(0, 0.2)],
        "pgd": [(0, 0.1), (3, 0.3)],
        "cw": [(0, 0.0)],
        "worst": [(0, 0.05), (3, 0.25)],
    }
    assert [line.get_linestyle() for line in accuracy.lines[:6]] == ["-", ":", "-", "-", "-", "--"]
    assert curves(rdi) == {"RDI": [(0, 0.1), (1, 0.2), (3, 0.4)]}
    assert curves(roby) == {"ROBY": [(0, 0.6), (3, 0.3)]}
    assert curves(fisher) == {"Fisher information": [(0, 100.0), (1, 10.0), (3, 1.0)]}
    names = [axis.texts[0].get_text() for axis in (rdi, roby, fisher)]
    assert names == ["RDI \u2191", "ROBY \u2193", "Fisher information \u2193"]
    legend = [text.get_text() for text in accuracy.get_legend().get_texts()]
    assert legend == ["clean", "first order", "square", "pgd", "cw", "worst"]


RISING = [
    {"epoch": epoch, "step": 10 * epoch, "acc": acc, "adv_acc/pgd": robust, "samples": 500, "samples_attacks": 200}
    for epoch, (acc, robust) in enumerate([(0.7, 0.595), (0.9, 0.3), (0.71, 0.6), (0.91, 0.2)])
]


def test_the_most_robust_epoch_is_marked():
    figure = history_figure(RISING, "robustness")
    assert title(figure) == "robustness: epoch 2 most robust, 60.0 % under pgd"
    for axis in figure.axes:
        (marker,) = [line for line in axis.lines if line.get_label().startswith("_")]
        assert marker.get_xdata() == [2, 2]


def test_bands_are_confidence_intervals():
    bands = history_figure(RISING, "").axes[0].collections
    for band, key, number in zip(bands, ("acc", "adv_acc/pgd"), (500, 200), strict=True):
        vertices = band.get_paths()[0].vertices
        for entry in RISING:
            successes = round(entry[key] * number)
            expected = scipy.stats.binomtest(successes, number).proportion_ci(method="wilson")
            drawn = vertices[vertices[:, 0] == entry["epoch"], 1]
            assert (drawn.min(), drawn.max()) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_the_picture_is_legible_in_a_card_of_350_pixels():
    worst = [entry | {"adv_acc/worst": 0.1, "adv_acc/square": 0.2, "boundary_acc": 0.5} for entry in RISING]
    kept = kept_epoch([entry | {"rdi": 0.5} for entry in RISING] + [{"epoch": 4, "step": 40}], None, ("rdi", 40))
    figure = history_figure(worst, "test_robustness", kept=kept)
    render(figure)
    scale = 350 / figure.get_size_inches()[0] / 72  # pixels per point
    texts = [*figure.texts, *figure.axes[0].get_legend().get_texts(), *(t for axis in figure.axes for t in axis.texts)]
    ticks = [text for axis in figure.axes for text in (*axis.get_xticklabels(), *axis.get_yticklabels())]
    assert min(text.get_fontsize() for text in (*texts, *ticks)) * scale >= 12
    for text in texts:  # nothing is cut off
        box = text.get_window_extent()
        assert box.x0 >= 0, text
        assert box.x1 <= figure.bbox.width, text
        assert box.y1 <= figure.bbox.height, text


def test_lines_can_be_told_apart():
    names = [f"attack{index}" for index in range(7)]
    history = [{"epoch": 0, "step": 0, "acc": 1.0, **{f"adv_acc/{name}": 0.5 for name in [*names, "worst"]}}]
    lines = [line for line in history_figure(history, "").axes[0].lines if not line.get_label().startswith("_")]
    colors = [to_hex(line.get_color()).upper() for line in lines]
    assert set(colors) <= OKABE_ITO - {"#F0E442"}
    assert len({(color, line.get_marker()) for color, line in zip(colors, lines, strict=True)}) == 9
    assert [line.get_linestyle() for line in lines] == ["-"] * 8 + ["--"]


@pytest.mark.parametrize(
    ("values", "scale"), [([101.0, 1.0], "log"), ([99.0, 1.0], "linear"), ([0.0, 9.0], "linear"), ([], "linear")]
)
def test_scale_of_the_fisher_information(values, scale):
    history = [{"epoch": epoch, "step": epoch, "fim": value} for epoch, value in enumerate(values)]
    assert history_figure(history, "").axes[3].get_yscale() == scale


def test_several_evaluations_of_an_epoch_are_shown_by_step():
    history = [{"epoch": index // 2, "step": 5 * index, "acc": 0.1 * index, "adv_acc/pgd": 0.5} for index in range(4)]
    figure = history_figure(history, "robustness")
    assert figure.axes[0].lines[0].get_xdata().tolist() == [0, 5, 10, 15]
    assert figure.axes[0].get_xlabel() == "step"
    assert title(figure) == "robustness: step 15 most robust, 50.0 % under pgd"
    # An attack at the end of an epoch is none
    history = [{"epoch": 0, "step": 5, "acc": 0.5}, {"epoch": 0, "step": 5, "adv_acc/pgd": 0.25}]
    accuracy = history_figure(history, "robustness").axes[0]
    assert curves(accuracy) == {"clean": [(0, 0.5)], "pgd": [(0, 0.25)]}
    assert accuracy.get_xlabel() == "epoch"


def test_nothing_measured():
    for axis in history_figure([], "robustness").axes:
        assert axis.texts[-1].get_text() == "not measured"
    unattacked = history_figure([{"epoch": 0, "step": 0, "acc": 0.5}], "robustness")
    assert title(unattacked) == "robustness: no attack ran"
    assert [len(axis.lines) for axis in unattacked.axes] == [1, 0, 0, 0]  # nothing is marked


@pytest.mark.parametrize("length", [1, 3, 40])
def test_epochs_are_whole(length):
    figure = history_figure([{"epoch": epoch, "step": epoch, "fim": 0.5} for epoch in range(length)], "")
    render(figure)
    ticks = figure.axes[3].get_xticks()
    assert len(ticks)
    assert (ticks == np.round(ticks)).all()


def test_a_figure_that_is_drawn_anew_is_like_a_new_one():
    figure = None
    for length in range(1, 5):
        figure = history_figure(RISING[:length], "robustness", figure)
        np.testing.assert_array_equal(render(figure), render(history_figure(RISING[:length], "robustness")))


def test_rendered_picture_is_that_of_a_file():
    figure = history_figure(HISTORY, "robustness")
    picture = render(figure)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=figure.dpi)
    np.testing.assert_array_equal(picture, np.asarray(Image.open(file).convert("RGB")))
    assert picture.dtype == np.uint8
