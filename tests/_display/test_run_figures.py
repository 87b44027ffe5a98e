import random

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_robustness._display.drawing import render
from lightning_robustness._display.pictures import as_images
from lightning_robustness._display.run_figures import class_figure, history_figure, perturbation_figure
from lightning_robustness._measurement.meters.attack import Examples
from lightning_robustness.input_space import InputSpace

SPACE = InputSpace(mean=0.5, std=0.25)


def examples(x, x_adv, space=SPACE):
    y = torch.arange(len(x))
    return Examples(space.normalize(x), space.normalize(x_adv), y, y, y + 1)


def tiles(figure, number, height, width):
    """Rows of images, cut out of the one that is drawn: clean, changes, adversarial."""
    mosaic = np.asarray(figure.axes[0].images[0].get_array())
    gap = (mosaic.shape[0] - 3 * height) // 2
    assert mosaic.shape == (3 * height + 2 * gap, number * width + (number - 1) * gap, 4)
    mosaic = mosaic[..., :3]
    tops, lefts = ([step * (side + gap) for step in range(count)] for side, count in ((height, 3), (width, number)))
    return [np.stack([mosaic[top : top + height, left : left + width] for left in lefts]) for top in tops]


def row_labels(figure):
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def title(figure):
    return figure.texts[0].get_text()


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
    # Values outside of bounds are clipped, and constant ones stay finite
    assert as_images(torch.tensor([-0.1, 1.2]).reshape(2, 1, 1, 1), InputSpace()).flatten().tolist() == [0.0, 1.0]
    constant = as_images(torch.full((1, 1, 2, 2), 7.0, dtype=torch.bfloat16), InputSpace(None, None))
    assert (constant.dtype, constant.unique().tolist()) == (torch.float32, [0.0])


@pytest.mark.parametrize("shape", [(2, 8), (2, 1, 8), (2, 2, 8, 8), (2, 3, 4, 8, 8), (0, 1, 8, 8)])
def test_other_shapes_are_not_images(shape):
    assert as_images(torch.zeros(shape), InputSpace()) is None


def test_first_four_images_of_one_channel(digits):
    x = digits[0][:20]
    x_adv = (x + 0.1 * torch.where(torch.rand_like(x) < 0.5, -1.0, 1.0)).clamp(0, 1)
    figure = perturbation_figure(examples(x, x_adv), SPACE, "pgd, epoch 7")
    x, x_adv = x[:4], x_adv[:4]
    clean, change, adversarial = tiles(figure, 4, 8, 8)
    assert title(figure) == "pgd, epoch 7"
    size = 10 * (x_adv - x).permute(0, 2, 3, 1).numpy()  # the factor is 5, and the scale ends at a half
    red, white, blue = np.array([178, 24, 43]) / 255, np.ones(3), np.array([33, 102, 172]) / 255
    colors = white + np.where(size > 0, size * (red - white), -size * (blue - white))
    for drawn, expected in ((clean, grey(x)), (change, colors), (adversarial, grey(x_adv))):
        np.testing.assert_allclose(drawn, expected, atol=1e-5)
    assert row_labels(figure) == ["clean", "change \u00d75", "adversarial"]


def grey(x):
    return np.repeat(x.permute(0, 2, 3, 1).numpy(), 3, axis=3)


def test_colour_images_have_grey_for_nothing():
    x = torch.full((2, 3, 4, 4), 0.5)
    x_adv = x.clone()
    x_adv[1, 0, 0, 0] += 8 / 255
    x_adv[1, 2, 0, 0] -= 4 / 255
    figure = perturbation_figure(examples(x, x_adv), SPACE, "")
    expected = np.full((2, 4, 4, 3), 0.5)
    expected[1, 0, 0] = 0.5 + 15 * 8 / 255, 0.5, 0.5 - 15 * 4 / 255
    np.testing.assert_allclose(tiles(figure, 2, 4, 4)[1], expected, atol=1e-5)
    assert row_labels(figure)[1] == "change \u00d715"


@pytest.mark.parametrize(("eps", "factor"), [(8 / 255, 15), (0.5 / 255, 255), (0.1, 5), (0.3, 1), (1.0, 1), (0.0, 1)])
@pytest.mark.parametrize("space", [SPACE, InputSpace(high=255)])
def test_factor_refers_to_what_is_shown(eps, factor, space):
    x = torch.zeros(1, 1, 2, 2)
    figure = perturbation_figure(examples(x, x + eps * space.high, space), space, "")
    assert row_labels(figure)[1] == f"change \u00d7{factor}"


