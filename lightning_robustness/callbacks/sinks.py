"""Loggers as receivers of everything that is not a scalar: charts, pictures, histograms, texts and embeddings."""

import html
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from lightning.pytorch.loggers import Logger
from torch import Tensor
from typing_extensions import override

from lightning_robustness.callbacks.trainer_access import kinds_of
from lightning_robustness.measurement.keys import Chart, tag

# TensorBoard shows only the last layout of a run, so each writer's layout is kept and extended
_LAYOUTS: WeakKeyDictionary[Any, dict[str, dict[str, list[Any]]]] = WeakKeyDictionary()


class Sink:
    """One logger; the parts that it cannot show are ignored.

    Args:
        logger: The logger.
        prefix: Prefix of the tags.

    """

    takes_images = True

    def __init__(self, logger: Any, prefix: str) -> None:
        self._logger = logger
        start = getattr(logger, "_prefix", "")
        self._start = f"{start}-" if start else ""
        self._prefix = prefix

    def open(self, charts: Sequence[Chart]) -> None:
        """Prepare the logger, once per run."""

    def image(self, name: str, picture: np.ndarray, step: int) -> None:
        """Show a picture of shape ``(H, W, 3)`` with values from 0 to 255."""

    def text(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]], step: int) -> None:
        """Show rows of texts, the first of which names the row."""

    def histogram(self, name: str, values: Tensor, step: int) -> None:
        """Show the distribution of values."""

    def embedding(
        self,
        name: str,
        points: Tensor,
        metadata: list[list[str]],
        header: list[str],
        thumbnails: Tensor | None,
        step: int,
    ) -> None:
        """Show points in a projection, each with texts and, if given, a small image."""

    def _tag(self, name: str) -> str:
        """Return the tag of a picture or text; that of the empty name is the prefix, which boards sort first."""
        return f"{self._prefix}/{name}" if name else self._prefix


class TensorBoardSink(Sink):
    """TensorBoard, which shows everything."""

    @property
    def _writer(self) -> Any:
        return self._logger.experiment

    @override
    def open(self, charts: Sequence[Chart]) -> None:
        layout, prefix = _LAYOUTS.setdefault(self._writer, {}), f"{self._start}{self._prefix}"
        for title in dict.fromkeys(chart.group for chart in charts):
            chosen = [chart for chart in charts if chart.group == title]
            layout[f"{prefix}: {title}"] = {chart.title: _lay_out(prefix, chart) for chart in chosen}
        self._writer.add_custom_scalars(layout)

    @override
    def image(self, name: str, picture: np.ndarray, step: int) -> None:
        self._writer.add_image(self._tag(name), picture, step, dataformats="HWC")

    @override
    def text(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]], step: int) -> None:
        self._writer.add_text(self._tag(name), markdown_list(rows), step)

    @override
    def histogram(self, name: str, values: Tensor, step: int) -> None:
        self._writer.add_histogram(self._tag(name), values, step)

    @override
    def embedding(
        self,
        name: str,
        points: Tensor,
        metadata: list[list[str]],
        header: list[str],
        thumbnails: Tensor | None,
        step: int,
    ) -> None:
        self._writer.add_embedding(points, metadata, thumbnails, step, tag=self._tag(name), metadata_header=header)

    @override
    def _tag(self, name: str) -> str:
        return self._start + super()._tag(name)  # the writer, unlike the logger, adds no prefix


class TableSink(Sink):
    """A logger with ``log_image`` and ``log_text`` as that of Weights & Biases has them."""

    @property
    @override
    def takes_images(self) -> bool:  # type: ignore[override]
        return _takes(self._logger, "log_image", "images")

    @override
    def open(self, charts: Sequence[Chart]) -> None:
        # Values are shown over epochs, not over steps, where the logger has a choice
        define = getattr(getattr(self._logger, "experiment", None), "define_metric", None)
        if define is not None:
            define(f"{self._start}{self._prefix}/*", step_metric=f"{self._start}epoch", step_sync=True)

    @override
    def image(self, name: str, picture: np.ndarray, step: int) -> None:
        if self.takes_images:
            self._logger.log_image(self._tag(name), images=[picture], step=step)

    @override
    def text(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]], step: int) -> None:
        if _takes(self._logger, "log_text", "columns"):
            self._logger.log_text(self._tag(name), columns=list(columns), data=[list(row) for row in rows], step=step)


class MLflowSink(Sink):
    """MLflow, which keeps pictures and texts as artifacts of the run; its charts have no other axis than the step."""

    @override
    def image(self, name: str, picture: np.ndarray, step: int) -> None:
        self._logger.experiment.log_image(self._logger.run_id, picture, key=self._tag(name), step=step)

    @override
    def text(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]], step: int) -> None:
        self._logger.experiment.log_text(self._logger.run_id, markdown_list(rows), f"{self._tag(name)}.md")

    @override
    def _tag(self, name: str) -> str:
        return re.sub(r"[^\w\-./ ]", "_", self._start + super()._tag(name), flags=re.ASCII)


def sinks_of(loggers: Iterable[Logger], prefix: str) -> Iterator[Sink]:
    """Yield the loggers that show more than scalars."""
    for logger in loggers:
        kinds = kinds_of(logger)
        if "TensorBoardLogger" in kinds:
            yield TensorBoardSink(logger, prefix)
        elif "MLFlowLogger" in kinds:
            yield MLflowSink(logger, prefix)
        elif _takes(logger, "log_image", "images") or _takes(logger, "log_text", "columns"):
            yield TableSink(logger, prefix)


def markdown_list(rows: Iterable[Sequence[str]]) -> str:
    """Write rows of texts, of which the first is the name, as a Markdown list, which TensorBoard renders.

    Example:
        >>> from lightning_robustness.callbacks.sinks import markdown_list
        >>> print(markdown_list([("head", "'model.fc'"), ("attacks", "<lambda>")]))
        - **head**: 'model.fc'
        - **attacks**: &lt;lambda&gt;

    """
    escaped = ([html.escape(text, quote=False).replace("\n", "<br>") for text in row] for row in rows)
    return "\n".join(f"- **{name}**: {' '.join(texts)}" for name, *texts in escaped)


def _takes(logger: Any, method: str, argument: str) -> bool:
    """Return whether a method has this argument; its name alone could mean something else."""
    function = getattr(logger, method, None)
    return function is not None and argument in inspect.signature(function).parameters


def _lay_out(prefix: str, chart: Chart) -> list[Any]:
    tags = [tag(prefix, name) for name in chart.names]
    # Tags of lines are regular expressions for how tags start, those of a margin are plain
    return ["Margin", tags] if chart.has_interval else ["Multiline", [f"{re.escape(name)}$" for name in tags]]
