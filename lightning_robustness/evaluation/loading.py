"""Draw samples from a loader, and move a model to a device temporarily."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_robustness.evaluation.shares import OwnShare
from lightning_robustness.utilities.batch import read_batch, read_extras
from lightning_robustness.utilities.loader_state import kept_generators
from lightning_robustness.utilities.sample import SpreadSample
from lightning_robustness.utilities.sandbox import sandbox

EMPTY = "Expected `dataloader` to hold at least one sample but it is empty."


def check_loader(dataloader: Any) -> None:
    """Check that there is a loader.

    Raises:
        TypeError: If the loader is a data module, a data set, or not iterable.

    """
    if hasattr(dataloader, "test_dataloader"):
        found = f"the data module {type(dataloader).__name__}. Pass one of its loaders, such as `test_dataloader()`."
    elif isinstance(dataloader, Dataset) and not isinstance(dataloader, IterableDataset):
        found = f"the data set {type(dataloader).__name__}. Pass `DataLoader(dataset, batch_size=128)`."
    elif isinstance(dataloader, str | Mapping) or not (
        hasattr(dataloader, "__iter__") or hasattr(dataloader, "__getitem__")
    ):
        found = f"{type(dataloader).__name__}."
    else:
        return
    raise TypeError(f"Expected `dataloader` to be an iterable of batches but got {found}")


class LoadedBatch(NamedTuple):
    """A batch of a loader.

    Args:
        x: Inputs.
        y: Labels, or None if there are none.
        name: Name of the inputs in the batch, if they have one.
        extras: Other entries of the batch, by name.
        positions: Position of each sample in the order of the loader.

    """

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