def test_clean_and_adversarial_images_without_bounds_share_a_scale():
    x, space = torch.tensor([0.0, 2.0]).reshape(1, 1, 1, 2), InputSpace(None, None)
    clean, _, adversarial = tiles(perturbation_figure(examples(x, x + 2, space), space, ""), 1, 1, 2)
    assert clean[0, 0, :, 0].tolist() == [0.0, 0.5]
    assert adversarial[0, 0, :, 0].tolist() == [0.5, 1.0]


@pytest.mark.parametrize(("height", "width"), [(4, 8), (8, 4), (32, 32)])
def test_images_keep_their_proportions(height, width):
    x = torch.zeros(3, 1, height, width)
    figure = perturbation_figure(examples(x, x + 0.1), SPACE, "")
    mosaic = figure.axes[0].images[0].get_array()
    box = figure.axes[0].get_window_extent()
    assert box.height / box.width == pytest.approx(mosaic.shape[0] / mosaic.shape[1])
    assert figure.get_size_inches()[0] == pytest.approx(3.6)


@pytest.mark.parametrize("shape", [(2, 1, 4, 4), (2, 9)])
@pytest.mark.parametrize("names", [None, [f"n{number}" for number in range(10)]])
def test_classes_of_examples(shape, names):
    x = torch.zeros(shape)
    labels = torch.tensor([3, 3]), torch.tensor([3, 5]), torch.tensor([8, 9])
    axis = perturbation_figure(Examples(x, x + 0.1, *labels), InputSpace(), "", names).axes[0]
    start = "" if names is None else "n"
    expected = [f"{start}3\n\u2192 {start}8", f"{start}3\n{start}5 \u2192 {start}9"]
    assert [label.get_text() for label in axis.get_xticklabels()] == expected
    middles = [1.5, 6.5] if len(shape) == 4 else [0.46, 1.46]  # images have a gap of one pixel
    assert axis.get_xticks().tolist() == pytest.approx(middles)


def test_long_names_of_classes_are_cut():
    x, y = torch.zeros(1, 1, 4, 4), torch.tensor([0])
    names = ["a twelve-pack", "twelve-packs"]
    axis = perturbation_figure(Examples(x, x, y, y, y + 1), InputSpace(), "", names).axes[0]
    assert axis.get_xticklabels()[0].get_text() == "a twelve-pa\u2026\n\u2192 twelve-packs"


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
    assert [axis.get_ylabel() for axis in figure.axes] == ["clean", "change", "adversarial"]


def test_matrices_without_a_channel_are_images():
    x = torch.rand(2, 20, 30)
    space = InputSpace(mean=np.linspace(0, 1, 20).tolist(), std=[0.5] * 20)
    clean, _, _ = tiles(perturbation_figure(examples(x, x, space), space, ""), 2, 20, 30)
    np.testing.assert_allclose(clean, grey(x.unsqueeze(1)), atol=1e-6)


def test_global_state_is_left_alone(digits):
    plt.close("all")
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    settings = dict(plt.rcParams)
    render(perturbation_figure(examples(digits[0][:2], digits[0][2:4]), SPACE, ""))
    render(history_figure([{"epoch": 0, "step": 9, "acc": 0.5, "adv_acc/pgd": 0.1}], ""))
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert plt.get_fignums() == []
    assert dict(plt.rcParams) == settings


def test_classes_by_epochs():
    rates = {4: [0.25, torch.nan], 0: [0.5, 1.0]}
    figure = class_figure(rates, ["cat", "a very long name"], "pgd")
    axis, _ = figure.axes
    drawn = axis.images[0].get_array().filled(torch.nan)
    np.testing.assert_array_equal(drawn, np.array([[0.5, 0.25], [1.0, np.nan]], dtype=np.float32))
    assert axis.images[0].get_clim() == (0, 1)
    assert labels(axis) == (["0", "4"], ["cat", "a very long\u2026"])
    assert title(figure) == "robust accuracy of each class, pgd"
    rates = dict.fromkeys(range(50), [0.5] * 100)
    many = labels(class_figure(rates, [str(number) for number in range(100)], "pgd").axes[0])
    assert many == ([str(7 * number) for number in range(8)], [str(5 * number) for number in range(20)])


def labels(axis):
    return tuple([label.get_text() for label in own] for own in (axis.get_xticklabels(), axis.get_yticklabels()))
