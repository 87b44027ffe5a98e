from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from lightning_robustness._measurement.meters import Meter
from lightning_robustness._measurement.rows import Rows
from lightning_robustness._measurement.subject import Subject
from lightning_robustness._model.batch import Batch
from lightning_robustness.functional import clever_score


@dataclass(frozen=True)
class CleverMeter(Meter):
    """Measure CLEVER, which takes thousands of gradients per sample."""

    size: int
    radius: float = 2.0

    name = "clever"
    title = "CLEVER"
    label = "CLEVER"
    batch_size = 1  # so that the progress bar moves

    @override
    def measure(self, subject: Subject, batch: Batch) -> Mapping[str, Tensor]:
        forward, space = subject.logits_of(batch), subject.input_space
        return {"score": clever_score(forward, batch.x, self.radius, input_space=space, seed=subject.seed)}

    @override
    def values(self, rows: Rows) -> dict[str, float]:
        return {"clever": rows["score"].double().mean().float().item(), "samples_clever": len(rows)}

    @override
    def describe(self) -> str:
        return f"at most {self.size} samples, radius {self.radius:g}"
