import math
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_robustness._arguments import check_integer
from lightning_robustness._lightning.patience import progress_of
from lightning_robustness._lightning.trainer import kinds_of, log_step, num_training_batches
from lightning_robustness._measurement.assisted import Assisted
from lightning_robustness._measurement.keys import find_key, tag
from lightning_robustness._measurement.plan import WORST
from lightning_robustness._measurement.statistics import Evaluation, Trust, measure_trust
from lightning_robustness._measurement.verdict import Kept, kept_epoch
from lightning_robustness.attacks import PGD


def _pack(outcome: Assisted) -> dict[str, Any]:
    """Return an outcome without tensors, whose number would grow with every evaluation and attack."""
    fields = outcome._asdict()
    return {name: value.numpy().copy() if isinstance(value, Tensor) else value for name, value in fields.items()}


def _unpack(packed: Mapping[str, Any]) -> Assisted:
    columns = {name: torch.tensor(value) for name, value in packed.items() if isinstance(value, np.ndarray)}
    return Assisted(**{**packed, **columns})


def find_checkpoint(trainer: Trainer, prefix: str, history: Sequence[Evaluation]) -> tuple[str, int] | None:
    """Find the checkpoint that kept an epoch by one of our values: the name of that value, and the epoch's step."""
    checkpoints = [callback for callback in trainer.checkpoint_callbacks if getattr(callback, "monitor", None)]
    for callback in sorted(checkpoints, key=lambda own: "RobustModelCheckpoint" not in kinds_of(own)):
        score = getattr(callback, "best_model_score", None)
        names = {tag(prefix, name): name for entry in history for name in entry if find_key(name) is not None}
        name = names.get(callback.monitor)  # type: ignore[attr-defined]
        if name is None or score is None:
            continue
        value = float(torch.as_tensor(score, dtype=torch.float32))
        found = [entry for entry in history if name in entry and float(torch.tensor(entry[name])) == value]
        if found:  # of equals, the first by Lightning's rule, and the one with the best clean accuracy by ours
            is_ours = "RobustModelCheckpoint" in kinds_of(callback)
            entry = max(reversed(found), key=lambda own: own.get("acc", 0.0)) if is_ours else found[0]
            return name, int(entry["step"])
    return None


def find_notes(trainer: Trainer, left_out: Sequence[str]) -> list[str]:
    """List what callbacks waited for, what ended the run, and what the monitor left out."""
    notes = []
    for callback in trainer.early_stopping_callbacks:
        if getattr(callback, "stopped_epoch", 0) and trainer.should_stop and (progress_of(trainer) or 0) < 1:
            notes.append(f"{type(callback).__name__} ended the run in epoch {callback.stopped_epoch}")
        waits = [getattr(callback, name, "") for name in ("waited", "waiting")]
        notes += [text for text in waits if isinstance(text, str) and text]
    return [*notes, *dict.fromkeys(left_out)]


# PGD in all its forms is cheap, and what trust is measured by
_PGD, _OTHERS = 1, 5


