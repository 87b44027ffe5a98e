import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.nn.functional import interpolate, pad

from lightning_robustness._display.drawing import render
from lightning_robustness._display.pictures import as_images
from lightning_robustness._display.report_figures import boundary_figure
from lightning_robustness._display.run_figures import class_figure, history_figure, perturbation_figure
from lightning_robustness._lightning.faults import Faults
from lightning_robustness._lightning.settings import MonitorSettings
from lightning_robustness._lightning.sinks import Sink, sinks_of
from lightning_robustness._lightning.trainer import find_class_names
from lightning_robustness._measurement.assisted import BoundaryCurve
from lightning_robustness._measurement.findings import Findings
from lightning_robustness._measurement.keys import KEYS, charts, combined_charts, get_key, logged_keys, tag
from lightning_robustness._measurement.meters.attack import Examples
from lightning_robustness._measurement.rows import Rows
from lightning_robustness._measurement.samples import FixedSample, Samples
from lightning_robustness._measurement.subject import Subject
from lightning_robustness._measurement.threat_model import AttackFacts, ThreatModel
from lightning_robustness._measurement.verdict import Kept
from lightning_robustness._model.route import Route
from lightning_robustness._numbers import write_budget
from lightning_robustness._processes import rank_zero_warn
from lightning_robustness.attacks import MaskingSign
from lightning_robustness.attacks.attack import budgets_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Sides in pixels of a thumbnail, and of the sprite that holds all of them: the projector shows no larger one
MAX_THUMBNAIL, MAX_SPRITE = 64, 8192
# Evaluations from one drawing of the pictures that change slowly to the next
DRAW_EVERY = 5
# Classes beyond which a sample has too few inputs of each
_MAX_CLASSES = 100


