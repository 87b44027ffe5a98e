"""Parts of an evaluation, measured chunk by chunk in all processes."""

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_robustness._measurement.subject import Samples, Subject
from lightning_robustness._processes import Processes
from lightning_robustness.evaluation.resume import Chunk, Records


class Finished(NamedTuple):
    """Chunks that this process has, and whether one process was interrupted."""

    chunks: list[Chunk]
    is_interrupted: bool

    @property
    def seconds(self) -> float:
        """Time that the chunks took."""
        return sum(chunk.seconds for chunk in self.chunks)


class Rows(NamedTuple):
    """Results per sample, in the order of the positions."""

    positions: Tensor
    values: dict[str, Tensor]
    seconds: float


def measure_chunks(
    processes: Processes,
    records: Records,
    part: str,
    subject: Subject,
    samples: Samples,
    measure: Callable[[Samples], Mapping[str, Tensor]],
    title: str,
    batch_size: int | None = None,
) -> Finished:
    """Measure batch by batch what earlier runs have not finished, and keep each result."""
    chunks = records.chunks(part)
    rest = (~torch.isin(samples.positions, records.positions(part))).nonzero().squeeze(1)
    try:
        with processes.step():
            for batch in subject.batches(samples.select(rest), title, batch_size):
                processes.poll()
                start = perf_counter()
                values = {name: value.detach().cpu() for name, value in measure(batch).items()}
                chunks.append(Chunk(batch.positions, perf_counter() - start, values))
                records.save_chunk(part, chunks[-1])
    except KeyboardInterrupt:
        return Finished(chunks, is_interrupted=True)
    return Finished(chunks, is_interrupted=False)


def gather_rows(processes: Processes, finished: Finished) -> Rows:
    """Return the results of all processes, where each chunk has one row per sample."""
    everything = processes.gather(finished)
    chunks = [chunk for part in everything for chunk in part.chunks]
    positions = torch.cat([torch.zeros(0, dtype=torch.long), *(chunk.positions for chunk in chunks)])
    order = positions.argsort()
    names = chunks[0].values if chunks else ()
    values = {name: torch.cat([chunk.values[name] for chunk in chunks])[order] for name in names}
    return Rows(positions[order], values, max(part.seconds for part in everything))
