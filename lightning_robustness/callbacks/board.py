"""Everything that loggers can show besides scalars: charts, figures, histograms, texts and embeddings."""

import html
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.nn.functional import interpolate, pad

from lightning_robustness.attacks import MaskingSign
from lightning_robustness.callbacks.figures import as_images, boundary_figure, perturbation_figure, render
from lightning_robustness.measurement.attack_meter import Examples
from lightning_robustness.measurement.boundary_curve import BoundaryCurve
from lightning_robustness.measurement.keys import Part, charts, tag
from lightning_robustness.utilities.input_space import InputSpace
from lightning_robustness.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# TensorBoard shows only the last layout of a run, so each writer's layout is kept and extended
_LAYOUTS: WeakKeyDictionary[Any, dict[str, dict[str, list[Any]]]] = WeakKeyDictionary()
# Sides in pixels of a thumbnail, and of the sprite that holds all of them: the projector shows no larger one
MAX_THUMBNAIL, MAX_SPRITE = 64, 8192


class Board:
    """Show everything but scalars in the loggers of a Trainer.

    TensorBoard shows everything. Other loggers with ``log_image`` and ``log_text``, such as that of Weights & Biases,
    get the figures and texts. TensorBoard has one layout of charts per run: several boards share it, but a layout that
    someone else wrote with ``add_custom_scalars`` is replaced.

    Args:
        loggers: The loggers.
        prefix: Prefix of the keys.
        figures: Whether to show figures and histograms.

    Example:
        >>> from lightning.pytorch.loggers import CSVLogger
        >>> from lightning_robustness.callbacks.board import Board
        >>> board = Board([CSVLogger("logs")], prefix="robustness")
        >>> board.open({"seed": "0"}, attacks=["pgd"], step=0)  # a CSV file holds scalars only

    """

    def __init__(self, loggers: Sequence[Logger], prefix: str, figures: bool = True) -> None:
        self._loggers = list(loggers)
        self._prefix = prefix
        self._figures = figures
        self._can_draw = True
        self._curves: dict[int, BoundaryCurve] = {}

    def open(
        self,
        settings: Mapping[str, str],
        attacks: Sequence[str],
        step: int,
        parts: Collection[Part] = ("features", "fim"),
    ) -> None:
        """Lay out the charts of the attacks and of the other parts, and show the settings, once per run."""
        for writer, prefix in self._writers():
            layout = _LAYOUTS.setdefault(writer, {})
            layout[prefix] = _layout(prefix, charts(parts, attacks))
            writer.add_custom_scalars(layout)
        self.show_text("settings", ("setting", "value"), settings.items(), step)

    def show(
        self,
        step: int,
        *,
        histograms: Mapping[str, Tensor],
        examples: Mapping[str, Examples],
        signs: Sequence[MaskingSign],
        input_space: InputSpace,
        epoch: int = 0,
        curve: BoundaryCurve | None = None,
    ) -> None:
        """Show the results of an evaluation: histograms by tag, without NaN, and examples by attack.

        The curve is robust accuracy to first order over budgets, drawn with those of the epochs before.
        """
        if curve is not None:
            self._curves[epoch] = curve
            self._show_figure("boundary_curve", partial(boundary_figure, self._curves), step)
        if signs:
            self.show_text("masking_signs", MaskingSign._fields, signs, step)
        for name, values in histograms.items():
            self._show_histogram(name, values, step)
        for name, examples_of_attack in examples.items():
            self._show_examples(name, examples_of_attack, input_space, step)

    def embed(
        self, step: int, embedding: Tensor, labels: Tensor, preds: Tensor, x: Tensor, input_space: InputSpace
    ) -> None:
        """Show embeddings of inputs in TensorBoard's projector, with labels and, for images, thumbnails."""
        if len(embedding) == 0:
            return
        metadata = [list(pair) for pair in zip(labels.tolist(), preds.tolist(), strict=True)]
        images = as_images(x, input_space) if self._figures else None
        thumbnails = None if images is None else _thumbnails(images)
        for writer, prefix in self._writers():
            writer.add_embedding(
                embedding.detach().flatten(1).float(),
                metadata,
                thumbnails,
                step,
                tag=f"{prefix}/embedding",
                metadata_header=["label", "prediction"],
            )

    def show_text(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[str]], step: int) -> None:
        """Show texts as a list.

        Args:
            name: Tag without prefix.
            columns: Names of the parts of a row, where loggers show a table.
            rows: Sequences of texts, the first of which names the row.
            step: Step of the Trainer.

        """
        rows = [list(row) for row in rows]
        for writer, prefix in self._writers():
            writer.add_text(f"{prefix}/{name}", markdown_list(rows), step)
        for logger in self._others("log_text", "columns"):
            logger.log_text(f"{self._prefix}/{name}", columns=list(columns), data=rows, step=step)

    def _show_histogram(self, name: str, values: Tensor, step: int) -> None:
        values = values.detach().flatten().float()
        values = values[values.abs() < 1e20]  # drops NaN; the bins of TensorBoard end here
        if self._figures and len(values):
            for writer, prefix in self._writers():
                writer.add_histogram(f"{prefix}/{name}", values, step)

    def _show_examples(self, name: str, examples: Examples, input_space: InputSpace, step: int) -> None:
        if len(examples.x):
            draw = partial(perturbation_figure, examples, input_space, f"{name}, step {step}")
            self._show_figure(f"examples/{name}", draw, step)

    def _show_figure(self, name: str, draw: Callable[[], "Figure"], step: int) -> None:
        writers, others = list(self._writers()), list(self._others("log_image", "images"))
        if not (self._figures and self._can_draw and (writers or others)):
            return
        try:
            figure = draw()
        except ModuleNotFoundError as error:
            self._can_draw = False
            rank_zero_warn(f"Figures are left out. {error}")
            return
        picture = render(figure)
        for writer, prefix in writers:
            writer.add_image(f"{prefix}/{name}", picture, step, dataformats="HWC")
        for logger in others:
            logger.log_image(f"{self._prefix}/{name}", images=[picture], step=step)

    def _writers(self) -> Iterator[tuple[Any, str]]:
        """Yield the TensorBoard writers, each with the full prefix of its tags."""
        for logger in self._loggers:
            if _is_tensorboard(logger):
                start = getattr(logger, "_prefix", "")
                yield logger.experiment, f"{start}-{self._prefix}" if start else self._prefix  # type: ignore[attr-defined]

    def _others(self, method: str, argument: str) -> Iterator[Any]:
        """Yield other loggers whose method has this argument; the name alone could mean something else."""
        for logger in self._loggers:
            function = getattr(logger, method, None)
            if not _is_tensorboard(logger) and function and argument in inspect.signature(function).parameters:
                yield logger


