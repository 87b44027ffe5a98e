import math

import numpy as np
import pytest
import torch
from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

from lightning_robustness.functional._image_quality import image_quality
from lightning_robustness.input_space import InputSpace


def pair(*shape, noise=0.05):
    x = torch.rand(shape)
    return (x + noise * torch.randn_like(x)).clamp(0, 1), x


def reference_ssim(x_adv, x, half, sigma):
    """Structural similarity of one channel, window by window, in plain numpy."""
    window = np.exp(-(np.arange(-half, half + 1) ** 2) / (2 * sigma**2))
    window = np.outer(window, window) / window.sum() ** 2
    a, b = (np.pad(image.double().numpy(), half, mode="reflect") for image in (x_adv, x))
    values = []
    for row in range(x.shape[0]):
        for column in range(x.shape[1]):
            place = np.s_[row : row + 2 * half + 1, column : column + 2 * half + 1]
            mean_a, mean_b = (window * a[place]).sum(), (window * b[place]).sum()
            var_a, var_b = ((window * (v[place] - m) ** 2).sum() for v, m in ((a, mean_a), (b, mean_b)))
            covariance = (window * (a[place] - mean_a) * (b[place] - mean_b)).sum()
            values.append(
                ((2 * mean_a * mean_b + 1e-4) * (2 * covariance + 9e-4))
                / ((mean_a**2 + mean_b**2 + 1e-4) * (var_a + var_b + 9e-4))
            )
    return np.mean(values)


@pytest.mark.parametrize("shape", [(5, 3, 32, 32), (5, 1, 28, 28), (2, 1, 11, 40)])
def test_equals_torchmetrics_image_by_image(shape):
    x_adv, x = pair(*shape)
    quality = image_quality(x_adv, x)
    for row in range(len(x)):
        one = x_adv[row : row + 1], x[row : row + 1]
        similarity = structural_similarity_index_measure(*one, data_range=1.0)
        assert quality.ssim[row].item() == pytest.approx(similarity.item(), abs=2e-6)
        assert quality.psnr[row].item() == pytest.approx(peak_signal_noise_ratio(*one, data_range=1.0).item(), abs=1e-4)
        assert quality.mse[row].item() == pytest.approx((one[0] - one[1]).square().mean().item(), rel=1e-5)
        assert quality.l2[row].item() == pytest.approx((one[0] - one[1]).norm().item(), rel=1e-5)


@pytest.mark.parametrize(("height", "width", "half"), [(8, 8, 3), (3, 9, 1), (4, 4, 1), (10, 12, 4)])
def test_small_images_have_the_largest_window_that_fits(height, width, half):
    x_adv, x = pair(2, 1, height, width)
    expected = [reference_ssim(x_adv[row, 0], x[row, 0], half, half / 3.5) for row in range(2)]
    assert image_quality(x_adv, x).ssim.tolist() == pytest.approx(expected, abs=1e-7)


def test_is_in_units_of_the_range():
    x_adv, x = pair(3, 3, 12, 12)
    plain = image_quality(x_adv, x)
    space = InputSpace(low=-1.0, high=1.0, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    seen = image_quality(space.normalize(2 * x_adv - 1), space.normalize(2 * x - 1), space)
    torch.testing.assert_close(seen.psnr, plain.psnr, atol=1e-4, rtol=0)
    torch.testing.assert_close(seen.mse, 4 * plain.mse, rtol=1e-4, atol=0)
    torch.testing.assert_close(seen.l2, 2 * plain.l2, rtol=1e-4, atol=0)
    eight_bit = image_quality(255 * x_adv, 255 * x, InputSpace(high=255.0))
    torch.testing.assert_close(eight_bit.ssim, plain.ssim, atol=1e-6, rtol=0)


def test_unchanged_image_has_a_finite_psnr():
    x = torch.rand(2, 1, 8, 8)
    quality = image_quality(x, x)
    assert quality.psnr.tolist() == [100.0, 100.0]
    assert quality.ssim.tolist() == pytest.approx([1.0, 1.0])
    assert quality.mse.tolist() == quality.l2.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("shape", [(2, 16), (2, 1, 100), (2, 3, 2, 50)])
def test_inputs_that_are_no_images_have_no_structural_similarity(shape):
    x = torch.zeros(shape)
    quality = image_quality(x + 0.1, x)
    assert quality.ssim.isnan().all()
    assert quality.psnr.tolist() == pytest.approx([20.0, 20.0], abs=1e-5)


def test_unbounded_inputs_have_no_peak():
    quality = image_quality(torch.full((2, 1, 8, 8), 3.0), torch.zeros(2, 1, 8, 8), InputSpace(low=None, high=None))
    assert quality.ssim.isnan().all()
    assert quality.psnr.isnan().all()
    assert quality.l2.tolist() == [24.0, 24.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_takes_any_precision_and_empty_batches(dtype):
    x = torch.linspace(0, 1, 64).reshape(1, 1, 8, 8).to(dtype)
    quality = image_quality(x / 2, x)
    assert quality.mse.item() == pytest.approx((x.double() / 2).square().mean().item(), rel=1e-2)
    assert all(math.isfinite(value.item()) for value in quality)
    assert all(len(value) == 0 for value in image_quality(x[:0], x[:0]))
