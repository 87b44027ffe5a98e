"""What loggers can show beside scalars: pictures, histograms, texts, embeddings, and charts that belong together."""

import html
import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.nn.functional import interpolate, pad

from lightning_robustness.attacks import MaskingSign
from lightning_robustness.callbacks.figures import as_images, perturbation_figure, render
from lightning_robustness.measurement.attack_meter import Examples
from lightning_robustness.utilities.input_space import InputSpace
from lightning_robustness.utilities.rank_zero import rank_zero_warn

# Of a run, TensorBoard shows the last layout only: each writer's is kept, in order to add to it
_LAYOUTS: WeakKeyDictionary[Any, dict[str, dict[str, list[Any]]]] = WeakKeyDictionary()
# Sides of a thumbnail, and of the picture that holds all of them, which the projector limits
_LARGEST_THUMBNAIL, _LARGEST_SPRITE = 64, 8192
# Values of saturated samples are so small that they would stretch the axis of a histogram
_SMALLEST_LAMBDA = 1e-12


class Board:
    """What the loggers of a Trainer can show beside scalars.

    TensorBoard shows everything. Loggers with ``log_image`` and ``log_text``, such as that of Weights & Biases, get the
    pictures and the texts, and others nothing. TensorBoard knows one layout of charts a run: of several boards, all get
    their charts, but a layout that was written by ``add_custom_scalars`` before is replaced.

    Args:
        loggers: The loggers.
        prefix: What keys start with.
        figures: Whether to show pictures and histograms.

    Example:
        >>> from lightning.pytorch.loggers import CSVLogger
        >>> from lightning_robustness.callbacks.board import Board
        >>> board = Board([CSVLogger("logs")], prefix="robustness")
        >>> board.open({"seed": "0"}, attacks=["pgd"], step=0)  # nothing, in a file of numbers

    """

    def __init__(self, loggers: Sequence[Logger], prefix: str, figures: bool = True) -> None:
        self._loggers = list(loggers)
        self._prefix = prefix
        self._figures = figures
        self._can_draw = True

    def open(self, settings: Mapping[str, str], attacks: Sequence[str], step: int) -> None:
        """Lay out the charts and show the settings, once a run.

        Args:
            settings: What was chosen, in words, by name.
            attacks: Names of the attacks.
            step: Step of the Trainer.

        """
        for writer, prefix in self._writers():
            layout = _LAYOUTS.setdefault(writer, {})
            layout[prefix] = _charts(prefix, attacks)
            writer.add_custom_scalars(layout)
        self._show_text("settings", ("setting", "value"), settings.items(), step)

    def show(
        self,
        step: int,
        *,
        distances: Mapping[str, Tensor],
        lambdas: Tensor | None,
        examples: Mapping[str, Examples],
        signs: Sequence[MaskingSign],
        input_space: InputSpace,
    ) -> None:
        """Show what an evaluation gave; what is empty is left out.

        Args:
            step: Step of the Trainer.
            distances: Mean distances to the centre of each class, NaN for one without samples, by name of the metric.
            lambdas: Fisher information of each sample.
            examples: Inputs before and after each attack, by its name.
            signs: Signs of masked gradients.
            input_space: Range and normalisation of the inputs.

        """
        if signs:
            self._show_text("masking_signs", MaskingSign._fields, signs, step)
        for name, values in distances.items():
            self._show_histogram(f"distances/{name}", values, step)
        if lambdas is not None:
            self._show_histogram("lambda_log10", lambdas.float().clamp(min=_SMALLEST_LAMBDA).log10(), step)
        for name, examples_of_attack in examples.items():
            self._show_examples(name, examples_of_attack, input_space, step)

    def embed(
        self, step: int, embedding: Tensor, labels: Tensor, preds: Tensor, x: Tensor, input_space: InputSpace
    ) -> None:
        """Show embeddings in TensorBoard's projector, with labels and, of images, thumbnails.

        Args:
            step: Step of the Trainer.
            embedding: What enters the head, of shape ``(N, ...)``.
            labels: True labels.
            preds: Predicted labels.
            x: Inputs as the model sees them.
            input_space: Range and normalisation of the inputs.

        """
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

    def _show_text(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[str]], step: int) -> None:
        rows = [list(row) for row in rows]
        for writer, prefix in self._writers():
            writer.add_text(f"{prefix}/{name}", markdown_list(rows), step)
        for logger in self._others("log_text", "columns"):
            logger.log_text(f"{self._prefix}/{name}", columns=list(columns), data=rows, step=step)

    def _show_histogram(self, name: str, values: Tensor, step: int) -> None:
        values = values.detach().flatten().float()
        values = values[values.abs() < 1e20]  # no NaN; the bins end here
        if self._figures and len(values):
            for writer, prefix in self._writers():
                writer.add_histogram(f"{prefix}/{name}", values, step)

    def _show_examples(self, name: str, examples: Examples, input_space: InputSpace, step: int) -> None:
        writers, others = list(self._writers()), list(self._others("log_image", "images"))
        if not (self._figures and self._can_draw and len(examples.x) and (writers or others)):
            return
        try:
            figure = perturbation_figure(examples, input_space, f"{name}, step {step}")
        except ModuleNotFoundError as error:
            self._can_draw = False
            rank_zero_warn(f"Pictures of adversarial inputs are left out. {error}")
            return
        picture = render(figure)
        for writer, prefix in writers:
            writer.add_image(f"{prefix}/examples/{name}", picture, step, dataformats="HWC")
        for logger in others:
            logger.log_image(f"{self._prefix}/examples/{name}", images=[picture], step=step)

    def _writers(self) -> Iterator[tuple[Any, str]]:
        """TensorBoard's writers, each with what it puts in front of our keys."""
        for logger in self._loggers:
            if _is_tensorboard(logger):
                start = getattr(logger, "_prefix", "")
                yield logger.experiment, f"{start}-{self._prefix}" if start else self._prefix  # type: ignore[attr-defined]

    def _others(self, method: str, argument: str) -> Iterator[Any]:
        """Other loggers that have a method with this argument; a method of this name alone might be something else."""
        for logger in self._loggers:
            function = getattr(logger, method, None)
            if not _is_tensorboard(logger) and function and argument in inspect.signature(function).parameters:
                yield logger


