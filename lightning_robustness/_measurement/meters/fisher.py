from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from lightning_robustness._arguments import check_number
from lightning_robustness._measurement.boundary_curve import BoundaryCurve
from lightning_robustness._measurement.keys import Part
from lightning_robustness._measurement.meters import SampleMeter, gather
from lightning_robustness._measurement.subject import Samples, Subject
from lightning_robustness._numbers import accumulation_dtype
from lightning_robustness.functional.boundary_distance import BoundaryNorm, quantile, share_beyond
from lightning_robustness.functional.fisher_spectral_norm import FisherMethod
from lightning_robustness.input_space import InputSpace
from lightning_robustness.metrics import FisherSpectralNorm

# The norms of saturated samples are so small that they would stretch the axis of a histogram
_SMALLEST_LAMBDA = 1e-12
_NOT_MEASURED = torch.nan  # a distance, which may be infinite but is never NaN
_ROWS = "rows"
_COMPONENTS = {"fim": "mean", "fim_inverse": "inverse", "fim_geometric": "geometric", "lipschitz": "lipschitz"}


class FisherMeter(SampleMeter):
    """Fisher information, Lipschitz constant and distance to the boundary, from one Jacobian per sample.

    The Lipschitz constant needs all rows of the Jacobian, so it is measured where there are few classes. The distance
    to the decision boundary, to first order, needs gradients, so the method ``"blackbox"`` leaves it out.
    """

    name: Part = "fim"
    title = "Fisher information"
    label = "the Fisher information"

    def __init__(
        self,
        size: int,
        method: FisherMethod,
        input_space: InputSpace,
        seed: int,
        norm: BoundaryNorm = "linf",
        eps: float | None = None,
    ) -> None:
        super().__init__(size)
        self._metric = FisherSpectralNorm(method=method, input_space=input_space, seed=seed, boundary=norm)
        self._norm, self._eps = norm, None if eps is None else check_number("eps", eps)
        self._rows: list[Tensor] = []
        self._curve: BoundaryCurve | None = None
        self.values = self.distances = torch.zeros(0)

    @override
    def to(self, device: torch.device) -> None:
        self._metric.to(device)

    @override
    def measure(self, subject: Subject, batch: Samples) -> None:
        self._metric.update(subject.forward, batch.x, batch.y)
        values, distances = self._metric.last_values, self._metric.last_boundary
        distances = torch.full_like(values, _NOT_MEASURED) if distances is None else distances
        has_label = torch.full_like(values, float(batch.y is not None))
        self._rows.append(torch.stack([values, distances, has_label], dim=1))

    @override
    def state(self) -> dict[str, Tensor]:
        return {_ROWS: torch.cat(self._rows), **self._metric.metric_state}  # type: ignore[dict-item]

    @override
    def add(self, state: Mapping[str, Tensor]) -> None:
        state = {name: value.to(self._metric.device) for name, value in state.items()}
        self._rows.append(state.pop(_ROWS))
        self._metric.merge_state(state)

    @override
    def compute(self) -> dict[str, float]:
        with self.running():
            device = self._metric.device
            # A process without samples does not know in which dtype the others have theirs
            none = torch.zeros(0, 3, dtype=accumulation_dtype(device), device=device)
            self.values, distances, has_label = gather(torch.cat([none, *self._rows])).unbind(dim=1)
            self.distances = distances[~distances.isnan()]
            parts = self._metric.compute_components()
            if not parts["count"]:
                return {}
            values = {name: parts[part].item() for name, part in _COMPONENTS.items() if part in parts}
            if len(self.distances):
                values["boundary"] = quantile(self.distances, 0.5).item()
                if self._eps is not None and has_label.all():
                    values["boundary_acc"] = share_beyond(self.distances, [self._eps])[0].item()
                    self._curve = BoundaryCurve.of(self.distances, self._norm, self._eps)
            return values | {"samples_fim": parts["count"].item()}

    @override
    def describe(self) -> str:
        budget = "" if self._eps is None else f", eps {self._eps:.4g}"
        return f"at most {self.size} samples, method {self._metric.method!r}, boundary in {self._norm}{budget}"

    @override
    def per_sample(self) -> dict[str, list[float]]:
        distances = {"boundary": self.distances.tolist()} if len(self.distances) else {}
        return {"fim": self.values.tolist(), **distances}

    @override
    def histograms(self) -> dict[str, Tensor]:
        return {
            "lambda_log10": self.values.float().clamp(min=_SMALLEST_LAMBDA).log10(),
            "boundary_distance": self.distances.float(),
        }

    @override
    def curve(self) -> BoundaryCurve | None:
        return self._curve

    @override
    def rehearse(self, subject: Subject, samples: Samples) -> None:
        try:
            self.update(subject, samples)
        except Exception as error:
            raise ValueError(
                f"The Fisher information cannot be computed: {error} Leave it out with `fim_samples=0`, or pass "
                '`fim_method="blackbox"`, which needs no gradients.'
            ) from error
