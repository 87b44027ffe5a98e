"""Parts of a measurement, shared by the monitor and ``evaluate`` so that their values agree.

A meter takes its share of the samples in ``update``, in every process, and returns the values over all processes in
``compute``. Only ``compute`` talks to the other processes.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_robustness._measurement.boundary_curve import BoundaryCurve
from lightning_robustness._measurement.keys import Part
from lightning_robustness._measurement.subject import Samples, Subject


class Stopwatch:
    """Seconds spent in a part of a measurement."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add the time that the block takes."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds += perf_counter() - start


class SampleMeter(Stopwatch, ABC):
    """A part that measures a fixed number of samples, without attacks."""

    name: Part
    title: str
    label: str
    batch_size: int | None = None

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def update(self, subject: Subject, samples: Samples) -> None:
        """Measure samples."""
        self.to(subject.device)
        with self.running():
            for batch in subject.batches(samples, self.title, self.batch_size):
                self.measure(subject, batch)

    @abstractmethod
    def to(self, device: torch.device) -> None:
        """Keep what is measured on a device, the same kind in all processes, also in one without samples."""

    @abstractmethod
    def measure(self, subject: Subject, batch: Samples) -> None:
        """Measure a batch, as ``Subject.batches`` gives it."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return what was measured, for ``add``."""

    @abstractmethod
    def add(self, state: Mapping[str, Tensor]) -> None:
        """Add what another meter with the same settings measured."""

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """Return the values over all samples of all processes; empty without samples."""

    @abstractmethod
    def describe(self) -> str:
        """Describe the settings."""

    def per_sample(self) -> dict[str, list[float]]:
        """Return the values of each sample after ``compute``, where they are kept."""
        return {}

    def histograms(self) -> dict[str, Tensor]:
        """Return distributions to show after ``compute``, by the tags of their histograms."""
        return {}

    def curve(self) -> BoundaryCurve | None:
        """Return robust accuracy to first order over budgets after ``compute``, where it is measured."""
        return None

    def rehearse(self, subject: Subject, samples: Samples) -> None:
        """Check on a few samples that the model can be measured; the meter must not be used afterwards."""


@contextmanager
def without_update_warning() -> Iterator[None]:
    """Let metrics compute that got their state from elsewhere, or in a process without samples."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*called before the ``update`` method")
        yield


def gather(rows: Tensor) -> Tensor:
    """Concatenate the rows of all processes, in the order of their ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return rows
    return torch.cat(gather_all_tensors(rows))
