"""Samples from a loader, and a model where it is needed, for as long as it is needed."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_robustness.utilities.batch import read_batch
from lightning_robustness.utilities.loader_share import loader_share
from lightning_robustness.utilities.sample import SpreadSample
from lightning_robustness.utilities.sandbox import sandbox

EMPTY = "Expected a loader with at least one sample but it is empty."
NO_LABELS = (
    "Expected batches with labels, which attacks need, but got none. Pass `batch_fn=`, a callable that takes a batch "
    "and returns inputs and labels."
)


def iterate(
    model: nn.Module,
    dataloader: Iterable[Any],
    batch_fn: Callable[..., Any] | None,
    sample: SpreadSample,
    seed: int,
    progress: bool,
) -> Generator[tuple[Tensor, Tensor | None], None, None]:
    """Go through a loader, with a random state of its own, and let a sample pick from what comes.

    Whoever does not go to the end has to close it: until then, the model is in the sandbox.
    """
    number = 0
    # A loader that shuffles gives every model the same order, and leaves the random state of the caller alone
    with sandbox(model, seed=seed):
        for batch in tqdm(dataloader, desc="data", leave=False, disable=not progress):
            x, y = read_batch(batch, batch_fn)
            sample.add(np.arange(number, number + len(x)), x, y)
            number += len(x)
            yield x, y


def collect(
    model: nn.Module,
    dataloader: Iterable[Any],
    batch_fn: Callable[..., Any] | None,
    size: int | None,
    seed: int,
    progress: bool,
) -> tuple[Tensor, Tensor]:
    """Collect a sample of inputs and labels that is spread over a loader.

    Raises:
        ValueError: If the loader is empty or has no labels.

    """
    sample = SpreadSample(2**62 if size is None else size, loader_share(dataloader).total, seed)
    for _ in iterate(model, dataloader, batch_fn, sample, seed, progress):
        pass
    x, y = sample.collect()
    if len(x) == 0:
        raise ValueError(EMPTY)
    if y is None:
        raise ValueError(NO_LABELS)
    return x, y


@contextmanager
def on_device(model: nn.Module, device: str | torch.device | None) -> Iterator[torch.device]:
    """Move a model to a device and, in the end, back to where it was; without a device it stays."""
    own = next((p.device for p in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    if device is None or torch.device(device) == own:
        yield own
        return
    model.to(device)
    try:
        yield torch.device(device)
    finally:
        model.to(own)