def intervals_of(
    attacks: Mapping[str, Callable[..., Any]], every_n_epochs: int | Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return after how many epochs each attack runs again."""
    names, argument = list(attacks), "attack_every_n_epochs"
    if every_n_epochs is not None and not isinstance(every_n_epochs, Mapping):
        every_n_epochs = dict.fromkeys(names, check_integer(argument, every_n_epochs, minimum=1))
    defaults = {name: _PGD if isinstance(attack, PGD) else _OTHERS for name, attack in attacks.items()}
    intervals = defaults | dict(every_n_epochs or {})
    unknown = [name for name in intervals if name not in names]
    if unknown:
        raise ValueError(
            f"Expected argument `attack_every_n_epochs` to name attacks of {names} but got {', '.join(unknown)}."
        )
    return {name: check_integer(argument, interval, minimum=1) for name, interval in intervals.items()}


def is_at_the_end(trainer: Trainer) -> bool:
    """Return whether this validation epoch is the last one, as far as is known."""
    if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
        return True
    is_last_epoch = trainer.max_epochs == trainer.current_epoch + 1
    return is_last_epoch and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


# Evaluations from which on a negative coefficient deserves a warning
_MIN_EVALUATIONS = 6


def find_distrust(trainer: Trainer, prefix: str, trust: Mapping[str, Trust]) -> Iterator[tuple[str, str]]:
    """Find callbacks that go by a value which contradicts the attacks of this run: a key and a warning for each."""
    names = {tag(prefix, name): name for name in trust}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not kinds_of(callback) & {"EarlyStopping", "ModelCheckpoint"} or callback.monitor not in names:
            continue
        tau, number, reference = trust[names[callback.monitor]]
        if tau < 0 and number >= _MIN_EVALUATIONS:
            yield (
                f"trust in {callback.monitor}",
                f"{type(callback).__name__} monitors {callback.monitor!r}, which contradicts the attacks of this run: "
                f"its Kendall's tau with {tag(prefix, reference)!r} is {tau:.2f} over {number} evaluations. Use "
                f"RobustModelCheckpoint and RobustEarlyStopping with {tag(prefix, reference)!r} instead.",
            )


class RunRecord:
    """Everything that outlives an epoch: the evaluations so far, and outcomes of their attacks by step.

    They find their way back from processes that Lightning has spawned.
    """

    def __init__(
        self, attacks: Mapping[str, Callable[..., Any]], every_n_epochs: int | Mapping[str, int] | None = None
    ) -> None:
        self._intervals = intervals_of(attacks, every_n_epochs)
        self.trust: dict[str, Trust] = {}
        self.notes: list[str] = []
        self._checkpoint: tuple[str, int] | None = None
        self._history: list[dict[str, float]] = []
        self._outcomes: dict[int, dict[str, dict[str, Any]]] = {}
        self._transfer = Path(tempfile.gettempdir()) / f"lightning_robustness_{uuid.uuid4().hex}.pt"
        self._last_batch: int | None = None  # number of training batches at the last evaluation
        self._last_attacks: list[str] = []  # what ran in it, or failed
        self._tried: dict[str, int] = {}  # the last epoch of each attack in this process, also if it failed

    @property
    def history(self) -> list[dict[str, float]]:
        """One dictionary per evaluation."""
        if self._transfer.exists():  # training ran in processes that Lightning started, and ended
            self.load_state_dict(torch.load(self._transfer, weights_only=True))
            self._transfer.unlink()
        return self._history

    def kept(self) -> Kept | None:
        """Return the epoch that a checkpoint kept, else the most robust one."""
        return kept_epoch(self.history, self._unpacked(), self._checkpoint)

    def most_frequent_of(self, names: Collection[str]) -> str | None:
        """Return the one of some attacks that runs most often, or ``worst`` if all run together; None without any."""
        intervals = {name: interval for name, interval in self._intervals.items() if name in names}
        if len(set(intervals.values())) == 1:
            return WORST
        return min(intervals, key=lambda name: intervals[name], default=None)

    def due(self, trainer: Trainer) -> list[str]:
        """Return the attacks of this validation epoch: all in the first and last, each every few epochs between."""
        if trainer.state.fn != "fit" or is_at_the_end(trainer):
            return list(self._intervals)
        last = {name: own["epoch"] for own in self.history for name in self._intervals if f"adv_acc/{name}" in own}
        last |= self._tried
        epoch = trainer.current_epoch
        return [name for name, interval in self._intervals.items() if epoch - last.get(name, -math.inf) >= interval]

    def missing(self, trainer: Trainer) -> list[str]:
        """Return all attacks if one of them has not seen the final network, since the worst case takes all."""
        last = num_training_batches(trainer), list(self._intervals)
        return [] if (self._last_batch, self._last_attacks) == last else list(self._intervals)

    def begin(self, trainer: Trainer) -> None:
        """Begin a run; one that is resumed keeps what there is."""
        self._last_batch, self._checkpoint = None, None
        if trainer.current_epoch == 0:
            self._history, self._outcomes, self._tried = [], {}, {}

    def add(
        self,
        trainer: Trainer,
        epoch: int,
        values: Mapping[str, float],
        outcomes: Mapping[str, Assisted],
        attacks: Sequence[str],
    ) -> dict[str, float]:
        """Add the values of an evaluation, and return them together with what the history then says about trust.

        Attacks that run again at the end of training join the last evaluation.
        """
        if trainer.state.fn != "fit":
            return dict(values)
        batch = num_training_batches(trainer)
        if self.history and batch == self._last_batch:
            entry = self.history[-1]
            before = {key: entry.get(key, 0.0) for key in values if key.startswith("seconds/")}
            entry |= {**values, **{key: values[key] + seconds for key, seconds in before.items()}}
        else:
            self.history.append({"epoch": epoch, "step": log_step(trainer), **values})
        self._last_batch, self._last_attacks = batch, list(attacks)
        self._tried |= dict.fromkeys(attacks, epoch)
        packed = {name: _pack(outcome) for name, outcome in outcomes.items()}
        self._outcomes.setdefault(int(self.history[-1]["step"]), {}).update(packed)
        if not attacks:
            return dict(values)
        self.trust = measure_trust(self.history)
        measured = {f"trust/{name}": agreement.tau for name, agreement in self.trust.items()}
        self.history[-1] |= measured
        return {**values, **measured}

    def close(self, trainer: Trainer, prefix: str, left_out: Sequence[str]) -> None:
        """Note, at the end of a run, what a checkpoint kept and what was given up."""
        self._checkpoint = find_checkpoint(trainer, prefix, self.history)
        self.notes = find_notes(trainer, left_out)

    def send(self) -> None:
        """Leave everything for the main process, at the end of a spawned one."""
        torch.save(self.state_dict() | {"checkpoint": self._checkpoint}, self._transfer)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to continue, without the margins of all samples."""
        found = self._unpacked()
        outcomes = {step: {name: outcome._asdict() for name, outcome in own.items()} for step, own in found.items()}
        return {"history": self.history, "outcomes": outcomes}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._history, self._checkpoint = list(state_dict["history"]), state_dict.get("checkpoint")
        saved = state_dict.get("outcomes", {})
        self._outcomes = {
            step: {name: _pack(Assisted(**outcome)) for name, outcome in own.items()} for step, own in saved.items()
        }

    def _unpacked(self) -> dict[int, dict[str, Assisted]]:
        return {step: {name: _unpack(packed) for name, packed in own.items()} for step, own in self._outcomes.items()}
