import io
import random
import sys

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lightning_robustness.callbacks.figures import (
    as_images,
    boundary_figure,
    history_figure,
    perturbation_figure,
    render,
)
from lightning_robustness.measurement.attack_meter import Examples
from lightning_robustness.measurement.boundary_curve import BoundaryCurve
from lightning_robustness.utilities.input_space import InputSpace

OKABE_ITO = {"#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"}
SPACE = InputSpace(mean=0.5, std=0.25)


def examples(x, x_adv, space=SPACE):
    y = torch.arange(len(x))
    return Examples(space.normalize(x), space.normalize(x_adv), y, y, y + 1)


def shown(axis):
    """Pictures of a row, from left to right."""
    assert [image.get_extent()[0] for image in axis.images] == list(range(len(axis.images)))
    return np.stack([np.asarray(image.get_array()) for image in axis.images])


@given(st.floats(-2, 2), st.floats(0.1, 4), st.sampled_from([1, 3]), st.floats(-3, 1), st.floats(0.5, 5))
def test_undoes_normalisation_and_range(mean, std, channels, low, width):
    expected = np.random.default_rng(0).random((2, channels, 3, 5))
    x = (low + width * expected - mean) / std
    space = InputSpace(low, low + width, mean, std)
    np.testing.assert_allclose(as_images(torch.tensor(x), space).numpy(), expected, atol=1e-5)


def test_without_bounds_the_values_span_the_range():
    x = torch.tensor([-3.0, 1.0, 5.0]).reshape(3, 1, 1, 1)
    assert as_images(x, InputSpace(None, None)).flatten().tolist() == [0.0, 0.5, 1.0]
    assert as_images(x, InputSpace(-3.0, None, 1.0, 2.0)).flatten().tolist() == pytest.approx([0, 6 / 14, 1])


def test_values_outside_are_clipped_and_constant_ones_stay_finite():
    assert as_images(torch.tensor([-0.1, 1.2]).reshape(2, 1, 1, 1), InputSpace()).flatten().tolist() == [0.0, 1.0]
    assert as_images(torch.full((1, 1, 2, 2), 7.0), InputSpace(None, None)).unique().tolist() == [0.0]


def test_half_precision():
    images = as_images(torch.full((1, 3, 2, 2), 0.5, dtype=torch.bfloat16), InputSpace())
    assert images.dtype == torch.float32
    assert images.unique().tolist() == [0.5]


@pytest.mark.parametrize("shape", [(2, 8), (2, 1, 8), (2, 2, 8, 8), (2, 3, 4, 8, 8), (0, 1, 8, 8)])
def test_others_are_no_images(shape):
    assert as_images(torch.zeros(shape), InputSpace()) is None


def test_images_of_one_channel(digits):
    x = digits[0][:4]
    x_adv = (x + 0.1 * torch.where(torch.rand_like(x) < 0.5, -1.0, 1.0)).clamp(0, 1)
    figure = perturbation_figure(examples(x, x_adv), SPACE, "pgd, step 7")
    clean, perturbation, adversarial = figure.axes
    assert figure.get_suptitle() == "pgd, step 7"
    np.testing.assert_allclose(shown(clean), x.squeeze(1), atol=1e-6)
    np.testing.assert_allclose(shown(perturbation), 5 * (x_adv - x).squeeze(1), atol=1e-5)
    np.testing.assert_allclose(shown(adversarial), x_adv.squeeze(1), atol=1e-6)
    assert [axis.get_ylabel() for axis in figure.axes] == ["clean", "perturbation,\n5 times", "adversarial"]
    for axis, limits, colors in zip(
        figure.axes, [(0, 1), (-0.5, 0.5), (0, 1)], ["gray", "RdBu_r", "gray"], strict=True
    ):
        assert [image.get_clim() for image in axis.images] == [limits] * 4
        assert [image.get_cmap().name for image in axis.images] == [colors] * 4


