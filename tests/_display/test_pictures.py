import base64
import io

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from lightning_robustness._display.pictures import make_examples
from lightning_robustness._measurement.meters.attack import Examples
from lightning_robustness.input_space import InputSpace


def examples(x, delta=0.125, number=2):
    y = torch.arange(number)
    return Examples(x[:number], x[:number] + delta, y, y, y + 1)


def pixels(example):
    return imread(io.BytesIO(base64.b64decode(example.png)), format="png")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("space", [InputSpace(), InputSpace(-2.0, 2.0, mean=0.5, std=0.5)])
def test_pictures_are_the_images(channels, space):
    x = torch.linspace(0.25, 0.75, 2 * channels * 20).reshape(2, channels, 4, 5)
    kept = examples(x)
    width = (space.high - space.low) / 1.0
    inputs = Examples(*(space.normalize(space.low + width * part) for part in kept[:2]), *kept[2:])
    first, second = make_examples("pgd", inputs, space)
    assert (first.attack, first.label, first.prediction, first.adversarial_prediction) == ("pgd", 0, 0, 1)
    assert first.factor == 4  # 0.125 times 4 spans half of the range
    assert second.caption == "class 1, predicted as 2; perturbation 4 times"
    picture = pixels(second)
    assert picture.shape == (4, 3 * 5 + 2, 4)
    tiles = [picture[:, start : start + 5] for start in (0, 6, 12)]
    red = (
        torch.tensor([178 / 255, 24 / 255, 43 / 255]).reshape(3, 1, 1).expand(3, 4, 5)
    )  # the largest increase of one channel
    expected = [x[1], red if channels == 1 else torch.ones_like(x[1]), x[1] + 0.125]
    for tile, image in zip(tiles, expected, strict=True):
        shown = np.broadcast_to(image.permute(1, 2, 0).numpy(), (4, 5, 3))
        np.testing.assert_allclose(tile[..., :3], shown, atol=0.5 / 255 + 1e-6)
        assert (tile[..., 3] == 1).all()
    assert (picture[:, [5, 11], 3] == 0).all()  # the gaps are transparent


def test_large_images_are_shrunk():
    (example,) = make_examples("pgd", examples(torch.full((1, 3, 224, 112), 0.5), number=1), InputSpace())
    assert pixels(example).shape == (64, 3 * 32 + 2 * 5, 4)
    np.testing.assert_allclose(pixels(example)[:, :32, :3], 0.5, atol=0.5 / 255 + 1e-6)
    assert len(example.png) < 1000


def test_no_examples_give_no_pictures():
    assert make_examples("pgd", examples(torch.rand(2, 1, 4, 4), number=0), InputSpace()) == []
