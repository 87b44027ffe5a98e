import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import MetricCollection

from lightning_robustness._measurement.rows import Rows
from lightning_robustness._model.batch import Batch, check_label_range
from lightning_robustness._model.head import HeadCall
from lightning_robustness._numbers import at_least_float32, read_clock
from lightning_robustness._processes import Processes
from lightning_robustness.attacks.masking import binomial_tail
from lightning_robustness.metrics import ROBY, RobustnessDifferenceIndex
from lightning_robustness.metrics._base import Storage

# Kinds of outputs: RDI is not compared between them. A network of constant outputs has no RDI
LOGITS, LOG_PROBABILITIES, CONSTANT = "logits", "log-probabilities", "constant"
OUTPUT_WARNINGS = {
    LOG_PROBABILITIES: "the outputs are log-probabilities (log_softmax), whose RDI differs from the RDI of the "
    "logits. It is not comparable with networks that return logits: return the input of the softmax, or pass a "
    "`forward_fn=` that does.",
    CONSTANT: "the outputs are the same for all samples, so the network has collapsed. RDI and the Fisher information "
    "are left out: by them, a constant network would be the most robust one.",
}
# Spread of logits, relative to the largest, below which they are constant
_COLLAPSED = 1e-6
# Largest log of the sum of probabilities, which rounding moves away from 0
_NORMALIZED, _NORMALIZED_IN_HALF = 1e-3, 3e-2
# Distance from the largest logit, or the size of that if larger, beyond which logits hardly count
_REACH = 100.0
_LEVEL = 1e-6  # probability of a doubt about the outputs where there is none
OUTPUT = "output"
_MARGINS = ("y", "right", "margin")


