from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_robustness._isolation.sandbox import sandbox
from lightning_robustness._model.access import ExtraInputs, embed_and_call
from lightning_robustness._model.batch import require_labels
from lightning_robustness.input_space import InputSpace


class Samples(NamedTuple):
    """Samples to measure."""

    x: Any
    y: Tensor | None
    positions: Tensor
    extras: Sequence[Mapping[str, Tensor]] | None = None

    def only(self, names: Iterable[str]) -> "Samples":
        """Leave out the other entries that a model does not take."""
        names = tuple(names)
        if not names or self.extras is None:
            return self._replace(extras=None)
        return self._replace(extras=[{name: row[name] for name in names if name in row} for row in self.extras])

    def group(self, row: int) -> tuple[Any, ...]:
        """Return what a sample has in common with those that it can be measured together with."""
        extras = {} if self.extras is None else self.extras[row]
        entries = (
            (name, tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().tobytes())
            for name, value in sorted(extras.items())
        )
        return tuple(self.x[row].shape), *entries

    def select(self, rows: Tensor) -> "Samples":
        """Return some of the samples, by their rows."""
        return Samples(
            self.x[rows] if isinstance(self.x, Tensor) else [self.x[row] for row in rows],
            None if self.y is None else self.y[rows],
            self.positions[rows],
            None if self.extras is None else [self.extras[row] for row in rows],
        )

    def labels(self) -> Tensor:
        """Return the labels, which attacks need."""
        return require_labels(self.y, "attacks")


@dataclass(frozen=True)
class Subject:
    """The model that meters measure, and how they go through its samples."""

    forward: Callable[..., Any]
    input_space: InputSpace
    device: torch.device
    batch_size: int = 128
    seed: int = 0
    progress: bool = False
    extra: ExtraInputs | None = None
    embed: Callable[..., Any] | None = None

    def batches(self, samples: Samples, title: str, batch_size: int | None = None) -> Iterator[Samples]:
        """Go through samples in batches on the device, with a progress bar."""
        parts = _split(samples, batch_size or self.batch_size)
        for rows in tqdm(parts, desc=title, leave=False, disable=not self.progress):
            x = samples.x[rows] if isinstance(samples.x, Tensor) else torch.stack([samples.x[row] for row in rows])
            if self.extra is not None and samples.extras is not None:
                first = samples.extras[int(rows[0])]  # those of the others are equal
                self.extra.values = {name: value.unsqueeze(0) for name, value in first.items()}
            y = None if samples.y is None else samples.y[rows].to(self.device)
            yield Samples(self.embedded(x.to(self.device)), y, samples.positions[rows])

    @property
    def from_loader(self) -> Callable[..., Any]:
        """Callable from what the loader gives to logits."""
        return self.forward if self.embed is None else partial(embed_and_call, self.forward, self.embed)

    def embedded(self, x: Tensor) -> Tensor:
        """Return the inputs of ``forward`` for what the loader gives."""
        if self.embed is None:
            return x
        with sandbox(self.embed, x) as (x,), torch.no_grad():
            return self.embed(x).clone()


def _split(samples: Samples, batch_size: int) -> list[Tensor]:
    """Split samples into batches, each of one shape and with the same other entries."""
    rows = torch.arange(len(samples.x))
    groups = [rows] if len(rows) else []
    if samples.extras is not None or not isinstance(samples.x, Tensor):
        groups = [torch.tensor(list(group)) for _, group in groupby(rows.tolist(), key=samples.group)]
    return [part for group in groups for part in group.split(batch_size)]
