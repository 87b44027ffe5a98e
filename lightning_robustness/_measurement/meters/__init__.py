from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from torch import Tensor

from lightning_robustness._measurement.assisted import Assisted, BoundaryCurve
from lightning_robustness._measurement.rows import Rows
from lightning_robustness._measurement.subject import Subject
from lightning_robustness._model.batch import Batch


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
