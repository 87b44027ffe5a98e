import torch
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_robustness._measurement.meters import Stopwatch
from lightning_robustness._model.batch import check_classes
from lightning_robustness._model.head import HeadCall
from lightning_robustness.metrics import ROBY, RobustnessDifferenceIndex
from lightning_robustness.metrics._base import Mode


class FeatureMeter(Stopwatch):
    """RDI, ROBY and clean accuracy, from the embedding and the logits of every sample."""

    def __init__(self, num_classes: int, mode: Mode, device: torch.device, has_embedding: bool = True) -> None:
        super().__init__()
        self._num_classes = num_classes
        self._has_embedding = has_embedding
        self._rdi = RobustnessDifferenceIndex(num_classes, mode=mode).to(device)
        self._rdi_embedding = RobustnessDifferenceIndex(num_classes, mode=mode).to(device)
        self._roby = ROBY(num_classes, mode=mode).to(device)
        self._accuracy = MeanMetric().to(device)
        self.distances: dict[str, Tensor] = {}

    def update(self, call: HeadCall, y: Tensor | None) -> None:
        """Add a batch: embedding and true labels, if there are any, and logits."""
        with self.running():
            if y is not None:
                check_classes(y, self._num_classes)
            preds = call.logits.argmax(dim=1)
            self._rdi.update(call.logits, preds)
            if self._has_embedding and call.embedding is not None:
                self._rdi_embedding.update(call.embedding, preds)
                self._roby.update(call.embedding, preds)
            self._accuracy.update(call.logits.new_zeros(0) if y is None else (preds == y).float())

    def compute(self) -> dict[str, float]:
        """Return the values over all batches of all processes, and keep the mean distances within each class."""
        with self.running():
            rdi = self._rdi.compute_components()
            self.distances = {"rdi": rdi["distances"]}
            values = {"rdi": rdi["rdi"], "rdi_intra": rdi["intra"], "rdi_inter": rdi["inter"]}
            if self._has_embedding:
                values |= self._compute_embedding(int((rdi["counts"] > 0).sum()))
            values["samples"] = rdi["counts"].sum()
            accuracy = self._accuracy.compute()  # always: other processes may have labels, and wait for this one
            if not accuracy.isnan():
                values["acc"] = accuracy
            return {name: value.item() for name, value in values.items()}

    def _compute_embedding(self, num_predicted: int) -> dict[str, Tensor]:
        roby = self._roby.compute_components()
        self.distances["roby"] = roby["distances"]
        values = {"rdi_embedding": self._rdi_embedding.compute_components()["rdi"]}
        # Two classes are one pair, of which the normalised values are the same for every network
        if self._num_classes > 2 and num_predicted != 2:
            values |= {name: roby[name] for name in ("roby", "fsa", "fsd")}
        return values
