from typing import Protocol

from torch import Tensor

from lightning_robustness._measurement.meters import Meter
from lightning_robustness._measurement.rows import Rows
from lightning_robustness._measurement.samples import Samples
from lightning_robustness._measurement.subject import Subject
from lightning_robustness._numbers import read_clock
from lightning_robustness._processes import Processes


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