def describe_eps(eps: float) -> str:
    """Write a budget as a number and, where they are whole, or halves or quarters, in steps of 8-bit pixels.

    Args:
        eps: The budget.

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
    """Write rows of texts for TensorBoard, which reads Markdown.

    Args:
        rows: Sequences of texts, of which the first one names the row.

    Example:
        >>> from lightning_robustness.callbacks.board import markdown_list
        >>> print(markdown_list([("head", "'model.fc'"), ("attacks", "<lambda>")]))
        - **head**: 'model.fc'
        - **attacks**: &lt;lambda&gt;

    """
    escaped = ([html.escape(text, quote=False).replace("\n", "<br>") for text in row] for row in rows)
    return "\n".join(f"- **{name}**: {' '.join(texts)}" for name, *texts in escaped)


def _is_tensorboard(logger: Logger) -> bool:
    """By name of the class: ``pytorch_lightning`` is the same package by another name."""
    return any(parent.__name__ == "TensorBoardLogger" for parent in type(logger).__mro__)


def _charts(prefix: str, attacks: Sequence[str]) -> dict[str, list[Any]]:
    names = [*attacks, "worst"] if attacks else []
    keys = {
        "Clean and adversarial accuracy": ["acc", *(f"adv_acc/{name}" for name in names)],
        "Attack success": [f"asr/{name}" for name in names],
        "RDI": ["rdi", "rdi_embedding"],
        "ROBY, FSA, FSD": ["roby", "fsa", "fsd"],
        "Fisher information": ["fim", "fim_geometric"],
        "What watching costs (seconds)": [f"seconds/{name}" for name in ("features", "fim", *attacks, "figures")],
    }
    # TensorBoard takes them for regular expressions of how keys begin
    tags = {title: [f"{re.escape(f'{prefix}/{name}')}$" for name in names] for title, names in keys.items()}
    return {title: ["Multiline", patterns] for title, patterns in tags.items() if patterns}


def _thumbnails(images: Tensor) -> Tensor:
    """Squares: the projector's sprite is one, as many across as down, and higher images would not fit into it."""
    height, width = images.shape[2:]
    side = max(height, width)
    top, left = (side - height) // 2, (side - width) // 2
    squares = pad(images, (left, side - width - left, top, side - height - top))
    largest = min(_LARGEST_THUMBNAIL, _LARGEST_SPRITE // math.ceil(math.sqrt(len(images))))
    return squares if side <= largest else interpolate(squares, size=(largest, largest), mode="area")
