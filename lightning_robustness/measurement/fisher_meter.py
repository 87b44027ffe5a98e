import torch
from torch import Tensor
from typing_extensions import override

from lightning_robustness.functional.fisher_spectral_norm import FisherMethod
from lightning_robustness.measurement.keys import Part
from lightning_robustness.measurement.meter import SampleMeter, gather
from lightning_robustness.measurement.subject import Samples, Subject
from lightning_robustness.metrics import FisherSpectralNorm
from lightning_robustness.utilities.input_space import InputSpace
from lightning_robustness.utilities.precision import accumulation_dtype

# The norms of saturated samples are so small that they would stretch the axis of a histogram
_SMALLEST_LAMBDA = 1e-12
_COMPONENTS = {"fim": "mean", "fim_inverse": "inverse", "fim_geometric": "geometric", "lipschitz": "lipschitz"}


class FisherMeter(SampleMeter):
    """The spectral norm of the Fisher information and, where the Jacobian is exact, the Lipschitz constant.

    Args:
        size: Number of samples over all processes.
        method: How to compute it.
        input_space: Range and normalisation of the inputs.
        seed: Seed of random vectors, for methods that draw some.

    """

    name: Part = "fim"
    title = "Fisher information"
    label = "the Fisher information"

    def __init__(self, size: int, method: FisherMethod, input_space: InputSpace, seed: int) -> None:
        super().__init__(size)
        self._metric = FisherSpectralNorm(method=method, input_space=input_space, seed=seed)
        self._values: list[Tensor] = []
        self.values = torch.zeros(0)

    @override
    def update(self, subject: Subject, samples: Samples) -> None:
        self._metric.to(subject.device)
        with self.running():
            for batch in subject.batches(samples, self.title):
                self._metric.update(subject.forward, batch.x)
                self._values.append(self._metric.last_values)

    @override
    def compute(self) -> dict[str, float]:
        with self.running():
            device = self._metric.device
            # A process without samples does not know in which dtype the others have theirs
            none = torch.zeros(0, dtype=accumulation_dtype(device), device=device)
            self.values = gather(torch.cat([none, *self._values]))
            parts = self._metric.compute_components()
            if not parts["count"]:
                return {}
            values = {name: parts[part].item() for name, part in _COMPONENTS.items() if part in parts}
            return values | {"samples_fim": parts["count"].item()}

    @override
    def describe(self) -> str:
        return f"at most {self.size} samples, method {self._metric.method!r}"

    @override
    def per_sample(self) -> dict[str, list[float]]:
        return {"fim": self.values.tolist()}

    @override
    def histograms(self) -> dict[str, Tensor]:
        return {"lambda_log10": self.values.float().clamp(min=_SMALLEST_LAMBDA).log10()}

    @override
    def rehearse(self, subject: Subject, samples: Samples) -> None:
        try:
            self.update(subject, samples)
        except Exception as error:
            raise ValueError(
                f"The Fisher information cannot be computed: {error} Leave it out with `fim_samples=0`, or pass "
                '`fim_method="blackbox"`, which needs no gradients.'
            ) from error
