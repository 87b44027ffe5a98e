import math
from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_robustness._measurement.samples import SpreadSample
from lightning_robustness._measurement.subject import Samples


class FixedSample:
    """Samples that the meters share: drawn once, the same in every evaluation.

    Samples of one shape, and with the same other entries, come after each other, so that they can be measured together.
    """

    def __init__(self, sample: SpreadSample, num_parts: int = 1, names: Iterable[str] = ()) -> None:
        x, y = sample.collect()
        if len(x) == 0:  # a process without batches does not know whether there are labels
            y = torch.zeros(0, dtype=torch.long)
        self._all = Samples(x, y, torch.as_tensor(sample.indices), sample.extras).only(names)
        self._sample = sample
        self._num_parts = num_parts

    @property
    def samples(self) -> Samples:
        """All samples."""
        return self._select(torch.arange(len(self._all.x)))

    def take(self, size: int) -> Samples:
        """Return a part of the samples, spread as evenly, of this size over all processes."""
        return self._select(torch.as_tensor(self._sample.rows(math.ceil(size / self._num_parts))))

    def _select(self, rows: Tensor) -> Samples:
        if self._all.extras is not None or not isinstance(self._all.x, Tensor):
            rows = torch.tensor(sorted(rows.tolist(), key=self._all.group), dtype=torch.long)
        return self._all.select(rows)
