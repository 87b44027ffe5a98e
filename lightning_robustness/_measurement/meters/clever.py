from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from lightning_robustness._measurement.keys import Part
from lightning_robustness._measurement.meters import SampleMeter
from lightning_robustness._measurement.subject import Samples, Subject
from lightning_robustness.input_space import InputSpace
from lightning_robustness.metrics import CleverScore


class CleverMeter(SampleMeter):
    """Measure CLEVER, which takes thousands of gradients per sample."""

    name: Part = "clever"
    title = "CLEVER"
    label = "CLEVER"
    batch_size = 1  # so that the progress bar moves

    def __init__(self, size: int, radius: float, input_space: InputSpace, seed: int) -> None:
        super().__init__(size)
        self._metric = CleverScore(radius, input_space=input_space, seed=seed)

    @override
    def to(self, device: torch.device) -> None:
        self._metric.to(device)

    @override
    def measure(self, subject: Subject, batch: Samples) -> None:
        self._metric.update(subject.forward, batch.x)

    @override
    def state(self) -> dict[str, Tensor]:
        return dict(self._metric.metric_state)  # type: ignore[arg-type]

    @override
    def add(self, state: Mapping[str, Tensor]) -> None:
        self._metric.merge_state({name: value.to(self._metric.device) for name, value in state.items()})

    @override
    def compute(self) -> dict[str, float]:
        with self.running():
            parts = self._metric.compute_components()
            return {"clever": parts["mean"].item(), "samples_clever": parts["count"].item()} if parts["count"] else {}

    @override
    def describe(self) -> str:
        return f"at most {self.size} samples, radius {self._metric.radius:g}"
