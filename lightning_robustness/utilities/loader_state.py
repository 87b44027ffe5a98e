from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


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
