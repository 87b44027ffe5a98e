"""The share of a loader that each process takes."""

import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_robustness.evaluation.processes import Processes
from lightning_robustness.utilities.loader_share import LoaderShare, loader_share
from lightning_robustness.utilities.loader_state import kept_generators
from lightning_robustness.utilities.sandbox import sandbox

_SETTINGS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "pin_memory_device", "in_order"),
)


class OwnShare(NamedTuple):
    """Batches of this process.

    Args:
        loader: The batches.
        share: Positions of its samples in the order of the whole loader.
        is_assumed: Whether nothing says that each process gets other samples.

    """

    loader: Iterable[Any]
    share: LoaderShare
    is_assumed: bool = False


def take_share(model: nn.Module, loader: Iterable[Any], processes: Processes, seed: int) -> OwnShare:
    """Return the batches that this process evaluates.

    Of an ordinary loader over a map-style data set, each process takes a block of its order, which is that of a single
    process. A loader that shuffles does so with the seed. Loaders that divide the samples themselves, or about which
    nothing is known, are taken as they are.

    Raises:
        RuntimeError: If another process failed.
        ValueError: If processes have different orders, or a distributed sampler is meant for another number of them.

    """
    if processes.number == 1:
        return OwnShare(loader, LoaderShare(loader_share(loader).total))
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(batch_sampler, "sampler", getattr(loader, "sampler", None))
    unknown = LoaderShare(None, processes.number, processes.rank)
    if isinstance(sampler, DistributedSampler):
        if sampler.num_replicas != processes.number:
            raise ValueError(
                f"Expected a DistributedSampler for {processes.number} processes but it divides the samples among "
                f"{sampler.num_replicas}. Pass a loader without one: each process then takes its share."
            )
        known = loader_share(loader)
        return OwnShare(loader, known if known.total is not None else unknown)
    is_sharded = any(hasattr(owner, "num_replicas") for owner in (sampler, batch_sampler))
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or batch_sampler is None:
        return OwnShare(loader, unknown, is_assumed=True)
    return OwnShare(loader, unknown) if is_sharded else _take_block(model, loader, processes, seed)


def _take_block(model: nn.Module, loader: DataLoader, processes: Processes, seed: int) -> OwnShare:
    with processes.step():
        batches = _draw_batches(model, loader, seed)
    checksums = processes.gather(zlib.crc32(repr(batches).encode()))
    if len(set(checksums)) > 1:
        raise ValueError(
            "Expected the loader to go through the data in the same order in all processes but the orders differ. Pass "
            "one that does not shuffle, or whose sampler draws from torch's global random state; a sampler that gives "
            "each process its share has to be a DistributedSampler."
        )
    total = sum(map(len, batches))
    first, end = (-(-total * rank // processes.number) for rank in (processes.rank, processes.rank + 1))
    own, position = [], 0
    for batch in batches:
        own.append(batch[max(first - position, 0) : max(end - position, 0)])
        position += len(batch)
    # Workers that persist would outlive this loader
    settings = {name: getattr(loader, name) for name in _SETTINGS if hasattr(loader, name)}
    share = DataLoader(loader.dataset, batch_sampler=[batch for batch in own if batch], **settings)
    return OwnShare(share, LoaderShare(total, first=first))


def _draw_batches(model: nn.Module, loader: DataLoader, seed: int) -> list[list[Any]]:
    """Return the indices of each batch, as an iterator of the loader would draw them in the same random state."""
    with sandbox(model, seed=seed), kept_generators(loader):
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # the seed of its workers comes first
        return [list(batch) for batch in loader.batch_sampler]  # type: ignore[union-attr]