class Board:
    """Show everything but scalars in the loggers of a Trainer; what fails here never ends the run.

    The picture of the run is drawn in every evaluation, the others in every fifth and at the end.
    """

    def __init__(self, settings: MonitorSettings, trainer: Trainer, prefix: str, faults: Faults) -> None:
        self._settings = settings
        self._trainer = trainer
        self._prefix = prefix
        self._faults = faults
        self._sinks: list[Sink] | None = None
        self._class_names: Sequence[str] | None = None
        self._draws_figures = settings.log_figures
        self._num_evaluations = 0
        self._history_figure: Figure | None = None
        self._curves: dict[str, BoundaryCurve] = {}
        self._class_rates: dict[int, list[float]] = {}
        self._waiting: dict[str, Callable[[], Figure]] = {}

    def draws(self, is_last: bool) -> bool:
        """Return whether pictures are due in this evaluation, the same in all processes."""
        is_due = is_last or self._num_evaluations % DRAW_EVERY == 0
        return is_due and self._settings.log_figures and bool(self._trainer.loggers)

    def show(
        self,
        findings: Findings,
        examples: Mapping[str, Examples],
        epoch: int,
        subject: Subject,
        sample: FixedSample | None,
    ) -> None:
        """Show the results of an evaluation; every process counts it."""
        is_due, is_main = self._num_evaluations % DRAW_EVERY == 0, self._trainer.is_global_zero
        self._num_evaluations += 1
        if not is_main or not self._trainer.loggers or subject.route is None:
            return
        with self._faults.skipping("pictures could not be logged"):
            if self._sinks is None:
                self._open(subject, subject.route, findings.l2_budget)
            self._add(findings, examples, epoch, subject)
            if is_due:
                self._draw_waiting()
            if self._settings.log_embeddings and sample is not None and subject.route.head is not None:
                self._embed(subject, sample.take(self._settings.sample_size, subject.extra_names))

    def show_history(
        self, history: Sequence[Mapping[str, float]], values: Mapping[str, float], kept: Kept | None
    ) -> float:
        """Show the picture of the run so far, with the values of this evaluation, and return the seconds it took."""
        start = perf_counter()
        if self._settings.log_combined:
            with self._faults.skipping("charts of several values could not be logged", is_raised_early=True):
                for sink in self._sinks or ():
                    for title, names in combined_charts(values).items():
                        sink.lines(title, {line: values[name] for line, name in names.items()})

        def draw() -> "Figure":
            self._history_figure = history_figure(history, self._prefix, self._history_figure, kept)
            return self._history_figure

        with self._faults.skipping("the picture of the run could not be logged", is_raised_early=True):
            self._show_figure("", draw)  # the prefix itself is its tag, so that it comes first
        return perf_counter() - start

    def show_summary(
        self, lines: Collection[tuple[str, str]], history: Sequence[Mapping[str, float]], kept: Kept | None
    ) -> None:
        """Show the summary, pictures that wait, and the picture of the run with the epoch that was kept."""
        if kept is not None and kept.checkpoint is not None:
            self.show_history(history, {}, kept)
        with self._faults.skipping("pictures could not be logged", is_raised_early=True):
            self._draw_waiting()
        with self._faults.skipping("the summary could not be logged", is_raised_early=True):
            self._show_text("summary", ("title", "text"), lines)

    def _open(self, subject: Subject, route: Route, l2_budget: float | None) -> None:
        """Lay out the charts, and show a glossary and the settings."""
        settings, plan = self._settings, self._settings.plan
        with suppress(Exception):  # a data set may fail to say; numbers will do
            self._class_names = find_class_names(self._trainer, settings.dataloader_idx, route.num_classes)
        self._sinks = list(sinks_of(self._trainer, self._prefix))
        threat = ThreatModel.of(plan.attacks, plan.input_space, plan.attack_samples, l2_budget=l2_budget)
        unbounded = [name for name, facts in threat.attacks.items() if not facts.budgets]
        shown = charts(settings.parts, list(plan.attacks), unbounded, settings.log_details)
        for sink in self._sinks:
            sink.open(shown, combined_charts(settings.names) if settings.log_combined else ())
        self._show_text("glossary", ("key", "meaning"), _glossary(self._prefix, threat.attacks, settings.parts))
        head = f"{route.head!r} of {type(subject.model).__name__}, {route.num_classes} classes"
        self._show_text("settings", ("setting", "value"), (settings.describe() | {"head": head}).items())

    def _add(self, findings: Findings, examples: Mapping[str, Examples], epoch: int, subject: Subject) -> None:
        """Show signs and histograms, and keep what pictures need."""
        if findings.signs:
            self._show_text("masking_signs", MaskingSign._fields, findings.signs)
        for name, values in findings.histograms.items():
            self._show_histogram(name, values)
        for name, pairs in examples.items():
            title = f"true class and prediction under {name}, epoch {epoch}"
            draw = partial(perturbation_figure, pairs, subject.input_space, title, self._class_names)
            self._waiting[f"examples/{name}"] = draw
        if findings.curve is not None:
            self._curves[f"epoch {epoch}"] = findings.curve
            self._waiting["boundary_curve"] = partial(boundary_figure, self._curves)
        attack = self._bounded_attack()
        if attack is not None and attack in findings.attacks:
            self._add_class_rates(epoch, attack, findings.attacks[attack])

    def _bounded_attack(self) -> str | None:
        """Return the first attack with a budget, which the picture of classes is about."""
        plan = self._settings.plan
        bounded = (name for name, attack in plan.attacks.items() if None not in budgets_of(attack, plan.input_space))
        return next(bounded, None)

    def _add_class_rates(self, epoch: int, attack: str, rows: Rows) -> None:
        """Add the robust accuracy of each class, NaN without samples."""
        if len(rows) == 0:
            return
        y = rows["y"]
        is_right = rows["adv_preds"] == rows["y"]
        number = len(self._class_names) if self._class_names else int(max(y.max(), rows["adv_preds"].max())) + 1
        if number > _MAX_CLASSES:
            return
        rates = y[is_right].bincount(minlength=number) / y.bincount(minlength=number)
        self._class_rates[epoch] = rates.tolist()
        names = [self._class_name(label) for label in range(number)]
        self._waiting["classes"] = partial(class_figure, self._class_rates, names, attack)

    def _embed(self, subject: Subject, samples: Samples) -> None:
        """Show embeddings in TensorBoard's projector, with classes and, for images, thumbnails."""
        if not len(samples.x):
            return
        tap = cast(Route, subject.route).tap(subject.model)
        calls = [tap.run(subject.logits_of(batch), batch.x) for batch in subject.batches(samples, "embeddings")]
        points = torch.cat([call.embedding for call in calls if call.embedding is not None]).cpu().flatten(1).float()
        preds = torch.cat([call.logits for call in calls]).argmax(dim=1).cpu()
        classes = {"label": preds if samples.y is None else samples.y, "prediction": preds}
        columns = [[self._class_name(label) for label in part.tolist()] for part in classes.values()]
        options: dict[str, Any] = {
            "metadata": [list(row) for row in zip(*columns, strict=True)],
            "metadata_header": list(classes),
        }
        # Inputs of several shapes have no pictures
        has_images = self._settings.log_figures and isinstance(samples.x, Tensor)
        images = as_images(samples.x, subject.input_space) if has_images else None
        options["label_img"] = None if images is None else _thumbnails(images)
        for sink in self._sinks or ():
            sink.embedding("embedding", points, **options)

    def _class_name(self, label: int) -> str:
        return str(label) if self._class_names is None else self._class_names[label]

    def _show_text(self, name: str, columns: Sequence[str], rows: Collection[Sequence[str]]) -> None:
        """Show texts as a list or table."""
        for sink in self._sinks or ():
            sink.text(name, columns, rows)

    def _show_histogram(self, name: str, values: Tensor) -> None:
        values = values.detach().flatten().float()
        values = values[values.abs() < 1e20]  # drops NaN; the bins of TensorBoard end here
        if self._settings.log_figures and len(values):
            for sink in self._sinks or ():
                sink.histogram(name, values)

    def _draw_waiting(self) -> None:
        """Draw what has changed since it was last drawn."""
        waiting, self._waiting = self._waiting, {}
        for name, draw in waiting.items():
            self._show_figure(name, draw)

    def _show_figure(self, name: str, draw: Callable[[], "Figure"]) -> None:
        sinks = [sink for sink in self._sinks or () if sink.takes_images]
        if not (self._draws_figures and sinks):
            return
        try:
            picture = render(draw())
        except ModuleNotFoundError as error:
            self._draws_figures = False
            rank_zero_warn(f"Figures are left out. {error}")
            return
        for sink in sinks:
            sink.image(name, picture)


