"""Clean images, perturbations and adversarial images, for boards and pages alike."""

import base64
import io
from collections.abc import Sequence
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate, pad

from lightning_robustness._measurement.meters.attack import Examples
from lightning_robustness._measurement.threat_model import is_image
from lightning_robustness.input_space import InputSpace

# Larger images are shrunk to this many pixels, so that a report stays small
_MAX_SIZE = 64
_GAP = 0.08  # between images, relative to their longer side
# Largest increase and decrease of one channel: the ends of ColorBrewer's RdBu
_RED, _BLUE = (torch.tensor(color).reshape(3, 1, 1) / 255 for color in ([178, 24, 43], [33, 102, 172]))


class AdversarialExample(NamedTuple):
    """A clean image, its perturbation and the adversarial image, side by side."""

    attack: str
    label: int
    prediction: int
    adversarial_prediction: int
    factor: int
    png: str

    @property
    def caption(self) -> str:
        """Description of the picture."""
        return f"class {self.label}, predicted as {self.adversarial_prediction}; perturbation {self.factor} times"


class Triples(NamedTuple):
    """Clean images, their perturbations times a factor, and adversarial images, all with values in [0, 1]."""

    clean: Tensor
    change: Tensor
    adversarial: Tensor
    factor: int

    @classmethod
    def of(cls, clean: Tensor, adversarial: Tensor) -> "Triples":
        """Amplify perturbations so that the largest spans the range.

        No change is white with one channel, where red is more and blue is less, and grey with three.
        """
        delta = adversarial - clean
        factor = amplification(delta)
        return cls(clean, _signed_colors(factor * delta), adversarial, factor)


def as_images(x: Tensor, input_space: InputSpace) -> Tensor | None:
    """Map inputs to images with values in [0, 1], by the range of the input space or, if unbounded, of the batch."""
    if not is_image(x) or x.numel() == 0:
        return None
    x = input_space.unnormalize(x.detach().cpu().float())
    low = x.min().item() if input_space.low is None else input_space.low
    high = x.max().item() if input_space.high is None else input_space.high
    return ((x - low) / ((high - low) or 1.0)).clamp(0.0, 1.0)


def amplification(delta: Tensor) -> int:
    """Return the whole number by which perturbations of pixels in [0, 1] are multiplied to be seen, without clipping.

    Example:
        >>> import torch
        >>> from lightning_robustness._display.pictures import amplification
        >>> amplification(torch.tensor([-8 / 255, 4 / 255])), amplification(torch.tensor([0.75]))
        (15, 1)

    """
    largest = delta.abs().max().item() or 0.5
    return max(1, int(0.5 / largest + 1e-3))  # 0.1 in float32 still gives 5


def mosaic(rows: Sequence[Tensor]) -> tuple[Tensor, int]:
    """Arrange images of shape ``(N, C, H, W)``, a row for each batch, as one of shape ``(H, W, 4)``.

    Return also the number of pixels between them, which are transparent.
    """
    gap = max(1, round(_GAP * max(rows[0].shape[2:])))
    strips = []
    for images in rows:
        opaque = torch.cat([images.expand(-1, 3, -1, -1), torch.ones_like(images[:, :1])], dim=1)
        strips.append(torch.cat(list(pad(opaque, (0, gap, 0, gap))), dim=2))
    return torch.cat(strips, dim=1)[:, :-gap, :-gap].permute(1, 2, 0), gap


def make_examples(name: str, examples: Examples, input_space: InputSpace) -> list[AdversarialExample]:
    """Draw the examples of an attack, each as a picture of its own."""
    images = as_images(torch.cat([examples.x, examples.x_adv]), input_space)
    if images is None:
        return []
    triples = Triples.of(*images.chunk(2))
    drawn = [_encode(torch.stack([part.expand(3, -1, -1) for part in own])) for own in zip(*triples[:3], strict=True)]
    labels = zip(examples.y.tolist(), examples.preds.tolist(), examples.adv_preds.tolist(), strict=True)
    return [AdversarialExample(name, *row, triples.factor, png) for row, png in zip(labels, drawn, strict=True)]


def _signed_colors(delta: Tensor) -> Tensor:
    """Colour values from -0.5 to 0.5: one channel from blue over white to red, three around grey."""
    if delta.shape[1] == 3:
        return (0.5 + delta).clamp(0.0, 1.0)
    less, more = (-2 * delta).clamp(0.0, 1.0), (2 * delta).clamp(0.0, 1.0)
    return 1 - more * (1 - _RED) - less * (1 - _BLUE)


def _encode(images: Tensor) -> str:
    """Write images of shape ``(N, C, H, W)`` side by side as a PNG file in base64, not too large."""
    scale = _MAX_SIZE / max(images.shape[2:])
    if scale < 1:
        size = [max(1, round(scale * side)) for side in images.shape[2:]]
        images = interpolate(images, size=size, mode="area")
    pixels, file = (255 * mosaic([images])[0]).round().byte(), io.BytesIO()
    Image.fromarray(pixels.contiguous().numpy()).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()