def test_colour_images_have_grey_for_nothing():
    x = torch.full((2, 3, 4, 4), 0.5)
    x_adv = x.clone()
    x_adv[1, 0, 0, 0] += 8 / 255
    x_adv[1, 2, 0, 0] -= 4 / 255
    perturbation = perturbation_figure(examples(x, x_adv), SPACE, "").axes[1]
    expected = np.full((2, 4, 4, 3), 0.5)
    expected[1, 0, 0] = 0.5 + 15 * 8 / 255, 0.5, 0.5 - 15 * 4 / 255
    np.testing.assert_allclose(shown(perturbation), expected, atol=1e-5)
    assert perturbation.get_ylabel() == "perturbation,\n15 times"


@pytest.mark.parametrize(("eps", "factor"), [(8 / 255, 15), (0.5 / 255, 255), (0.1, 5), (0.3, 1), (1.0, 1), (0.0, 1)])
def test_factor(eps, factor):
    x = torch.zeros(1, 1, 2, 2)
    figure = perturbation_figure(examples(x, x + eps), SPACE, "")
    assert figure.axes[1].get_ylabel() == f"perturbation,\n{factor} times"


def test_factor_refers_to_what_is_shown():
    x, space = torch.zeros(1, 1, 2, 2), InputSpace(high=255)
    figure = perturbation_figure(examples(x, x + 8, space), space, "")
    assert figure.axes[1].get_ylabel() == "perturbation,\n15 times"


def test_clean_and_adversarial_images_without_bounds_share_a_scale():
    x, space = torch.tensor([0.0, 2.0]).reshape(1, 1, 1, 2), InputSpace(None, None)
    clean, _, adversarial = perturbation_figure(examples(x, x + 2, space), space, "").axes
    assert shown(clean).flatten().tolist() == [0.0, 0.5]
    assert shown(adversarial).flatten().tolist() == [0.5, 1.0]


@pytest.mark.parametrize(("height", "width"), [(4, 8), (8, 4)])
def test_images_keep_their_proportions(height, width):
    x = torch.zeros(3, 1, height, width)
    for axis in perturbation_figure(examples(x, x + 0.1), SPACE, "").axes:
        for image in axis.images:
            left, right, bottom, top = image.get_extent()
            assert (top - bottom) / (right - left) == pytest.approx(height / width)
            assert axis.get_xlim()[0] <= left < right <= axis.get_xlim()[1]
            assert axis.get_ylim()[0] <= bottom < top <= axis.get_ylim()[1]
        assert axis.get_aspect() == 1


@pytest.mark.parametrize("shape", [(2, 1, 4, 4), (2, 9)])
def test_labels(shape):
    x = torch.zeros(shape)
    labels = torch.tensor([3, 3]), torch.tensor([3, 5]), torch.tensor([8, 9])
    clean = perturbation_figure(Examples(x, x + 0.1, *labels), InputSpace(), "").axes[0]
    expected = ["label 3\n-> predicted 8", "label 3, predicted 5\n-> predicted 9"]
    assert [label.get_text() for label in clean.get_xticklabels()] == expected
    assert [int(position) for position in clean.get_xticks()] == [0, 1]


def test_at_most_eight_samples(digits):
    clean = perturbation_figure(examples(digits[0][:20], digits[0][:20]), SPACE, "").axes[0]
    np.testing.assert_allclose(shown(clean), digits[0][:8].squeeze(1), atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "lines"), [((2, 5), (1, 5)), ((2, 1, 50), (1, 50)), ((2, 2, 50), (2, 50)), ((2, 4, 3, 3), (4, 9))]
)
def test_other_inputs_are_lines_in_their_own_units(shape, lines):
    x, space = torch.randn(shape), InputSpace(None, None, mean=1.0, std=2.0)
    x_adv = x + 0.1 * torch.randn(shape)
    figure = perturbation_figure(examples(x, x_adv, space), space, "")
    for axis, values in zip(figure.axes, (x, x_adv - x, x_adv), strict=True):
        drawn = np.stack([line.get_ydata() for line in axis.lines])
        np.testing.assert_allclose(drawn, values.reshape(-1, lines[1]), atol=1e-5)
        columns = [sorted({int(position) for position in line.get_xdata()}) for line in axis.lines]
        assert columns == [[0]] * lines[0] + [[1]] * lines[0]
    assert [axis.get_ylabel() for axis in figure.axes] == ["clean", "perturbation", "adversarial"]


