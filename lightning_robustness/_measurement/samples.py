"""Samples to measure: which ones a process has, and a fixed sample that is spread over the whole data set."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler

from lightning_robustness._isolation.draws import hash_positions
from lightning_robustness._model.batch import Batch
from lightning_robustness._processes import rank_zero_warn

# Range of the keys by which samples of streams are chosen
_KEYS = torch.iinfo(torch.long)


class Samples(NamedTuple):
    """Samples on the CPU: inputs, a list of tensors if their shapes differ; labels; positions; other entries."""

    x: Any
    y: Tensor | None
    positions: Tensor
    extras: Sequence[Mapping[str, Tensor]] | None = None

    def only(self, names: Iterable[str]) -> "Samples":
        """Leave out the other entries that a model does not take, and put samples together that can be measured so."""
        names = tuple(names)
        extras = None
        if names and self.extras is not None:
            extras = [{name: row[name] for name in names if name in row} for row in self.extras]
        samples = self._replace(extras=extras)
        return samples if samples._are_alike else samples.select(sorted(range(len(self.x)), key=samples._kind))

    def select(self, rows: Sequence[int] | Tensor) -> "Samples":
        """Return some of the samples, by their rows."""
        rows = torch.as_tensor(rows, dtype=torch.long)
        return Samples(
            self.x[rows] if isinstance(self.x, Tensor) else [self.x[row] for row in rows.tolist()],
            None if self.y is None else self.y[rows],
            self.positions[rows],
            None if self.extras is None else [self.extras[row] for row in rows],
        )

    def at(self, positions: Tensor) -> "Samples":
        """Return the samples at these positions."""
        return self.select(torch.isin(self.positions, positions).nonzero().squeeze(1))

    def without(self, positions: Tensor) -> "Samples":
        """Return the samples at all other positions."""
        return self.select((~torch.isin(self.positions, positions)).nonzero().squeeze(1))

    def batches(self, size: int) -> list[Batch]:
        """Split samples into batches, each of one shape and with the same other entries, in a single row."""
        rows = torch.arange(len(self.x))
        groups = [rows] if len(rows) else []
        if not self._are_alike:
            groups = [torch.tensor(list(group)) for _, group in groupby(rows.tolist(), key=self._kind)]
        return [self._batch(part) for group in groups for part in group.split(size)]

    @staticmethod
    def join(shares: Iterable["Samples"]) -> "Samples":
        """Put the samples of all processes in the order of their positions."""
        shares = list(shares)
        shares = [share for share in shares if len(share.positions)] or shares
        joined = Samples(
            [row for share in shares for row in share.x],
            None if shares[0].y is None else torch.cat([share.y for share in shares if share.y is not None]),
            torch.cat([share.positions for share in shares]),
            None if shares[0].extras is None else [row for share in shares for row in share.extras or ()],
        )
        return joined.select(joined.positions.argsort())

    @property
    def _are_alike(self) -> bool:
        return self.extras is None and isinstance(self.x, Tensor)

    def _kind(self, row: int) -> tuple[Any, ...]:
        """Return what a sample has in common with those that it can be measured together with."""
        extras = {} if self.extras is None else self.extras[row]
        entries = (
            (name, tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().tobytes())
            for name, value in sorted(extras.items())
        )
        return tuple(self.x[row].shape), *entries

    def _batch(self, rows: Tensor) -> Batch:
        x = self.x[rows] if isinstance(self.x, Tensor) else torch.stack([self.x[row] for row in rows])
        extras = {} if self.extras is None else self.extras[int(rows[0])]
        shared = {name: value.unsqueeze(0) for name, value in extras.items()}
        return Batch(x, None if self.y is None else self.y[rows], None, shared, self.positions[rows])


def spread_indices(size: int, total: int, seed: int = 0) -> np.ndarray:
    """Draw evenly spread indices: one at random from each of ``size`` equal parts.

    Loaders that are sorted by class, and loaders whose classes alternate, both give samples of all classes.
    """
    size = min(size, total)
    edges = np.arange(size + 1, dtype=np.int64) * total // max(size, 1)
    return edges[:-1] + (np.random.default_rng(seed).random(size) * np.diff(edges)).astype(np.int64)


class FixedSample:
    """A sample that is collected once from a stream of batches, and then the same in every evaluation.

    It is drawn by ``spread_indices`` if the number of samples is known. Otherwise each position is hashed to a
    pseudo-random key, and the samples with the smallest keys are kept.
    """

    def __init__(self, size: int, total: int | None, seed: int = 0) -> None:
        self._size = size
        self._seed = seed
        self._chosen = None if total is None else torch.from_numpy(spread_indices(size, total, seed))
        self._limit = _KEYS.max
        self._kept: list[Samples] = []
        self._has_labels: bool | None = None
        self._everywhere: Tensor | None = None
        self._nothing = torch.zeros(0, 0)

    @property
    def needs_sharing(self) -> bool:
        """Return whether processes must share their positions before the size of the sample is known."""
        return self._chosen is None

    @property
    def positions(self) -> Tensor:
        """Positions of the samples kept so far."""
        return torch.cat([torch.zeros(0, dtype=torch.long), *(part.positions for part in self._kept)])

    def add(self, batch: Batch) -> None:
        """Keep the samples of a batch that belong here, on the CPU; positions must rise from batch to batch."""
        if self._has_labels not in (None, batch.y is not None):
            raise ValueError("Expected labels in all batches or in none but only some have them.")
        self._has_labels = batch.y is not None
        self._nothing = batch.x[:0].detach().cpu()
        if self._chosen is None:
            is_wanted = hash_positions(batch.positions, self._seed) <= self._limit
        else:
            is_wanted = torch.from_numpy(np.isin(batch.positions, self._chosen))  # torch's would sort all of these
        rows = is_wanted.nonzero().squeeze(1)
        if len(rows):
            y = None if batch.y is None else torch.stack(_copy(batch.y, rows))
            extras = {name: _copy(value, rows) for name, value in batch.extras.items()}
            others = [{name: values[number] for name, values in extras.items()} for number in range(len(rows))]
            self._kept.append(Samples(_copy(batch.x, rows), y, batch.positions[rows], others))
        if len(self.positions) > 2 * self._size:
            self._keep()
            self._limit = max(hash_positions(self.positions, self._seed).tolist(), default=_KEYS.min)

    def share_with(self, positions: Tensor) -> None:
        """Make this the share of a sample over several processes, given the positions that all of them kept."""
        self._everywhere = positions

    def take(self, size: int, names: Iterable[str] = ()) -> Samples:
        """Return a part of the sample, spread as evenly, with the other entries of these names."""
        self._keep()
        if not self._kept:
            # A process without batches does not know whether there are labels
            y = None if self._has_labels is False else torch.zeros(0, dtype=torch.long)
            return Samples(self._nothing, y, self.positions, [])
        samples = self._kept[0].select(self._indices(size))
        if len({row.shape for row in samples.x}) <= 1:
            samples = samples._replace(x=torch.stack(samples.x) if samples.x else self._nothing)
        return samples.only(names)

    def _keep(self) -> None:
        if self._kept:
            self._kept = [Samples.join(self._kept)]
            self._kept = [self._kept[0].select(self._indices(self._size))]

    def _indices(self, size: int) -> list[int]:
        """Select a smaller sample, as evenly spread, from the rows kept so far."""
        own = self.positions
        if self._chosen is None:
            everywhere = own if self._everywhere is None else self._everywhere
            kept = everywhere[hash_positions(everywhere, self._seed).argsort(stable=True)[:size]]
        else:
            kept = self._chosen[spread_indices(size, len(self._chosen), self._seed)]
        return torch.isin(own, kept).nonzero().squeeze(1).tolist()


def _copy(tensor: Tensor, rows: Tensor) -> list[Tensor]:
    """Copy rows to the CPU one by one: a view would keep the whole batch in memory."""
    return [row.clone() for row in tensor[rows.to(tensor.device)].detach().cpu()]


class LoaderShare(NamedTuple):
    """Share of a data set that a loader gives to this process: its own positions, of those that all processes see.

    The total does not count samples that a distributed sampler repeats; it is None where it is not known in advance.
    """

    total: int | None
    num_replicas: int = 1
    rank: int = 0
    first: int = 0

    def positions(self, start: int, number: int) -> Tensor:
        """Return the positions in the data set of this process's samples from ``start`` on, without repeats."""
        positions = self.first + (start + torch.arange(number)) * self.num_replicas + self.rank
        return positions if self.total is None or self.num_replicas == 1 else positions[positions < self.total]


