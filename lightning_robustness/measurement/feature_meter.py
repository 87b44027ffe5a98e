import torch
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_robustness.measurement.meter import Stopwatch
from lightning_robustness.metrics import ROBY, RobustnessDifferenceIndex
from lightning_robustness.metrics.class_statistics import Mode
from lightning_robustness.utilities.head import HeadCall


class FeatureMeter(Stopwatch):
    """RDI, ROBY and clean accuracy, from the embedding and the logits of every sample.

    Args:
        num_classes: Number of classes.
        mode: How RDI and ROBY keep their state.
        device: Where the states live.

    """

    def __init__(self, num_classes: int, mode: Mode, device: torch.device) -> None:
        super().__init__()
        self._rdi = RobustnessDifferenceIndex(num_classes, mode=mode).to(device)
        self._rdi_embedding = RobustnessDifferenceIndex(num_classes, mode=mode).to(device)
        self._roby = ROBY(num_classes, mode=mode).to(device)
        self._accuracy = MeanMetric().to(device)
        self.distances: dict[str, Tensor] = {}

    def update(self, call: HeadCall, y: Tensor | None) -> None:
        """Add a batch: embedding, logits and, if there are any, true labels."""
        with self.running():
            preds = call.logits.argmax(dim=1)
            self._rdi.update(call.logits, preds)
            self._rdi_embedding.update(call.embedding, preds)
            self._roby.update(call.embedding, preds)
            self._accuracy.update(call.logits.new_zeros(0) if y is None else (preds == y).float())

    def compute(self) -> dict[str, float]:
        """Return the values over all batches of all processes, and keep the mean distances within each class."""
        with self.running():
            rdi, embedding = self._rdi.compute_components(), self._rdi_embedding.compute_components()
            roby = self._roby.compute_components()
            self.distances = {"rdi": rdi["distances"], "roby": roby["distances"]}
            values = {
                "rdi": rdi["rdi"],
                "rdi_intra": rdi["intra"],
                "rdi_inter": rdi["inter"],
                "rdi_embedding": embedding["rdi"],
                **{name: roby[name] for name in ("roby", "fsa", "fsd")},
                "samples": rdi["counts"].sum(),
            }
            accuracy = self._accuracy.compute()  # always: other processes may have labels, and wait for this one
            if not accuracy.isnan():
                values["acc"] = accuracy
            return {name: value.item() for name, value in values.items()}
