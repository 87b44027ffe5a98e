import base64
import math
import struct
import zlib
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lightning_robustness._display.drawing import amplification
from lightning_robustness._measurement.meters.attack import Examples
from lightning_robustness.input_space import InputSpace

# Larger images are shrunk to this many pixels, so that a report stays small
_MAX_SIZE = 64
_GAP = 0.1  # between images, relative to their width


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


def make_examples(name: str, examples: Examples, input_space: InputSpace) -> list[AdversarialExample]:
    """Draw the examples of an attack."""
    if not len(examples.y):
        return []
    x, x_adv = (input_space.unnormalize(part.float()) for part in (examples.x, examples.x_adv))
    low = x.min().item() if input_space.low is None else input_space.low
    high = x.max().item() if input_space.high is None else input_space.high
    x, x_adv = ((part - low) / ((high - low) or 1.0) for part in (x, x_adv))
    delta = x_adv - x
    factor = amplification(delta)
    rows = zip(examples.y.tolist(), examples.preds.tolist(), examples.adv_preds.tolist(), strict=True)
    tiles = (x, 0.5 + factor * delta, x_adv)
    return [
        AdversarialExample(name, y, before, after, factor, _encode(_join([tile[number] for tile in tiles])))
        for number, (y, before, after) in enumerate(rows)
    ]


def _join(tiles: list[Tensor]) -> Tensor:
    """Put images of shape ``(C, H, W)`` side by side, with a gap; the last channel of the result is the opacity."""
    height, width = tiles[0].shape[1:]
    scale = _MAX_SIZE / max(height, width)
    if scale < 1:
        size = (max(1, round(scale * height)), max(1, round(scale * width)))
        tiles = [functional.interpolate(tile.unsqueeze(0), size=size, mode="area").squeeze(0) for tile in tiles]
    first, *others = (torch.cat([tile, torch.ones_like(tile[:1])]) for tile in tiles)
    gap = torch.zeros(*first.shape[:2], math.ceil(_GAP * first.shape[2]))
    return torch.cat([first, *(part for tile in others for part in (gap, tile))], dim=2)


def _encode(image: Tensor) -> str:
    """Write an image of shape ``(2 or 4, H, W)``, values in [0, 1], the last channel the opacity, as PNG in base64."""
    channels, height, width = image.shape
    pixels = (255 * image.clamp(0.0, 1.0)).round().to(torch.uint8).permute(1, 2, 0).reshape(height, -1)
    # Each line begins with the number of its filter, 0 for none
    lines = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), pixels], dim=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 4 if channels == 2 else 6, 0, 0, 0)
    chunks = {b"IHDR": header, b"IDAT": zlib.compress(lines.numpy().tobytes(), 9), b"IEND": b""}
    file = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks.items()
    )
    return base64.b64encode(file).decode()
