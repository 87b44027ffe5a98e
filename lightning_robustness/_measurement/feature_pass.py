import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import MeanMetric, MetricCollection

from lightning_robustness._measurement.rows import Rows
from lightning_robustness._model.batch import Batch, check_label_range
from lightning_robustness._model.head import HeadCall
from lightning_robustness._numbers import at_least_float32, read_clock
from lightning_robustness._processes import Processes
from lightning_robustness.metrics import ROBY, RobustnessDifferenceIndex
from lightning_robustness.metrics._base import Storage

# Kinds of outputs: RDI is not compared between them. A network of constant outputs has no RDI
LOGITS, LOG_PROBABILITIES, CONSTANT = "logits", "log-probabilities", "constant"
OUTPUT_WARNINGS = {
    LOG_PROBABILITIES: "the outputs are log-probabilities (log_softmax), whose RDI differs from the RDI of the "
    "logits. It is not comparable with networks that return logits: return the input of the softmax, or pass a "
    "`forward_fn=` that does.",
    CONSTANT: "the outputs are the same for all samples, so the network has collapsed. RDI and the Fisher information, "
    "which would be the best there are, are left out.",
}
# Spread of logits, relative to the largest, below which they are constant; sum of probabilities around 1
_COLLAPSED, _NORMALIZED = 1e-6, 1e-3
OUTPUT = "output"
_MARGINS = ("y", "right", "margin")


class Features(NamedTuple):
    """Results of a pass over all samples: values, mean distances within each class, and the margin of each sample.

    A margin is the probability of the true class less the largest other one; its rows also have the label, and whether
    it is predicted. ``outputs`` is the kind of output that the network returns.
    """

    values: dict[str, float]
    distances: dict[str, Tensor]
    margins: Rows
    seconds: float
    outputs: str = LOGITS


class FeaturePass:
    """RDI, ROBY, clean accuracy and margins, from the embedding and the logits of every sample.

    RDI and ROBY are metric states and no rows: the features of a large data set would not fit into memory.
    """

    def __init__(
        self,
        num_classes: int,
        storage: Storage,
        device: torch.device,
        has_embedding: bool = True,
        roby_p: float = 2.0,
    ) -> None:
        self._num_classes = num_classes
        self._has_embedding = has_embedding
        self._rdi = RobustnessDifferenceIndex(num_classes, storage=storage).to(device)
        rdi = RobustnessDifferenceIndex(num_classes, storage=storage)
        roby = ROBY(num_classes, p=roby_p, storage=storage)
        # With the same distance both have the same state, which is kept once
        groups = [["rdi", "roby"]] if roby_p == 2 else [["rdi"], ["roby"]]
        self._embedding = MetricCollection({"rdi": rdi, "roby": roby}, compute_groups=groups).to(device)
        self._accuracy = MeanMetric().to(device)
        self._outputs: list[tuple[Tensor, dict[str, Tensor]]] = []
        self._extent: Tensor | None = None  # smallest and largest value of each logit, and of the log of their sum
        self._seconds = 0.0

    def add(self, batch: Batch, call: HeadCall) -> None:
        """Add the features of a batch."""
        with self.timed():
            embedding, logits = call
            preds = logits.argmax(dim=1)
            columns = {OUTPUT: summarize(logits)}
            if batch.y is not None:
                check_label_range(batch.y, self._num_classes)
                columns |= {"y": batch.y.long(), "right": preds == batch.y, "margin": _margins(logits, batch.y)}
            self._outputs.append((batch.positions, columns))
            if len(logits):
                known = [] if self._extent is None else [self._extent]
                self._extent = _join([*known, _extent(logits)])
            self._rdi.update(logits, preds)
            if self._has_embedding and embedding is not None:
                self._embedding.update(embedding, preds)
            self._accuracy.update(logits.new_zeros(0) if batch.y is None else (preds == batch.y).float())

    def compute(self, processes: Processes) -> Features:
        """Compute the values over all batches of all processes, which must all call it."""
        with self.timed(), warnings.catch_warnings():
            # A process may have no samples
            warnings.filterwarnings("ignore", message=".*called before the ``update`` method")
            rdi = self._rdi.compute_components()
            distances = {"rdi": rdi["distances"]}
            values = {"rdi": rdi["rdi"], "rdi_intra": rdi["intra"], "rdi_inter": rdi["inter"]}
            if self._has_embedding:
                metrics: dict[str, Any] = dict(self._embedding.items())
                roby = metrics["roby"].compute_components()
                distances["roby"] = roby["distances"]
                values["rdi_embedding"] = metrics["rdi"].compute_components()["rdi"]
                # Two classes are one pair, of which the normalised values are the same for every network
                if self._num_classes > 2 and int((rdi["counts"] > 0).sum()) != 2:
                    values |= {name: roby[name] for name in ("roby", "fsa", "fsd")}
            values["samples"] = rdi["counts"].sum()
            accuracy = self._accuracy.compute()  # always: other processes may have labels, and wait for this one
            if not accuracy.isnan():
                values["acc"] = accuracy
            margins = Rows.join(processes.gather([own for own in self._rows(_MARGINS) if own.columns]))
            kind = _kind(processes.gather(None if self._extent is None else self._extent.cpu()))
        if kind == CONSTANT:
            values = {name: value for name, value in values.items() if not name.startswith("rdi")}
        numbers = {name: value.item() for name, value in values.items()}
        return Features(numbers, distances, margins, self._seconds, kind)

    def outputs(self) -> Rows:
        """Return what tells outputs apart, and the label, of each sample of this process."""
        return Rows.join([self._rows((OUTPUT, "y"))])

    def _rows(self, names: Sequence[str]) -> list[Rows]:
        return [
            Rows(positions, {name: columns[name].cpu() for name in names if name in columns})
            for positions, columns in self._outputs
        ]

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of the block to the time of the features."""
        start = read_clock(self._accuracy.device)
        try:
            yield
        finally:
            self._seconds += read_clock(self._accuracy.device) - start


def summarize(logits: Tensor) -> Tensor:
    """Return two numbers per sample that tell outputs apart: its largest logit, and a mixture of all of them."""
    z = logits.to(at_least_float32(logits.dtype))
    weights = torch.arange(1, z.shape[1] + 1, device=z.device).to(z.dtype).cos()
    return torch.stack([z.amax(dim=1), (z * weights / weights.norm()).sum(dim=1)], dim=1)


def _extent(logits: Tensor) -> Tensor:
    z = logits.float()
    return torch.stack(torch.cat([z, z.logsumexp(dim=1, keepdim=True)], dim=1).aminmax(dim=0))


def _join(extents: list[Tensor]) -> Tensor:
    lows, highs = torch.stack(extents).unbind(dim=1)
    return torch.stack([lows.amin(dim=0), highs.amax(dim=0)])


def _kind(extents: Iterable[Tensor | None]) -> str:
    """Return the kind of outputs, given their extents in all processes."""
    known = [extent for extent in extents if extent is not None]
    if not known:
        return LOGITS
    joined = _join(known)
    z = joined[:, :-1]
    if (z[1] - z[0]).max() <= _COLLAPSED * z.abs().max():
        return CONSTANT
    return LOG_PROBABILITIES if joined[:, -1].abs().max() < _NORMALIZED else LOGITS


def _margins(logits: Tensor, y: Tensor) -> Tensor:
    """Return the probability of each true class less the largest other one."""
    p = logits.float().softmax(dim=1)
    own = p.gather(1, y.long().unsqueeze(1)).squeeze(1)
    return own - p.scatter(1, y.long().unsqueeze(1), -1.0).amax(dim=1)
