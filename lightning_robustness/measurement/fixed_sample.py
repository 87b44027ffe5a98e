import math

import torch

from lightning_robustness.measurement.subject import Samples
from lightning_robustness.utilities.sample import SpreadSample


class FixedSample:
    """Samples that the meters share: drawn once, the same in every evaluation.

    Args:
        sample: The sample collected from the loader.
        num_parts: Number of processes that each contribute a part of the sample.

    Raises:
        ValueError: If the inputs differ in shape.

    """

    def __init__(self, sample: SpreadSample, num_parts: int = 1) -> None:
        x, y = sample.collect()
        if len(x) == 0:  # a process without batches does not know whether there are labels
            y = torch.zeros(0, dtype=torch.long)
        self.samples = Samples(x, y, torch.as_tensor(sample.indices))
        self._sample = sample
        self._num_parts = num_parts

    def take(self, size: int) -> Samples:
        """Return an evenly spread subset of the samples, of this size over all processes."""
        rows = torch.as_tensor(self._sample.rows(math.ceil(size / self._num_parts)))
        x, y, positions = self.samples
        return Samples(x[rows], None if y is None else y[rows], positions[rows])
