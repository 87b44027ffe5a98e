"""Draw samples from a loader, and move a model to a device temporarily."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_robustness.measurement.fixed_sample import FixedSample
from lightning_robustness.measurement.subject import Samples
from lightning_robustness.utilities.batch import read_batch, read_extras
from lightning_robustness.utilities.extra_inputs import ExtraInputs, find_extra_inputs
from lightning_robustness.utilities.loader_share import loader_share
from lightning_robustness.utilities.sample import SpreadSample
from lightning_robustness.utilities.sandbox import sandbox

EMPTY = "Expected a loader with at least one sample but it is empty."


def check_setting(dataloader: Any) -> None:
    """Check that this is a single process, with a loader.

    Raises:
        RuntimeError: If there are several processes: each would measure everything, or wait for the others.
        TypeError: If the loader is a data module, a data set, or not iterable.

    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"Expected a single process but this is one of {dist.get_world_size()}. Use `RobustnessMonitor` in a "
            "distributed run, or evaluate its checkpoint afterwards, in a single process."
        )
    if hasattr(dataloader, "test_dataloader"):
        found = f"the data module {type(dataloader).__name__}. Pass one of its loaders, such as `test_dataloader()`."
    elif isinstance(dataloader, Dataset) and not isinstance(dataloader, IterableDataset):
        found = f"the data set {type(dataloader).__name__}. Pass `DataLoader(dataset, batch_size=128)`."
    elif not hasattr(dataloader, "__iter__") and not hasattr(dataloader, "__getitem__"):
        found = f"{type(dataloader).__name__}."
    else:
        return
    raise TypeError(f"Expected `dataloader` to be an iterable of batches but got {found}")


def iterate(
    model: nn.Module,
    dataloader: Iterable[Any],
    batch_fn: Callable[..., Any] | None,
    sample: SpreadSample,
    seed: int,
    progress: bool,
) -> Generator[tuple[Tensor, Tensor | None, str | None, dict[str, Tensor]], None, None]:
    """Go through a loader, with a random state of its own, and let a sample pick from what comes.

    It gives inputs, labels, the name of the inputs in the batch and its other entries.

    A caller that stops early must close the iterator: until then, the model stays in the sandbox.
    """
    number = 0
    # A loader that shuffles gives every model the same order, and the caller's random state is left alone
    with sandbox(model, seed=seed), _restored_generators(dataloader):
        for batch in tqdm(dataloader, desc="data", leave=False, disable=not progress):
            x, y = read_batch(batch, batch_fn)
            if len(x) == 0:
                continue
            name, extras = read_extras(batch, batch_fn, len(x))
            sample.add(np.arange(number, number + len(x)), x, y, extras)
            number += len(x)
            yield x, y, name, extras


def collect(
    model: nn.Module,
    dataloader: Iterable[Any],
    batch_fn: Callable[..., Any] | None,
    size: int | None,
    seed: int,
    progress: bool,
    forward: Callable[..., Any] | None = None,
) -> tuple[Samples, ExtraInputs | None]:
    """Collect a sample with labels that is spread over a loader.

    Returns:
        The sample, and how ``forward``, by default the model, takes other entries of a batch, if it does.

    Raises:
        ValueError: If the loader is empty or has no labels.

    """
    sample = SpreadSample(2**62 if size is None else size, loader_share(dataloader).total, seed)
    names = [batch[2] for batch in iterate(model, dataloader, batch_fn, sample, seed, progress)]
    extra = None
    if names:
        extra = find_extra_inputs(forward or model, names[0], (sample.extras or [{}])[0])
    samples = FixedSample(sample, names=() if extra is None else extra.names).samples
    if len(samples.x) == 0:
        raise ValueError(EMPTY)
    return samples._replace(y=samples.labels()), extra


@contextmanager
def _restored_generators(dataloader: Any) -> Iterator[None]:
    """Restore the random generators of a loader afterwards."""
    owners = (dataloader, getattr(dataloader, "sampler", None))
    generators = [g for g in (getattr(owner, "generator", None) for owner in owners) if isinstance(g, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


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
