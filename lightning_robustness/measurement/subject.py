from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_robustness.utilities.batch import require_labels
from lightning_robustness.utilities.input_space import InputSpace


class Samples(NamedTuple):
    """Samples to measure.

    Args:
        x: Inputs as the model sees them, of shape ``(N, ...)``.
        y: True labels of shape ``(N,)``, or None if there are none.
        positions: Position of each sample in the data set, of shape ``(N,)``.

    """

    x: Tensor
    y: Tensor | None
    positions: Tensor

    def labels(self) -> Tensor:
        """Return the labels, which attacks need.

        Raises:
            ValueError: If there are none.

        """
        return require_labels(self.y, "attacks")


@dataclass(frozen=True)
class Subject:
    """The model that meters measure, and how they go through its samples.

    Args:
        forward: Callable from inputs to logits.
        input_space: Range and normalisation of the inputs.
        device: Where the model is.
        batch_size: Number of samples to work on at a time.
        seed: Seed of everything that is drawn.
        progress: Whether to show progress bars.

    """

    forward: Callable[..., Any]
    input_space: InputSpace
    device: torch.device
    batch_size: int = 128
    seed: int = 0
    progress: bool = False

    def batches(self, samples: Samples, title: str, batch_size: int | None = None) -> Iterator[Samples]:
        """Go through samples in batches on the device, with a progress bar.

        Args:
            samples: The samples.
            title: Text of the progress bar.
            batch_size: Number of samples in a batch, if not that of the subject.

        """
        parts = torch.arange(len(samples.x)).split(batch_size or self.batch_size) if len(samples.x) else ()
        for rows in tqdm(parts, desc=title, leave=False, disable=not self.progress):
            y = None if samples.y is None else samples.y[rows].to(self.device)
            yield Samples(samples.x[rows].to(self.device), y, samples.positions[rows])
