from typing_extensions import override

from lightning_robustness.measurement.keys import Part
from lightning_robustness.measurement.meter import SampleMeter
from lightning_robustness.measurement.subject import Samples, Subject
from lightning_robustness.metrics import CleverScore
from lightning_robustness.utilities.input_space import InputSpace


class CleverMeter(SampleMeter):
    """Measure CLEVER, which takes thousands of gradients per sample.

    Args:
        size: Number of samples over all processes.
        radius: Radius of the ball around each sample, in un-normalised units: no score is larger.
        input_space: Range and normalisation of the inputs.
        seed: Seed of the points that are drawn in the ball.

    """

    name: Part = "clever"
    title = "CLEVER"
    label = "CLEVER"

    def __init__(self, size: int, radius: float, input_space: InputSpace, seed: int) -> None:
        super().__init__(size)
        self._metric = CleverScore(radius, input_space=input_space, seed=seed)

    @override
    def update(self, subject: Subject, samples: Samples) -> None:
        self._metric.to(subject.device)
        with self.running():
            # One at a time, so that the progress bar moves
            for batch in subject.batches(samples, self.title, batch_size=1):
                self._metric.update(subject.forward, batch.x)

    @override
    def compute(self) -> dict[str, float]:
        with self.running():
            parts = self._metric.compute_components()
            return {"clever": parts["mean"].item(), "samples_clever": parts["count"].item()} if parts["count"] else {}

    @override
    def describe(self) -> str:
        return f"at most {self.size} samples, radius {self._metric.radius:g}"
