import math
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler


def spread_indices(size: int, total: int, seed: int = 0) -> np.ndarray:
    """Draw evenly spread indices: one at random from each of ``size`` equal parts.

    So a loader that is sorted by class gives samples of all classes, and so does one whose classes alternate, where
    equal steps could hit the same class every time.

    Example:
        >>> from lightning_robustness._measurement.samples import spread_indices
        >>> spread_indices(4, 100).tolist()
        [15, 31, 51, 75]

    """
    size = min(size, total)
    edges = np.arange(size + 1, dtype=np.int64) * total // max(size, 1)
    return edges[:-1] + (np.random.default_rng(seed).random(size) * np.diff(edges)).astype(np.int64)


class SpreadSample:
    """Collect a fixed sample from a stream of batches.

    If the number of samples is known, the sample is that of ``spread_indices``. Otherwise each index is hashed to a
    pseudo-random key, and the samples with the smallest keys are kept.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> from lightning_robustness._measurement.samples import SpreadSample
        >>> sample = SpreadSample(size=4, total=100)
        >>> for indices in np.arange(100).reshape(5, 20):
        ...     sample.add(indices, x=torch.tensor(indices).unsqueeze(1), y=torch.tensor(indices % 10))
        >>> x, y = sample.collect()
        >>> x.flatten(), y
        (tensor([15, 31, 51, 75]), tensor([5, 1, 1, 5]))
        >>> sample.rows(2)
        array([1, 2])

    """

    def __init__(self, size: int, total: int | None, seed: int = 0) -> None:
        self._size = size
        self._seed = seed
        self._chosen = None if total is None else spread_indices(size, total, seed)
        self._indices = np.zeros(0, dtype=np.int64)
        self._limit = np.uint64(2**64 - 1)
        self._x: list[Tensor] = []
        self._y: list[Tensor] = []
        self._extras: list[dict[str, Tensor]] = []
        self._has_labels: bool | None = None
        self._everywhere: np.ndarray | None = None
        self._nothing: tuple[Tensor, Tensor | None] = torch.zeros(0, 0), None

    def add(self, indices: np.ndarray, x: Tensor, y: Tensor | None, extras: Mapping[str, Tensor] | None = None) -> None:
        """Keep the rows that belong to the sample, on the CPU."""
        if self._has_labels not in (None, y is not None):
            raise ValueError("Expected labels in all batches or in none but only some have them.")
        self._has_labels = y is not None
        chosen = self._chosen
        wanted = _key(indices, self._seed) <= self._limit if chosen is None else np.isin(indices, chosen)
        rows = np.flatnonzero(wanted)
        self._indices = np.concatenate([self._indices, indices[rows]])
        self._x += _rows(x, rows)
        self._y += [] if y is None else _rows(y, rows)
        columns = {name: _rows(value, rows) for name, value in (extras or {}).items()}
        self._extras += [{name: column[i] for name, column in columns.items()} for i in range(len(rows))]
        self._nothing = x[:0].detach().cpu(), None if y is None else y[:0].detach().cpu()
        if len(self._x) > 2 * self._size:
            self._keep(self.rows(self._size))
            self._limit = _key(self._indices, self._seed).max(initial=0)

    @property
    def indices(self) -> np.ndarray:
        """Indices in the data set of the rows kept so far."""
        return self._indices

    def share_with(self, indices: np.ndarray) -> None:
        """Make this the share of a sample over several processes, given the indices that all of them kept.

        Only then do the shares have the size of the sample together, if the number of samples was unknown.
        """
        self._everywhere = indices

    def rows(self, size: int) -> np.ndarray:
        """Select a smaller sample, as evenly spread, from the rows kept so far."""
        if self._chosen is None:
            everywhere = self._indices if self._everywhere is None else self._everywhere
            smallest = everywhere[np.argsort(_key(everywhere, self._seed), kind="stable")[:size]]
            return np.flatnonzero(np.isin(self._indices, smallest))
        chosen = self._chosen[spread_indices(size, len(self._chosen), self._seed)]
        return np.flatnonzero(np.isin(self._indices, chosen))

    @property
    def extras(self) -> list[dict[str, Tensor]]:
        """Other entries of the rows kept so far, by name."""
        return self._extras

    def collect(self) -> tuple[Tensor | list[Tensor], Tensor | None]:
        """Return inputs and labels in the order of the data set; empty tensors if there are none.

        Inputs of different shapes come as a list.
        """
        self._keep(self.rows(self._size))
        if not self._x:
            return self._nothing
        y = torch.stack(self._y) if self._y else None
        return (self._x if len({row.shape for row in self._x}) > 1 else torch.stack(self._x)), y

    def _keep(self, rows: np.ndarray) -> None:
        self._indices = self._indices[rows]
        self._x = [self._x[row] for row in rows]
        self._y = [self._y[row] for row in rows] if self._y else []
        self._extras = [self._extras[row] for row in rows]


def _rows(tensor: Tensor, rows: np.ndarray) -> list[Tensor]:
    """Copy rows to the CPU one by one: a view would keep the whole batch in memory."""
    return [row.clone() for row in tensor[torch.as_tensor(rows, device=tensor.device)].detach().cpu()]


def _key(indices: np.ndarray, seed: int) -> np.ndarray:
    """Hash each index to a pseudo-random 64-bit key (SplitMix64); the smallest are kept."""
    z = (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class LoaderShare(NamedTuple):
    """Share of a data set that a loader gives to this process."""

    total: int | None
    num_replicas: int = 1
    rank: int = 0
    first: int = 0

    def indices(self, start: int, number: int) -> np.ndarray:
        """Return the indices in the data set of this process's samples from ``start`` on, without repeats."""
        indices = self.first + (start + np.arange(number)) * self.num_replicas + self.rank
        return indices if self.total is None or self.num_replicas == 1 else indices[indices < self.total]


def loader_share(loader: Any, num_batches: float | None = None) -> LoaderShare:
    """Determine which samples a loader gives to this process."""
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


@contextmanager
def kept_generators(dataloader: Any) -> Iterator[None]:
    """Restore the random generators of a loader afterwards."""
    owners = (dataloader, getattr(dataloader, "sampler", None))
    generators = [g for g in (getattr(owner, "generator", None) for owner in owners) if isinstance(g, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