def test_matrices_without_a_channel_are_images():
    x = torch.rand(2, 20, 30)
    space = InputSpace(mean=np.linspace(0, 1, 20).tolist(), std=[0.5] * 20)
    clean = perturbation_figure(examples(x, x, space), space, "").axes[0]
    np.testing.assert_allclose(shown(clean), x, atol=1e-6)


HISTORY = (
    {"epoch": 0, "step": 10, "acc": 0.5, "rdi": 0.1, "roby": 0.6, "fim": 100.0, "adv_acc/worst": 0.0}
    | {"adv_acc/square": 0.2, "adv_acc/pgd": 0.1},
    {"epoch": 1, "step": 20, "acc": 0.7, "rdi": 0.2, "roby": float("nan"), "fim": 10.0, "skipped": 0.0},
    {"epoch": 2, "step": 30, "skipped": 1.0},
    {"epoch": 3, "step": 40, "acc": 0.9, "rdi": 0.4, "roby": 0.3, "fim": 1.0, "adv_acc/pgd": 0.3}
    | {"adv_acc/worst": 0.25},
)


def curves(axis):
    return {line.get_label(): [*zip(*line.get_data(), strict=True)] for line in axis.lines}


def test_points_that_are_there_are_joined():
    accuracy, features, fisher = history_figure(HISTORY, "robustness").axes
    assert curves(accuracy) == {
        "clean": [(0, 0.5), (1, 0.7), (3, 0.9)],
        "square": [(0, 0.2)],
        "pgd": [(0, 0.1), (3, 0.3)],
        "worst": [(0, 0.0), (3, 0.25)],
    }
    assert curves(features) == {"RDI": [(0, 0.1), (1, 0.2), (3, 0.4)], "ROBY": [(0, 0.6), (3, 0.3)]}
    assert curves(fisher) == {"mean": [(0, 100.0), (1, 10.0), (3, 1.0)]}


def test_an_attack_that_goes_beyond_the_budget_of_the_worst_case_is_left_out():
    history = [
        {"epoch": 0, "step": 9, "acc": 0.9, "adv_acc/pgd": 0.5, "adv_acc/cw": 0.0, "adv_acc/worst": 0.4},
        {"epoch": 1, "step": 19, "acc": 0.9, "adv_acc/pgd": 0.6, "adv_acc/cw": 0.6, "adv_acc/worst": 0.6},
    ]
    accuracy = history_figure(history, "robustness").axes[0]
    assert [line.get_label() for line in accuracy.lines] == ["clean", "pgd", "worst"]


def test_titles_labels_and_legends():
    figure = history_figure(HISTORY, "test_robustness")
    assert figure.get_suptitle() == "test_robustness, epoch by epoch"
    assert [axis.get_title() for axis in figure.axes] == [
        "clean and adversarial accuracy\nhigher is more robust",
        "RDI and ROBY\nRDI: higher is more robust, ROBY: lower",
        "Fisher information\nlower is more robust",
    ]
    assert [axis.get_xlabel() for axis in figure.axes] == ["epoch"] * 3
    legends = [[text.get_text() for text in axis.get_legend().get_texts()] for axis in figure.axes]
    assert legends == [["clean", "square", "pgd", "worst"], ["RDI", "ROBY"], ["mean"]]


def test_lines_can_be_told_apart():
    names = [f"attack{index}" for index in range(8)]
    history = [{"epoch": 0, "step": 0, "acc": 1.0, **{f"adv_acc/{name}": 0.5 for name in [*names, "worst"]}}]
    lines = history_figure(history, "").axes[0].lines
    colors = [plt.matplotlib.colors.to_hex(line.get_color()).upper() for line in lines]
    assert set(colors) <= OKABE_ITO - {"#F0E442"}
    assert len({(color, line.get_marker()) for color, line in zip(colors, lines, strict=True)}) == 10
    assert [line.get_linestyle() for line in lines] == ["-"] * 9 + ["--"]