class Features(NamedTuple):
    """Results of a pass over all samples: values, mean distances within each class, and the margin of each sample.

    A margin is the probability of the true class less the largest other one; its rows also have the label, and whether
    it is predicted. ``outputs`` is the kind of output that the network returns, ``predicted`` how often it predicts
    each class.
    """

    values: dict[str, float]
    distances: dict[str, Tensor]
    margins: Rows
    seconds: float
    outputs: str = LOGITS
    predicted: Tensor = torch.zeros(0)


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
        self._device = device
        self._outputs: list[tuple[Tensor, dict[str, Tensor]]] = []
        self._seconds = 0.0
        self.is_half = False  # whether some logits came in less than single precision

    def add(self, batch: Batch, call: HeadCall) -> None:
        """Add the features of a batch."""
        with self.timed():
            embedding, logits = call
            self.is_half |= logits.dtype in (torch.float16, torch.bfloat16)
            preds = logits.argmax(dim=1)
            columns = {OUTPUT: summarize(logits)}
            if batch.y is not None:
                check_label_range(batch.y, self._num_classes)
                columns |= {"y": batch.y.long(), "right": preds == batch.y, "margin": _margins(logits, batch.y)}
            self._outputs.append((batch.positions, columns))
            self._rdi.update(logits, preds)
            if self._has_embedding and embedding is not None:
                self._embedding.update(embedding, preds)

    def compute(self, processes: Processes) -> Features:
        """Compute the values over all batches of all processes, which must all call it."""
        first = next(iter(self._embedding.values(copy_state=False))) if self._has_embedding else self._rdi
        # With samples, filters stay as they are, or Python would forget which warnings it has shown
        with self.timed(), nullcontext() if first.update_called else warnings.catch_warnings():
            if not first.update_called:
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
            margins = Rows.join(processes.gather([own for own in self._rows(_MARGINS) if own.columns]))
            if len(margins):
                values["acc"] = margins["right"].float().mean()
            kind = _kind(processes.gather(self._extents()), int(values["samples"]))
        if kind == CONSTANT:
            values = {name: value for name, value in values.items() if not name.startswith("rdi")}
        numbers = {name: value.item() for name, value in values.items()}
        return Features(numbers, distances, margins, self._seconds, kind, rdi["counts"].cpu())

    def outputs(self) -> Rows:
        """Return what tells outputs apart, and the label, of each sample of this process."""
        return Rows.join([self._rows((OUTPUT, "y"))])

    def _rows(self, names: Sequence[str]) -> list[Rows]:
        return [
            Rows(positions, {name: columns[name].cpu() for name in names if name in columns})
            for positions, columns in self._outputs
        ]

    def _extents(self) -> tuple[Tensor, bool] | None:
        """Return the smallest and the largest of what tells outputs apart, and whether some are in half precision."""
        outputs = [columns[OUTPUT] for _, columns in self._outputs if len(columns[OUTPUT])]
        return (torch.stack(torch.cat(outputs).aminmax(dim=0)).cpu(), self.is_half) if outputs else None

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of the block to the time of the features."""
        start = read_clock(self._device)
        try:
            yield
        finally:
            self._seconds += read_clock(self._device) - start


def doubt_logits(features: Features) -> str | None:
    """Return a warning if predictions look as if the outputs were an embedding instead of logits, otherwise None."""
    number, num_classes = len(features.margins), len(features.predicted)
    if not number or not num_classes:
        return None
    predicted, right = features.predicted.double(), int(features.margins["right"].sum())
    labels = torch.bincount(features.margins["y"], minlength=num_classes).double()
    num_labels, foreign = int((labels > 0).sum()), int(predicted[labels == 0].sum())
    spread = (predicted.sum().square() / predicted.square().sum()).item()  # as many classes, if all were as frequent
    chance = (predicted @ labels).item() / number**2
    # An untrained network predicts a few arbitrary classes, so predictions say nothing unless they are spread
    is_foreign = spread > 2 and num_labels > 1 and number >= 10 * num_labels and 2 * num_labels * right < number
    is_wrong = spread > max(4, 0.85 * num_labels) and 5 * right < chance * number
    if is_foreign and binomial_tail(foreign, number, 0.5) < _LEVEL:
        reason = f"{foreign} of {number} predictions are of classes that no label has"
    elif is_wrong and binomial_tail(number - right, number, 1 - chance) < _LEVEL:
        reason = f"{right} of {number} predictions are right, far fewer than at random"
    else:
        return None
    return (
        f"{reason}. If the model returns an embedding, all values are wrong: pass `forward_fn=`, a callable that takes "
        "the module and inputs and returns logits. Otherwise, check that labels number the classes as the outputs do."
    )


def summarize(logits: Tensor) -> Tensor:
    """Return three numbers per sample that tell outputs apart: largest logit, a mixture of all, log-sum-exp.

    Logits far below the largest saturate: next to the -1e9 of a masked class, all others would be lost in rounding.
    """
    z = logits.to(at_least_float32(logits.dtype))
    weights = torch.arange(1, z.shape[1] + 1, device=z.device).to(z.dtype).cos()
    largest, log_sum = z.amax(dim=1, keepdim=True), z.logsumexp(dim=1)
    reach = largest.abs().clamp(min=_REACH)
    z = torch.maximum(z, largest - reach) - reach * (1 - reach / (largest - z).clamp(min=reach))
    return torch.stack([largest.squeeze(1), (z * weights / weights.norm()).sum(dim=1), log_sum], dim=1)


def _kind(extents: list[tuple[Tensor, bool] | None], num_samples: int) -> str:
    """Return the kind of outputs, given the extents of what tells them apart in all processes."""
    found = [extent for extent in extents if extent is not None]
    if not found:
        return LOGITS
    low, high = torch.cat([values for values, _ in found]).aminmax(dim=0)
    size = torch.maximum(low.abs(), high.abs())
    # The log of a sum is about log(K) for tiny logits; a single sample is always like itself
    if num_samples > 1 and (high - low)[:2].max() <= _COLLAPSED * size[:2].max():
        return CONSTANT
    limit = _NORMALIZED_IN_HALF if any(is_half for _, is_half in found) else _NORMALIZED
    return LOG_PROBABILITIES if size[2] < limit else LOGITS


def _margins(logits: Tensor, y: Tensor) -> Tensor:
    """Return the probability of each true class less the largest other one."""
    p = logits.float().softmax(dim=1)
    own = p.gather(1, y.long().unsqueeze(1)).squeeze(1)
    return own - p.scatter(1, y.long().unsqueeze(1), -1.0).amax(dim=1)
