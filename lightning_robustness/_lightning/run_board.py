from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from typing import cast

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_robustness._lightning.board import DRAW_EVERY, Board
from lightning_robustness._lightning.faults import Faults
from lightning_robustness._lightning.settings import MonitorSettings
from lightning_robustness._lightning.trainer import find_class_names, log_step
from lightning_robustness._measurement.findings import Findings
from lightning_robustness._measurement.meters.attack import Examples
from lightning_robustness._measurement.samples import FixedSample, Samples
from lightning_robustness._measurement.subject import Subject
from lightning_robustness._measurement.threat_model import ThreatModel
from lightning_robustness._model.route import Route


class RunBoard:
    """The board of one run of a Trainer, opened when there is something to show; its errors never end the run."""

    def __init__(
        self, settings: MonitorSettings, trainer: Trainer, pl_module: LightningModule, prefix: str, faults: Faults
    ) -> None:
        self._settings = settings
        self._trainer = trainer
        self._module = pl_module
        self._prefix = prefix
        self._faults = faults
        self._board: Board | None = None
        self._num_evaluations = 0

    def draws(self, is_last: bool) -> bool:
        """Return whether pictures are due in this evaluation, in all processes alike."""
        is_due = is_last or self._num_evaluations % DRAW_EVERY == 0
        self._num_evaluations += 1
        return is_due and self._settings.log_figures and bool(self._trainer.loggers)

    def show(
        self,
        findings: Findings,
        examples: Mapping[str, Examples],
        epoch: int,
        subject: Subject,
        sample: FixedSample | None,
    ) -> None:
        """Hand everything that is not a scalar to the loggers."""
        route = subject.route
        if not self._trainer.is_global_zero or not self._trainer.loggers or route is None:
            return
        step = log_step(self._trainer)
        try:
            board = self._board or self._open(route, step, findings.l2_budget)
            board.show(step, epoch, subject.input_space, findings, examples)
            if self._settings.log_embeddings and sample is not None and route.head is not None:
                samples = sample.take(self._settings.sample_size, subject.extra_names)
                self._embed(board, subject, samples, step)
        except Exception as error:
            self._faults.warn(f"pictures could not be logged: {type(error).__name__}: {error}", key="pictures")

    def show_history(self, history: Sequence[Mapping[str, float]]) -> float:
        """Hand the picture of the run to the loggers; return the seconds that it took."""
        start = perf_counter()
        if self._board is not None:
            with self._faults.skipping("the picture of the run could not be logged", is_raised_early=True):
                self._board.show_run(history, log_step(self._trainer))
        return perf_counter() - start

    def show_summary(self, lines: Iterable[tuple[str, str]]) -> None:
        """Hand the summary of the run, and pictures that wait, to the loggers that take them."""
        if self._board is not None:
            step = log_step(self._trainer)
            with self._faults.skipping("pictures could not be logged", is_raised_early=True):
                self._board.draw_waiting(step)
            with self._faults.skipping("the summary could not be logged", is_raised_early=True):
                self._board.show_text("summary", ("title", "text"), lines, step)

    def _open(self, route: Route, step: int, l2_budget: float | None) -> Board:
        settings, names = self._settings, None
        with suppress(Exception):  # a data set may fail to say; numbers will do
            names = find_class_names(self._trainer, settings.dataloader_idx, route.num_classes)
        board = self._board = Board(self._trainer.loggers, self._prefix, settings.log_figures, names)
        head = f"{route.head!r} of {type(self._module).__name__}"
        described = settings.describe() | {"head": f"{head}, {route.num_classes} classes"}
        plan = settings.plan
        threat = ThreatModel.of(plan.attacks, plan.input_space, plan.attack_samples, l2_budget=l2_budget)
        board.open(described, threat.attacks, step, settings.parts)
        return board

    def _embed(self, board: Board, subject: Subject, samples: Samples, step: int) -> None:
        tap = cast(Route, subject.route).tap(subject.model)
        calls = [tap.run(subject.logits_of(batch), batch.x) for batch in subject.batches(samples, "embeddings")]
        embedding = torch.cat([call.embedding for call in calls if call.embedding is not None]).cpu()
        preds = torch.cat([call.logits for call in calls]).argmax(dim=1).cpu()
        # Inputs of several shapes have no pictures
        x = samples.x if isinstance(samples.x, Tensor) else torch.zeros(len(samples.x), 1)
        labels = preds if samples.y is None else samples.y
        board.embed(step, embedding, labels, preds, x, subject.input_space)
