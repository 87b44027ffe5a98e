import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_robustness._isolation.sandbox import sandbox
from lightning_robustness._measurement.samples import LoaderShare, SpreadSample, kept_generators, loader_share
from lightning_robustness._model.batch import read_batch, read_extras
from lightning_robustness._processes import Processes

_SETTINGS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "pin_memory_device", "in_order"),
)


class OwnShare(NamedTuple):
    """Batches of this process."""

    loader: Iterable[Any]
    share: LoaderShare
    is_assumed: bool = False


def take_share(model: nn.Module, loader: Iterable[Any], processes: Processes, seed: int) -> OwnShare:
    """Return the batches that this process evaluates.

    Of an ordinary loader over a map-style data set, each process takes a block of its order, which is that of a single
    process. A loader that shuffles does so with the seed. Loaders that divide the samples themselves, or about which
    nothing is known, are taken as they are.
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


EMPTY = "Expected a loader with at least one sample but it is empty."


def check_loader(dataloader: Any) -> None:
    """Check that there is a loader."""
    if hasattr(dataloader, "test_dataloader"):
        found = f"the data module {type(dataloader).__name__}. Pass one of its loaders, such as `test_dataloader()`."
    elif isinstance(dataloader, Dataset) and not isinstance(dataloader, IterableDataset):
        found = f"the data set {type(dataloader).__name__}. Pass `DataLoader(dataset, batch_size=128)`."
    elif not hasattr(dataloader, "__iter__") and not hasattr(dataloader, "__getitem__"):
        found = f"{type(dataloader).__name__}."
    else:
        return
    raise TypeError(f"Expected `dataloader` to be an iterable of batches but got {found}")


class LoadedBatch(NamedTuple):
    """A batch of a loader."""

    x: Tensor
    y: Tensor | None
    name: str | None
    extras: dict[str, Tensor]
    positions: np.ndarray


def iterate(
    model: nn.Module,
    own: OwnShare,
    batch_fn: Callable[..., Any] | None,
    sample: SpreadSample,
    seed: int,
    progress: bool,
) -> Generator[LoadedBatch, None, None]:
    """Go through the share of a loader, with a random state of its own, and let a sample pick from what comes.

    A caller that stops early must close the iterator: until then, the model stays in the sandbox.
    """
    number = 0
    # A loader that shuffles gives every model the same order, and the caller's random state is left alone
    with sandbox(model, seed=seed), kept_generators(own.loader):
        for batch in tqdm(own.loader, desc="data", leave=False, disable=not progress):
            x, y = read_batch(batch, batch_fn)
            if len(x) == 0:
                continue
            name, extras = read_extras(batch, batch_fn, len(x))
            positions = own.share.indices(number, len(x))
            number += len(x)
            if len(positions) < len(x):  # a distributed sampler repeats samples at the end
                x, y = x[: len(positions)], None if y is None else y[: len(positions)]
                extras = {key: value[: len(positions)] for key, value in extras.items()}
            if len(positions):
                sample.add(positions, x, y, extras)
                yield LoadedBatch(x, y, name, extras, positions)


@contextmanager
def on_device(model: nn.Module, device: str | torch.device | None) -> Iterator[torch.device]:
    """Move a model to a device and back afterwards; with None it stays where it is."""
    own = next((p.device for p in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    if device is None or torch.device(device) == own:
        yield own
        return
    try:
        model.to(device)
        yield torch.device(device)
    finally:
        model.to(own)