@pytest.mark.parametrize(
    ("values", "scale"), [([101.0, 1.0], "log"), ([99.0, 1.0], "linear"), ([0.0, 9.0], "linear"), ([], "linear")]
)
def test_scale_of_the_fisher_information(values, scale):
    history = [{"epoch": epoch, "step": epoch, "fim": value} for epoch, value in enumerate(values)]
    assert history_figure(history, "").axes[2].get_yscale() == scale


def test_several_evaluations_of_an_epoch():
    history = [{"epoch": index // 2, "step": 5 * index, "acc": 0.1 * index} for index in range(4)]
    figure = history_figure(history, "robustness")
    assert figure.axes[0].lines[0].get_xdata().tolist() == [0, 5, 10, 15]
    assert figure.axes[0].get_xlabel() == "step"
    assert figure.get_suptitle() == "robustness, step by step"


def test_an_attack_at_the_end_keeps_the_epochs():
    history = [{"epoch": 0, "step": 5, "acc": 0.5}, {"epoch": 0, "step": 5, "adv_acc/pgd": 0.25}]
    accuracy = history_figure(history, "robustness").axes[0]
    assert curves(accuracy) == {"clean": [(0, 0.5)], "pgd": [(0, 0.25)]}
    assert accuracy.get_xlabel() == "epoch"


def test_nothing_measured():
    for axis in history_figure([], "robustness").axes:
        assert [text.get_text() for text in axis.texts] == ["not measured"]


@pytest.mark.parametrize("length", [1, 3, 40])
def test_epochs_are_whole(length):
    figure = history_figure([{"epoch": epoch, "step": epoch, "rdi": 0.5} for epoch in range(length)], "")
    render(figure)
    ticks = figure.axes[1].get_xticks()
    assert (ticks == np.round(ticks)).all()


def test_rendered_picture_is_that_of_a_file():
    # one figure each: drawing a figure again moves its axes a little
    figure, other = (history_figure(HISTORY, "robustness") for _ in range(2))
    picture = render(figure)
    file = io.BytesIO()
    other.savefig(file, format="png", dpi=figure.dpi)
    np.testing.assert_array_equal(picture, np.asarray(Image.open(file).convert("RGB")))
    assert picture.dtype == np.uint8


def test_global_state_is_left_alone(digits):
    plt.close("all")
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    settings = dict(plt.rcParams)
    render(perturbation_figure(examples(digits[0][:2], digits[0][2:4]), SPACE, ""))
    render(history_figure(HISTORY, ""))
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert plt.get_fignums() == []
    assert dict(plt.rcParams) == settings


@pytest.mark.parametrize("module", ["matplotlib.figure", "matplotlib.backends.backend_agg"])
def test_without_matplotlib(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=r'Expected matplotlib.*pip install "lightning-robustness\[plot\]"'):
        history_figure([], "robustness")
    x = torch.zeros(1, 1, 4, 4)
    with pytest.raises(ModuleNotFoundError, match="Expected matplotlib"):
        perturbation_figure(examples(x, x), SPACE, "")


def test_lines_of_epochs_become_darker():
    curves = {epoch: BoundaryCurve.of(torch.linspace(-0.1, 0.3 + 0.1 * epoch, 20), "l2", 0.1) for epoch in (4, 0, 2)}
    (axis,) = boundary_figure(curves).axes
    assert [line.get_ydata().tolist() for line in axis.lines] == [curves[epoch].share for epoch in (0, 2, 4)]
    assert [line.get_xdata()[-1] for line in axis.lines] == pytest.approx([0.4] * 3)
    opacities = [line.get_alpha() for line in axis.lines]
    assert opacities == sorted(opacities)
    assert opacities[-1] == 1
    assert [text.get_text() for text in axis.get_legend().texts] == ["epoch 0", "epoch 4"]
    assert "l2" in axis.get_xlabel()
    assert axis.get_ylabel() == "robust accuracy to first order (higher is more robust)"
