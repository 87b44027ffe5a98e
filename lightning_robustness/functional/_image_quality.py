from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_robustness._numbers import accumulation_dtype
from lightning_robustness.input_space import InputSpace, check_input_space

# An unchanged image counts as 100 dB: its infinite PSNR would make every mean infinite
_SMALLEST_MSE = 1e-10


class ImageQuality(NamedTuple):
    """Quality of perturbed inputs, one value per sample; NaN where a metric is undefined."""

    ssim: Tensor
    psnr: Tensor
    mse: Tensor
    l2: Tensor


def image_quality(x_adv: Tensor, x: Tensor, input_space: InputSpace | None = None) -> ImageQuality:
    """Compare perturbed inputs with the originals, sample by sample, in un-normalised units.

    Structural similarity follows torchmetrics; for images with a side below 11, the Gaussian window has the largest
    odd size that fits. Non-image inputs, and images with a side below 3, have none; inputs without a bounded range have
    neither it nor PSNR.
    """
    space = check_input_space(input_space)
    # Structural similarity is a ratio of small differences, which a GPU's fast single precision would round away
    dtype = accumulation_dtype(x.device)
    x_adv, x = space.unnormalize(x_adv.to(dtype)), space.unnormalize(x.to(dtype))
    l2 = torch.linalg.vector_norm((x_adv - x).flatten(1), dim=1)
    mse = l2.square() / x.shape[1:].numel()
    missing = torch.full_like(l2, torch.nan)
    if space.low is None or space.high is None:
        return ImageQuality(missing, missing, mse, l2)
    width = space.high - space.low
    psnr = 10 * (width**2 / mse.clamp(min=_SMALLEST_MSE * width**2)).log10()
    is_image = x.ndim == 4 and min(x.shape[2:]) >= 3
    return ImageQuality(_ssim(x_adv, x, width) if is_image else missing, psnr, mse, l2)


def _ssim(x_adv: Tensor, x: Tensor, width: float) -> Tensor:
    half = min((min(x.shape[2:]) - 1) // 2, 5)
    rows, columns = (_window(size, half, x) for size in x.shape[2:])

    def smooth(values: Tensor) -> Tensor:
        return rows @ values @ columns.T

    mean_adv, mean = smooth(x_adv), smooth(x)
    variance_adv = (smooth(x_adv.square()) - mean_adv.square()).clamp(min=0.0)
    variance = (smooth(x.square()) - mean.square()).clamp(min=0.0)
    covariance = smooth(x_adv * x) - mean_adv * mean
    c1, c2 = (0.01 * width) ** 2, (0.03 * width) ** 2
    luminance = (2 * mean_adv * mean + c1) / (mean_adv.square() + mean.square() + c1)
    structure = (2 * covariance + c2) / (variance_adv + variance + c2)
    return (luminance * structure).flatten(1).mean(dim=1)


def _window(size: int, half: int, like: Tensor) -> Tensor:
    """Return a matrix that smooths a row of an image, mirrored at its ends: faster on a CPU than a convolution."""
    offsets = torch.arange(-half, half + 1, dtype=like.dtype, device=like.device)
    sigma = 1.5 if half == 5 else half / 3.5
    weights = (-(offsets / sigma).square() / 2).exp()
    identity = torch.eye(size, dtype=like.dtype, device=like.device)
    mirrored = pad(identity.unsqueeze(0), (half, half), mode="reflect").squeeze(0)
    return (mirrored.unfold(1, 2 * half + 1, 1) @ (weights / weights.sum())).T