def _glossary(prefix: str, attacks: Mapping[str, AttackFacts], parts: Collection[str]) -> list[tuple[str, str]]:
    """Explain the attacks and every key that will be logged, one line each, families as a whole."""
    explained = [(f"attack {name}", _describe_attack(facts)) for name, facts in attacks.items()]
    logged = {get_key(name).glossary for name in logged_keys(parts, list(attacks))}
    keys = [key for key in KEYS if key.glossary in logged or (key.role == "warning" and attacks)]
    return [*explained, *((tag(prefix, key.name), _describe_key(key.glossary, key.direction)) for key in keys)]


def _describe_attack(facts: AttackFacts) -> str:
    sizes = [f"{write_budget(eps)} in {norm}" for norm, eps in facts.budgets.items()]
    limit = f"perturbations of at most {' and '.join(sizes)}" if sizes else facts.limit
    return f"{facts.settings}, {limit}" if facts.settings else limit


def _describe_key(glossary: str, direction: str) -> str:
    text = glossary.replace("`", "")  # within them, Markdown would show the backslashes of escaped brackets
    return f"{text} ({direction} is more robust)" if direction else text


def _thumbnails(images: Tensor) -> Tensor:
    """Pad images to squares, since the sprite of the projector is a square of as many rows as columns."""
    height, width = images.shape[2:]
    side = max(height, width)
    top, left = (side - height) // 2, (side - width) // 2
    squares = pad(images, (left, side - width - left, top, side - height - top))
    largest = min(MAX_THUMBNAIL, MAX_SPRITE // math.ceil(math.sqrt(len(images))))
    return squares if side <= largest else interpolate(squares, size=(largest, largest), mode="area")