def loader_share(loader: Any, num_batches: float | None = None, is_alone: bool = False) -> LoaderShare:
    """Determine which samples a loader gives to this process; alone, it counts those that come, not the data set's."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    # Other batch samplers, such as a user's own, may batch samples in any way
    if type(batch_sampler) is not BatchSampler or num_batches == math.inf:
        return LoaderShare(None)
    sampler, num_replicas, rank = batch_sampler.sampler, 1, 0
    if not isinstance(sampler, Sized):
        return LoaderShare(None)
    total = len(sampler)
    if isinstance(sampler, DistributedSampler) and not is_alone:
        num_replicas, rank = sampler.num_replicas, sampler.rank
        # It repeats or drops samples to give all processes the same number
        total = min(len(sampler.dataset), sampler.total_size)  # type: ignore[arg-type]
    number = int(len(batch_sampler) if num_batches is None else num_batches) * batch_sampler.batch_size
    return LoaderShare(total if number >= len(sampler) else min(total, number * num_replicas), num_replicas, rank)


def warn_of_missing_shares(loader: Any) -> None:
    """Warn, in a single process, of a loader that gives it only a share of the samples."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(batch_sampler, "sampler", getattr(loader, "sampler", None))
    number = getattr(sampler, "num_replicas", 1)
    if isinstance(number, int) and number > 1:
        rank_zero_warn(
            f"The loader's {type(sampler).__name__} divides the samples among {number} processes but there is only "
            f"one, so all values are of one share in {number}. Pass a loader without it."
        )


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
