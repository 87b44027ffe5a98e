from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from lightning_robustness._measurement.assisted import Assisted, BoundaryCurve
from lightning_robustness._measurement.rows import Rows
from lightning_robustness._measurement.samples import Samples
from lightning_robustness._measurement.subject import Subject
from lightning_robustness._model.batch import Batch
from lightning_robustness._numbers import read_clock
from lightning_robustness._processes import Processes


class Meter(ABC):
    """A map from samples to rows, and from rows to values, without a state of its own.

    Rows are called ``name``; ``title`` is shown in tables and progress bars, ``label`` stands within a sentence.
    ``per_sample`` has the columns of its rows that reports list, by their names there. Rows of an interrupted
    measurement count where ``keeps_partial``.
    """

    name: str
    title: str
    label: str
    size: int
    batch_size: int | None = None
    keeps_partial: bool = True
    per_sample: Mapping[str, str] = {}

    @abstractmethod
    def measure(self, subject: Subject, batch: Batch) -> Mapping[str, Tensor]:
        """Measure a batch: columns with one entry per sample."""

    def values(self, rows: Rows) -> dict[str, float]:
        """Return the values of all samples, of which there is at least one."""
        return {}

    def histograms(self, rows: Rows) -> dict[str, Tensor]:
        """Return distributions to show, by the tags of their histograms."""
        return {}

    def curve(self, rows: Rows, estimate: Callable[[Rows, Tensor], Assisted]) -> BoundaryCurve | None:
        """Return robust accuracy to first order over budgets, estimated from rows, where it is measured."""
        return None

    def describe(self) -> str:
        """Describe the settings."""
        return f"at most {self.size} samples"

    def rehearse(self, subject: Subject, batch: Batch) -> None:  # noqa: B027
        """Try a few samples, so that what cannot be measured is known before the work begins."""


class Interrupted(KeyboardInterrupt):
    """The user interrupted a measurement; rows are there of what was finished, where a part of it says something."""

    def __init__(self, label: str, rows: Rows | None) -> None:
        super().__init__(label)
        self.label = label
        self.rows = rows


class Finished(Protocol):
    """Rows of this run and of earlier ones. Only the first process has the rows of earlier runs."""

    def rows(self, name: str) -> list[Rows]:
        """Return what earlier runs have finished."""

    def positions(self, name: str) -> Tensor:
        """Return the positions of the samples that they have finished, in every process."""

    def save(self, name: str, rows: Rows) -> None:
        """Keep rows."""


def measure(
    meter: Meter, subject: Subject, samples: Samples, processes: Processes, finished: Finished | None = None
) -> Rows:
    """Measure the samples of all processes, batch by batch; raise in all processes or in none."""
    done = [] if finished is None else finished.rows(meter.name)
    rest = samples if finished is None else samples.without(finished.positions(meter.name))
    try:
        with processes.step():
            for batch in subject.batches(rest, meter.title, meter.batch_size):
                processes.poll()
                start = read_clock(subject.device)
                columns = {name: value.detach().cpu() for name, value in meter.measure(subject, batch).items()}
                done.append(Rows(batch.positions, columns, read_clock(subject.device) - start))
                if finished is not None:
                    finished.save(meter.name, done[-1])
    except KeyboardInterrupt:
        rows = Rows.join(processes.gather(done))
        raise Interrupted(meter.label, rows if meter.keeps_partial else None) from None
    return Rows.join(processes.gather(done))
