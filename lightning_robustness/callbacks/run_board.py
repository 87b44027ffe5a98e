from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_robustness.callbacks.board import Board
from lightning_robustness.callbacks.class_names import find_class_names
from lightning_robustness.callbacks.embedding_points import EmbeddingPoints
from lightning_robustness.callbacks.faults import Faults
from lightning_robustness.callbacks.monitor_settings import MonitorSettings
from lightning_robustness.callbacks.trainer_access import log_step
from lightning_robustness.measurement.attack_meter import AttackMeter, Examples
from lightning_robustness.measurement.boundary_curve import BoundaryCurve
from lightning_robustness.measurement.subject import Samples, Subject
from lightning_robustness.measurement.threat_model import ThreatModel
from lightning_robustness.utilities.head import HeadTap
from lightning_robustness.utilities.logits_route import Route


class RunBoard:
    """The board of one run of a Trainer, opened when there is something to show; its errors never end the run.

    Args:
        settings: Settings of the monitor.
        trainer: The Trainer.
        pl_module: Its module.
        prefix: First part of keys.
        faults: Errors and warnings of the run.

    """

    def __init__(
        self, settings: MonitorSettings, trainer: Trainer, pl_module: LightningModule, prefix: str, faults: Faults
    ) -> None:
        self._settings = settings
        self._trainer = trainer
        self._module = pl_module
        self._prefix = prefix
        self._faults = faults
        self._board: Board | None = None

    def show(
        self,
        route: Route | None,
        epoch: int,
        subject: Subject,
        samples: Samples | None,
        attacks: AttackMeter,
        histograms: Mapping[str, Tensor],
        curve: BoundaryCurve | None,
    ) -> None:
        """Hand everything that is not a scalar to the loggers.

        Args:
            route: Route from inputs to logits; None if this process has seen no batch.
            epoch: Number of the epoch.
            subject: The model.
            samples: Samples whose embeddings are shown if that is wanted, or None.
            attacks: Attacks of this evaluation.
            histograms: Values by tag.
            curve: Robust accuracy to first order over budgets, if it was measured.

        """
        if not self._trainer.is_global_zero or not self._trainer.loggers or route is None:
            return
        step = log_step(self._trainer)
        try:
            board = self._board or self._open(route, step, attacks.l2_budget)
            board.show(
                step,
                epoch=epoch,
                input_space=self._settings.input_space,
                histograms=histograms,
                examples=attacks.examples,
                outcomes=attacks.outcomes,
                signs=attacks.signs,
                curve=curve,
            )
            if self._settings.log_embeddings and samples is not None and route.head is not None:
                self._embed(board, route.tap(self._module), subject, samples, attacks.examples, step)
        except Exception as error:
            self._faults.warn(f"pictures could not be logged: {type(error).__name__}: {error}", key="pictures")

    def show_history(self, history: Sequence[Mapping[str, float]]) -> float:
        """Hand the picture of the run to the loggers; return the seconds that it took."""
        start = perf_counter()
        if self._board is not None:
            show = partial(self._board.show_run, history, log_step(self._trainer))
            self._faults.tolerate("the picture of the run could not be logged", show)
        return perf_counter() - start

    def show_summary(self, lines: Iterable[tuple[str, str]]) -> None:
        """Hand the summary of the run, and pictures that wait, to the loggers that take them."""
        if self._board is not None:
            step = log_step(self._trainer)
            self._faults.tolerate("pictures could not be logged", partial(self._board.draw_waiting, step))
            show = partial(self._board.show_text, "summary", ("title", "text"), lines, step)
            self._faults.tolerate("the summary could not be logged", show)

    def _open(self, route: Route, step: int, l2_budget: float | None) -> Board:
        settings, names = self._settings, None
        with suppress(Exception):  # a data set may fail to say; numbers will do
            names = find_class_names(self._trainer, settings.dataloader_idx, route.num_classes)
        board = self._board = Board(self._trainer.loggers, self._prefix, settings.log_figures, names)
        head = f"{route.head!r} of {type(self._module).__name__}"
        described = settings.describe() | {"head": f"{head}, {route.num_classes} classes"}
        samples, space = settings.attack_samples, settings.input_space
        threat = ThreatModel.of(settings.attacks, space, samples, l2_budget=l2_budget)
        board.open(described, threat.attacks, step, settings.parts)
        return board

    def _embed(
        self,
        board: Board,
        tap: HeadTap,
        subject: Subject,
        samples: Samples,
        examples: Mapping[str, Examples],
        step: int,
    ) -> None:
        points = EmbeddingPoints.of(samples, {} if subject.extra is not None or subject.embed else examples)
        x, y, *_ = points.samples
        calls = [tap.run(subject.forward, batch.x) for batch in subject.batches(points.samples, "embeddings")]
        embedding = torch.cat([call.embedding for call in calls if call.embedding is not None]).cpu()
        preds = torch.cat([call.logits for call in calls]).argmax(dim=1).cpu()
        x = x if isinstance(x, Tensor) else torch.zeros(len(x), 1)  # without pictures, for inputs of several shapes
        labels = preds if y is None else y
        board.embed(step, embedding, labels, preds, x, subject.input_space, points.kinds, points.following)
