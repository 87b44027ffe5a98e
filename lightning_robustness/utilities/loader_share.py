"""Which samples of a data set a loader gives to this process."""

import math
from collections.abc import Sized
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import BatchSampler, DistributedSampler


class LoaderShare(NamedTuple):
    """Which samples of a data set a loader gives to this process.

    Args:
        total: Number of samples that all processes see, those that a distributed sampler repeats not counted, or None
            if that is not known beforehand.
        num_replicas: Number of processes among which a distributed sampler deals out the samples.
        rank: Which of them this one is.

    """

    total: int | None
    num_replicas: int = 1
    rank: int = 0

    def indices(self, start: int, number: int) -> np.ndarray:
        """Index in the data set of samples that come as number ``start`` and following, without repeated ones."""
        indices = (start + np.arange(number)) * self.num_replicas + self.rank
        return indices if self.total is None or self.num_replicas == 1 else indices[indices < self.total]


def loader_share(loader: Any, num_batches: float | None = None) -> LoaderShare:
    """Find out which samples come from a loader.

    Args:
        loader: A DataLoader, or any iterable of batches, of which nothing is known.
        num_batches: Number of batches that will be taken from it, possibly infinite; by default all.

    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    # Of others, a user's own for instance, it is not known how they make batches of samples
    if type(batch_sampler) is not BatchSampler or num_batches == math.inf:
        return LoaderShare(None)
    sampler, num_replicas, rank = batch_sampler.sampler, 1, 0
    if not isinstance(sampler, Sized):
        return LoaderShare(None)
    total = len(sampler)
    if isinstance(sampler, DistributedSampler):
        num_replicas, rank = sampler.num_replicas, sampler.rank
        # To even out the processes, it repeats samples or leaves some out
        total = min(len(sampler.dataset), sampler.total_size)  # type: ignore[arg-type]
    number = int(len(batch_sampler) if num_batches is None else num_batches) * batch_sampler.batch_size
    return LoaderShare(total if number >= len(sampler) else min(total, number * num_replicas), num_replicas, rank)
