from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from typing_extensions import override

from lightning_robustness._measurement.assisted import Assisted, BoundaryCurve
from lightning_robustness._measurement.meters import Meter
from lightning_robustness._measurement.rows import Rows
from lightning_robustness._measurement.subject import Subject
from lightning_robustness._model.access import NoGradientError
from lightning_robustness._model.batch import Batch
from lightning_robustness.functional._fisher_estimators import FisherComponents
from lightning_robustness.functional.boundary_distance import BoundaryNorm, quantile
from lightning_robustness.functional.fisher_spectral_norm import (
    FisherMethod,
    FisherSettings,
    fisher_and_boundary,
    fisher_means,
)

# The norms of saturated samples are so small that they would stretch the axis of a histogram
_SMALLEST_LAMBDA = 1e-12
_COMPONENTS = {"fim": "mean", "fim_inverse": "inverse", "fim_geometric": "geometric", "lipschitz": "lipschitz"}


@dataclass(frozen=True)
class FisherMeter(Meter):
    """Measure Fisher information, Lipschitz constant and distance to the boundary, from one Jacobian per sample.

    The Lipschitz constant needs all rows of the Jacobian, so it is measured where there are few classes; the distance
    needs gradients, so the method ``"blackbox"`` leaves it out.
    """

    size: int
    method: FisherMethod = "auto"
    norm: BoundaryNorm = "linf"
    eps: float | None = None

    name = "fim"
    title = "Fisher information"
    label = "the Fisher information"
    per_sample = {"fim": "spectral_norm", "boundary": "boundary"}  # noqa: RUF012

    @override
    def measure(self, subject: Subject, batch: Batch) -> Mapping[str, Tensor]:
        forward, space = subject.logits_of(batch), subject.input_space
        settings = FisherSettings(self.method, space, seed=subject.seed)
        components = fisher_and_boundary(forward, batch.x, settings, self.norm, batch.y)
        columns = {name: column for name, column in components._asdict().items() if column is not None}
        return columns if batch.y is None else columns | {"y": batch.y.long()}

    @override
    def values(self, rows: Rows) -> dict[str, float]:
        components = FisherComponents(**{name: rows[name] for name in FisherComponents._fields if name in rows.columns})
        means = fisher_means(components)
        values = {name: means[part].item() for name, part in _COMPONENTS.items() if part in means}
        if "boundary" in rows.columns:
            distances = rows["boundary"].double()
            values["boundary"] = quantile(distances, 0.5).item()
            if self.eps is not None and "y" in rows.columns:
                values["boundary_acc"] = values["boundary_acc_plain"] = (distances > self.eps).double().mean().item()
        return values | {"samples_fim": len(rows)}

    @override
    def histograms(self, rows: Rows) -> dict[str, Tensor]:
        histograms = {"lambda_log10": rows["spectral_norm"].float().clamp(min=_SMALLEST_LAMBDA).log10()}
        return histograms | ({"boundary_distance": rows["boundary"].float()} if "boundary" in rows.columns else {})

    @override
    def curve(self, rows: Rows, estimate: Callable[[Rows, Tensor], Assisted]) -> BoundaryCurve | None:
        if self.eps is None or not {"boundary", "y"} <= rows.columns.keys():
            return None
        return BoundaryCurve.of(rows["boundary"].double(), self.norm, self.eps, partial(estimate, rows))

    @override
    def describe(self) -> str:
        budget = "" if self.eps is None else f", eps {self.eps:.4g}"
        return f"at most {self.size} samples, method {self.method!r}, boundary in {self.norm}{budget}"

    @override
    def rehearse(self, subject: Subject, batch: Batch) -> None:
        try:
            self.measure(subject, batch)
        except Exception as error:
            message = f"The Fisher information cannot be computed: {str(error).rstrip('.')}."
            if self.method != "blackbox" and isinstance(error, (RuntimeError, NoGradientError)):
                message += (
                    ' Leave it out with `fim_samples=0`, or pass `fim_method="blackbox"`, which needs no gradients.'
                )
            raise ValueError(message) from error
