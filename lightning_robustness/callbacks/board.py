"""Everything that loggers can show besides scalars: charts, pictures, histograms, texts and embeddings."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.nn.functional import interpolate, pad

from lightning_robustness.attacks import MaskingSign
from lightning_robustness.callbacks.figures import (
    as_images,
    boundary_figure,
    class_figure,
    perturbation_figure,
)
from lightning_robustness.callbacks.history_figure import history_figure
from lightning_robustness.callbacks.sinks import sinks_of
from lightning_robustness.measurement.attack_meter import Examples
from lightning_robustness.measurement.attack_outcome import AttackOutcome
from lightning_robustness.measurement.boundary_curve import BoundaryCurve
from lightning_robustness.measurement.keys import KEYS, Part, charts, get_key, logged_keys
from lightning_robustness.measurement.threat_model import AttackFacts
from lightning_robustness.utilities.drawing import render
from lightning_robustness.utilities.input_space import InputSpace
from lightning_robustness.utilities.number_text import write_budget
from lightning_robustness.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Sides in pixels of a thumbnail, and of the sprite that holds all of them: the projector shows no larger one
MAX_THUMBNAIL, MAX_SPRITE = 64, 8192
# Evaluations from one drawing of the pictures that change slowly to the next
DRAW_EVERY = 5
# Classes beyond which a sample has too few inputs of each
_MAX_CLASSES = 100


class Board:
    """Show everything but scalars in the loggers of a Trainer.

    TensorBoard shows everything. Weights & Biases, MLflow, and other loggers with ``log_image`` and ``log_text``, get
    the pictures and texts. TensorBoard has one layout of charts per run: several boards share it, but a layout that
    someone else wrote with ``add_custom_scalars`` is replaced.

    The picture of the run is drawn in every evaluation, the others in every fifth and at the end.

    Args:
        loggers: The loggers.
        prefix: Prefix of the keys.
        figures: Whether to show pictures and histograms.
        class_names: Names of the classes; by default their numbers.

    Example:
        >>> from lightning.pytorch.loggers import CSVLogger
        >>> from lightning_robustness.callbacks.board import Board
        >>> board = Board([CSVLogger("logs")], prefix="robustness")
        >>> board.open({"seed": "0"}, {}, step=0)  # a CSV file holds scalars only

    """

    def __init__(
        self, loggers: Sequence[Logger], prefix: str, figures: bool = True, class_names: Sequence[str] | None = None
    ) -> None:
        self._sinks = list(sinks_of(loggers, prefix))
        self._prefix = prefix
        self._can_draw = figures
        self._figures = figures
        self._class_names = class_names
        self._attack: str | None = None
        self._num_evaluations = 0
        self._history_figure: Figure | None = None
        self._curves: dict[int, BoundaryCurve] = {}
        self._class_rates: dict[int, Tensor] = {}
        self._waiting: dict[str, Callable[[], Figure]] = {}

    def open(
        self,
        settings: Mapping[str, str],
        attacks: Mapping[str, AttackFacts],
        step: int,
        parts: Collection[Part] = ("features", "fim"),
    ) -> None:
        """Lay out the charts, and show a glossary and the settings, once per run.

        Args:
            settings: Settings by title.
            attacks: Budget and settings of each attack, the most frequent one first.
            step: Step of the Trainer.
            parts: The parts that are measured beside the attacks.

        """
        unbounded = [name for name, facts in attacks.items() if not facts.budgets]
        self._attack = next((name for name in attacks if name not in unbounded), None)
        for sink in self._sinks:
            sink.open(charts(parts, list(attacks), unbounded))
        self.show_text("glossary", ("key", "meaning"), _glossary(attacks, parts), step)
        self.show_text("settings", ("setting", "value"), settings.items(), step)

    def show(
        self,
        step: int,
        *,
        epoch: int,
        input_space: InputSpace,
        histograms: Mapping[str, Tensor],
        examples: Mapping[str, Examples],
        outcomes: Mapping[str, AttackOutcome],
        signs: Sequence[MaskingSign],
        curve: BoundaryCurve | None = None,
    ) -> None:
        """Show the results of an evaluation.

        Args:
            step: Step of the Trainer.
            epoch: Its epoch.
            input_space: Range and normalisation of the inputs.
            histograms: Values by tag; NaN is left out.
            examples: Adversarial inputs by attack.
            outcomes: Effects on each sample by attack.
            signs: Signs of gradient masking.
            curve: Robust accuracy to first order over budgets, drawn with those of the epochs before.

        """
        if signs:
            self.show_text("masking_signs", MaskingSign._fields, signs, step)
        for name, values in histograms.items():
            self._show_histogram(name, values, step)
        for name, pairs in examples.items():
            if len(pairs.x):
                title = f"true class and prediction under {name}, epoch {epoch}"
                draw = partial(perturbation_figure, pairs, input_space, title, self._class_names)
                self._waiting[f"examples/{name}"] = draw
        if curve is not None:
            self._curves[epoch] = curve
            self._waiting["boundary_curve"] = partial(boundary_figure, self._curves)
        if self._attack is not None and self._attack in outcomes:
            self._add_class_rates(epoch, self._attack, outcomes[self._attack])
        if self._num_evaluations % DRAW_EVERY == 0:
            self.draw_waiting(step)
        self._num_evaluations += 1

    def show_run(self, history: Sequence[Mapping[str, float]], step: int) -> None:
        """Show the picture of the run so far, under the prefix itself as its tag, so that it comes first."""

        def draw() -> "Figure":
            self._history_figure = history_figure(history, self._prefix, self._history_figure)
            return self._history_figure

        self._show_figure("", draw, step)

    def draw_waiting(self, step: int) -> None:
        """Draw what has changed since it was last drawn."""
        waiting, self._waiting = self._waiting, {}
        for name, draw in waiting.items():
            self._show_figure(name, draw, step)

    def embed(
        self,
        step: int,
        embedding: Tensor,
        labels: Tensor,
        preds: Tensor,
        x: Tensor,
        input_space: InputSpace,
        kinds: Sequence[str] | None = None,
        following: Sequence[int | None] | None = None,
    ) -> None:
        """Show embeddings of inputs in TensorBoard's projector, with classes and, for images, thumbnails.

        Args:
            step: Step of the Trainer.
            embedding: Embeddings.
            labels: True labels.
            preds: Predicted labels.
            x: Inputs.
            input_space: Range and normalisation of the inputs.
            kinds: A word for each input, such as the attack that it comes from; by default all are clean.
            following: Index of the input that a line leads to, None for no line.

        """
        if len(embedding) == 0:
            return
        kinds = ["clean"] * len(embedding) if kinds is None else kinds
        classes = {"label": labels, "prediction": preds}
        columns = {title: [self._class_name(label) for label in part.tolist()] for title, part in classes.items()}
        columns["input"] = list(kinds)
        if following is not None:
            columns["__next__"] = ["" if index is None else str(index) for index in following]
        metadata = [list(row) for row in zip(*columns.values(), strict=True)]
        images = as_images(x, input_space) if self._figures else None
        thumbnails = None if images is None else _thumbnails(images)
        points = embedding.detach().flatten(1).float()
        for sink in self._sinks:
            sink.embedding("embedding", points, metadata, list(columns), thumbnails, step)

    def show_text(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[str]], step: int) -> None:
        """Show texts as a list or table.

        Args:
            name: Tag without prefix.
            columns: Names of the parts of a row, where loggers show a table.
            rows: Sequences of texts, the first of which names the row.
            step: Step of the Trainer.

        """
        rows = [list(row) for row in rows]
        for sink in self._sinks:
            sink.text(name, columns, rows, step)

    def _class_name(self, label: int) -> str:
        return str(label) if self._class_names is None else self._class_names[label]

    def _add_class_rates(self, epoch: int, attack: str, outcome: AttackOutcome) -> None:
        """Add the robust accuracy of each class, NaN without samples."""
        y, is_right = outcome.y.cpu(), (outcome.adv_preds == outcome.y).cpu()
        number = len(self._class_names) if self._class_names else int(max(y.max(), outcome.adv_preds.max())) + 1
        if number > _MAX_CLASSES or len(y) == 0:
            return
        counts, right = (torch.bincount(y[rows], minlength=number) for rows in (slice(None), is_right))
        self._class_rates[epoch] = right / counts
        names = [self._class_name(label) for label in range(number)]
        self._waiting["classes"] = partial(class_figure, self._class_rates, names, attack)

    def _show_histogram(self, name: str, values: Tensor, step: int) -> None:
        values = values.detach().flatten().float()
        values = values[values.abs() < 1e20]  # drops NaN; the bins of TensorBoard end here
        if self._figures and len(values):
            for sink in self._sinks:
                sink.histogram(name, values, step)

    def _show_figure(self, name: str, draw: Callable[[], "Figure"], step: int) -> None:
        sinks = [sink for sink in self._sinks if sink.takes_images]
        if not (self._can_draw and sinks):
            return
        try:
            figure = draw()
        except ModuleNotFoundError as error:
            self._can_draw = False
            rank_zero_warn(f"Figures are left out. {error}")
            return
        picture = render(figure)
        for sink in sinks:
            sink.image(name, picture, step)


def _glossary(attacks: Mapping[str, AttackFacts], parts: Collection[Part]) -> list[tuple[str, str]]:
    """Explain the attacks and every key that will be logged, one line each, families as a whole."""
    explained = [(f"attack {name}", _describe_attack(facts)) for name, facts in attacks.items()]
    logged = {get_key(name).glossary for name in logged_keys(parts, list(attacks))}
    keys = [key for key in KEYS if key.glossary in logged or (key.role == "warning" and attacks)]
    return [*explained, *((key.logged_name, _describe_key(key.glossary, key.direction)) for key in keys)]


def _describe_attack(facts: AttackFacts) -> str:
    sizes = [f"{write_budget(eps)} in {norm}" for norm, eps in facts.budgets.items()]
    limit = f"perturbations of at most {' and '.join(sizes)}" if sizes else facts.limit
    return f"{facts.settings}, {limit}" if facts.settings else limit


def _describe_key(glossary: str, direction: str) -> str:
    text = glossary.replace("`", "")  # within them, Markdown would show escaped brackets as they are
    return f"{text} ({direction} is more robust)" if direction else text


def _thumbnails(images: Tensor) -> Tensor:
    """Pad images to squares, since the sprite of the projector is a square of as many rows as columns."""
    height, width = images.shape[2:]
    side = max(height, width)
    top, left = (side - height) // 2, (side - width) // 2
    squares = pad(images, (left, side - width - left, top, side - height - top))
    largest = min(MAX_THUMBNAIL, MAX_SPRITE // math.ceil(math.sqrt(len(images))))
    return squares if side <= largest else interpolate(squares, size=(largest, largest), mode="area")
