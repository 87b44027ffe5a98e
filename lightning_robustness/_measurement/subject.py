from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_robustness._isolation.sandbox import sandbox
from lightning_robustness._measurement.samples import Samples
from lightning_robustness._model.access import Access, ExtraInputs, embed_and_call, pick_entry
from lightning_robustness._model.batch import Batch
from lightning_robustness._model.route import Route
from lightning_robustness.input_space import InputSpace


@dataclass(frozen=True)
class Subject:
    """A model under measurement: how its logits are computed, and how to go through its samples.

    What else the model takes from a batch, and the route to its logits, are found out on the first batch.
    """

    model: nn.Module
    access: Access
    forward: Callable[..., Any]
    device: torch.device
    batch_size: int = 128
    seed: int = 0
    progress: bool = False
    extra: ExtraInputs | None = None
    route: Route | None = None

    @property
    def input_space(self) -> InputSpace:
        """Range and normalisation of the inputs."""
        return self.access.input_space

    @property
    def extra_names(self) -> tuple[str, ...]:
        """Names of the other entries of a batch that the model takes."""
        return () if self.extra is None else self.extra.names

    def logits_of(self, batch: Batch) -> Callable[..., Any]:
        """Return the callable from inputs to logits, with the other entries of a batch."""
        forward = self.forward if self.extra is None else self.extra.bind(self.forward, batch.extras)
        return pick_entry(forward, None if self.route is None else self.route.entry)

    def logits_of_loaded(self, batch: Batch) -> Callable[..., Any]:
        """Return the callable from what the loader gives to logits."""
        forward, embed_fn = self.logits_of(batch), self.access.embed_fn
        return forward if embed_fn is None else partial(embed_and_call, forward, partial(embed_fn, self.model))

    def embedded(self, x: Tensor) -> Tensor:
        """Return the inputs of ``forward`` for what the loader gives."""
        if self.access.embed_fn is None:
            return self.access.as_float(x)
        embed = partial(self.access.embed_fn, self.model)
        with sandbox(embed, x) as (x,), torch.no_grad():
            return embed(x).clone()

    def batches(self, samples: Samples, title: str, size: int | None = None) -> Iterator[Batch]:
        """Go through samples in batches of inputs of ``forward``, on the device, with a progress bar in terminals."""
        batches = samples.batches(size or self.batch_size)
        for batch in tqdm(batches, desc=title, leave=False, disable=None if self.progress else True):
            moved = batch.to(self.device)
            yield moved._replace(x=self.embedded(moved.x))