def describe_eps(eps: float) -> str:
    """Write a perturbation budget as a number and, if it is a multiple of a quarter, in 8-bit pixel steps.

    Example:
        >>> from lightning_robustness.callbacks.board import describe_eps
        >>> describe_eps(8 / 255), describe_eps(0.5 / 255), describe_eps(0.12), describe_eps(8)
        ('0.0314 (8/255)', '0.00196 (0.5/255)', '0.12', '8')

    """
    if not isinstance(eps, (int, float)):
        return str(eps)
    quarters = 4 * 255 * eps
    is_simple = 0 < eps < 1 and math.isclose(quarters, round(quarters), rel_tol=1e-6)
    return f"{eps:.3g} ({round(quarters) / 4:g}/255)" if is_simple else f"{eps:g}"


def markdown_list(rows: Iterable[Sequence[str]]) -> str:
    """Write rows of texts, of which the first is the name, as a Markdown list, which TensorBoard renders.

    Example:
        >>> from lightning_robustness.callbacks.board import markdown_list
        >>> print(markdown_list([("head", "'model.fc'"), ("attacks", "<lambda>")]))
        - **head**: 'model.fc'
        - **attacks**: &lt;lambda&gt;

    """
    escaped = ([html.escape(text, quote=False).replace("\n", "<br>") for text in row] for row in rows)
    return "\n".join(f"- **{name}**: {' '.join(texts)}" for name, *texts in escaped)


def _is_tensorboard(logger: Logger) -> bool:
    """Compare by class name: ``pytorch_lightning`` has a copy of the class."""
    return any(parent.__name__ == "TensorBoardLogger" for parent in type(logger).__mro__)


def _layout(prefix: str, chosen: Mapping[str, Sequence[str]]) -> dict[str, list[Any]]:
    return {title: ["Multiline", [_pattern(tag(prefix, name)) for name in names]] for title, names in chosen.items()}


def _pattern(name: str) -> str:
    """Write a tag, or a family of tags, as TensorBoard expects it: a regular expression for how tags start."""
    return re.sub(r"<\w+>$", ".+", re.escape(name)) + "$"


def _thumbnails(images: Tensor) -> Tensor:
    """Pad images to squares, since the sprite of the projector is a square of as many rows as columns."""
    height, width = images.shape[2:]
    side = max(height, width)
    top, left = (side - height) // 2, (side - width) // 2
    squares = pad(images, (left, side - width - left, top, side - height - top))
    largest = min(MAX_THUMBNAIL, MAX_SPRITE // math.ceil(math.sqrt(len(images))))
    return squares if side <= largest else interpolate(squares, size=(largest, largest), mode="area")
