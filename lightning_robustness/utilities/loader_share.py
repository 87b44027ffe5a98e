import math
from collections.abc import Sized
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import BatchSampler, DistributedSampler


class LoaderShare(NamedTuple):
    """Share of a data set that a loader gives to this process.

    Args:
        total: Number of samples that all processes see, without those that a distributed sampler repeats, or None if
            it is not known in advance.
        num_replicas: Number of processes among which a distributed sampler divides the samples.
        rank: Index of this process among them.
        first: Index of the first sample of all, where this process has a block of the data set.

    """

    total: int | None
    num_replicas: int = 1
    rank: int = 0
    first: int = 0

    def indices(self, start: int, number: int) -> np.ndarray:
        """Return the indices in the data set of this process's samples from ``start`` on, without repeats."""
        indices = self.first + (start + np.arange(number)) * self.num_replicas + self.rank
        return indices if self.total is None or self.num_replicas == 1 else indices[indices < self.total]


def loader_share(loader: Any, num_batches: float | None = None) -> LoaderShare:
    """Determine which samples a loader gives to this process.

    Args:
        loader: A DataLoader, or any iterable of batches, about which nothing is known.
        num_batches: Number of batches that will be taken from it, possibly infinite; by default all.

    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    # Other batch samplers, such as a user's own, may batch samples in any way
    if type(batch_sampler) is not BatchSampler or num_batches == math.inf:
        return LoaderShare(None)
    sampler, num_replicas, rank = batch_sampler.sampler, 1, 0
    if not isinstance(sampler, Sized):
        return LoaderShare(None)
    total = len(sampler)
    if isinstance(sampler, DistributedSampler):
        num_replicas, rank = sampler.num_replicas, sampler.rank
        # It repeats or drops samples to give all processes the same number
        total = min(len(sampler.dataset), sampler.total_size)  # type: ignore[arg-type]
    number = int(len(batch_sampler) if num_batches is None else num_batches) * batch_sampler.batch_size
    return LoaderShare(total if number >= len(sampler) else min(total, number * num_replicas), num_replicas, rank)
