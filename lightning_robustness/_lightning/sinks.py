"""Loggers as receivers of everything that is not a scalar: charts, pictures, histograms, texts and embeddings."""

import html
import inspect
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from lightning.fabric.utilities.logger import _convert_params, _flatten_dict
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_robustness._lightning.settings import MonitorSettings
from lightning_robustness._lightning.trainer import kinds_of, log_step
from lightning_robustness._measurement.keys import GROUPS, Chart, tag

# TensorBoard shows only the last layout of a run, so each writer's layout is kept and extended
_LAYOUTS: WeakKeyDictionary[Any, dict[str, dict[str, list[Any]]]] = WeakKeyDictionary()
_PICTURE = "4 the run"  # title of the picture of the run, after the charts of several values
_HINT = " (Smoothing 0 shows what was measured; untick Ignore outliers if a point is cut off)"
# Columns of the HParams tab, where they are measured
_COLUMNS = ("acc", "adv_acc/worst", "adv_acc/pgd", "boundary_acc", "rdi", "roby", "fim")


class Sink:
    """One logger; the parts that it cannot show are ignored, but pictures are not drawn for one that takes none."""

    takes_images = True

    def __init__(self, logger: Any, prefix: str, trainer: Trainer) -> None:
        self._logger = logger
        self._start = _start_of(logger)
        self._prefix = prefix
        self._trainer = trainer

    def open(self, charts: Sequence[Chart], combined: Iterable[str] = ()) -> None:
        """Prepare the logger, once per run."""

    def lines(self, title: str, values: Mapping[str, float]) -> None:
        """Show values as labelled lines of one chart."""

    def image(self, name: str, picture: np.ndarray) -> None:
        """Show a picture of shape ``(H, W, 3)`` with values from 0 to 255."""

    def text(self, name: str, columns: Sequence[str], rows: Collection[Sequence[str]]) -> None:
        """Show rows of texts, the first of which names the row."""

    def histogram(self, name: str, values: Tensor) -> None:
        """Show the distribution of values."""

    def embedding(self, name: str, points: Tensor, **options: Any) -> None:
        """Show points in a projection, with the options of TensorBoard's ``add_embedding``."""

    @property
    def _step(self) -> int:
        return log_step(self._trainer)

    def _tag(self, name: str) -> str:
        """Return the tag of a picture or text; for the empty name it is the prefix, which boards sort first."""
        return f"{self._prefix}/{name}" if name else self._prefix


class TensorBoardSink(Sink):
    """TensorBoard, which shows everything."""

    @property
    def _writer(self) -> Any:
        return self._logger.experiment

    @override
    def open(self, charts: Sequence[Chart], combined: Iterable[str] = ()) -> None:
        layout, prefix = _LAYOUTS.setdefault(self._writer, {}), f"{self._start}{self._prefix}"
        if combined:
            layout[f"{prefix}: overview{_HINT}"] = {title: _lay_out([self._overview(title)]) for title in combined}
        for group in dict.fromkeys(chart.group for chart in charts):
            # Lines instead of bands, which are cut off at the outermost values
            layout[f"{prefix}: {group}{_HINT}"] = {
                chart.title: _lay_out(tag(prefix, name) for name in chart.names)
                for chart in charts
                if chart.group == group
            }
        self._writer.add_custom_scalars(layout)

    @override
    def lines(self, title: str, values: Mapping[str, float]) -> None:
        from torch.utils.tensorboard import FileWriter
        from torch.utils.tensorboard.summary import scalar

        # As `add_scalars`, whose runs have longer names; the logger flushes and closes what is in this dictionary
        self._writer._get_file_writer()
        writers = self._writer.all_writers
        for label, value in values.items():
            folder = os.path.join(self._writer.log_dir, re.sub(r"[^\w\-. ]", "_", label))
            if folder not in writers:
                writers[folder] = FileWriter(folder)
            writers[folder].add_summary(scalar(self._overview(title), value), self._step)

    @override
    def image(self, name: str, picture: np.ndarray) -> None:
        self._writer.add_image(self._tag(name), picture, self._step, dataformats="HWC")

    @override
    def text(self, name: str, columns: Sequence[str], rows: Collection[Sequence[str]]) -> None:
        self._writer.add_text(self._tag(name), markdown_list(rows), self._step)

    @override
    def histogram(self, name: str, values: Tensor) -> None:
        self._writer.add_histogram(self._tag(name), values, self._step)

    @override
    def embedding(self, name: str, points: Tensor, **options: Any) -> None:
        self._writer.add_embedding(points, global_step=self._step, tag=self._tag(name), **options)

    @override
    def _tag(self, name: str) -> str:
        # The writer, unlike the logger, adds no prefix. Capitals sort before `epoch`, which Lightning logs
        return f"{self._start}{super()._tag(name)}" if name else self._overview(_PICTURE)

    def _overview(self, title: str) -> str:
        return f"Overview of {self._start}{self._prefix}/{title}"


class TableSink(Sink):
    """A logger with ``log_image`` and ``log_text`` as Weights & Biases has them."""

    @property
    @override
    def takes_images(self) -> bool:  # type: ignore[override]
        return _takes(self._logger, "log_image", "images")

    @override
    def open(self, charts: Sequence[Chart], combined: Iterable[str] = ()) -> None:
        # Values are shown over epochs, not over steps, where the logger has a choice
        define = getattr(getattr(self._logger, "experiment", None), "define_metric", None)
        if define is not None:
            for group in GROUPS:
                define(f"{self._start}{self._prefix}{group}/*", step_metric=f"{self._start}epoch", step_sync=True)

    @override
    def image(self, name: str, picture: np.ndarray) -> None:
        self._logger.log_image(self._tag(name), images=[picture], step=self._step)

    @override
    def text(self, name: str, columns: Sequence[str], rows: Collection[Sequence[str]]) -> None:
        if _takes(self._logger, "log_text", "columns"):
            data = [list(row) for row in rows]
            self._logger.log_text(self._tag(name), columns=list(columns), data=data, step=self._step)


class MLflowSink(Sink):
    """MLflow, which keeps pictures and texts as artifacts of the run; its charts have no other axis than the step."""

    @override
    def image(self, name: str, picture: np.ndarray) -> None:
        self._logger.experiment.log_image(self._logger.run_id, picture, key=self._tag(name), step=self._step)

    @override
    def text(self, name: str, columns: Sequence[str], rows: Collection[Sequence[str]]) -> None:
        self._logger.experiment.log_text(self._logger.run_id, markdown_list(rows), f"{self._tag(name)}.md")

    @override
    def _tag(self, name: str) -> str:
        return re.sub(r"[^\w\-./ ]", "_", self._start + super()._tag(name), flags=re.ASCII)


def sinks_of(trainer: Trainer, prefix: str) -> Iterator[Sink]:
    """Yield the loggers of a Trainer that show more than scalars."""
    for logger in trainer.loggers:
        kinds = kinds_of(logger)
        if "TensorBoardLogger" in kinds:
            yield TensorBoardSink(logger, prefix, trainer)
        elif "MLFlowLogger" in kinds:
            yield MLflowSink(logger, prefix, trainer)
        elif _takes(logger, "log_image", "images") or _takes(logger, "log_text", "columns"):
            yield TableSink(logger, prefix, trainer)


def log_values(logger: Any, values: Mapping[str, float], epoch: int, step: int) -> None:
    """Hand values to a logger. Where it fails, those that its error does not name are handed over by themselves."""
    try:
        logger.log_metrics({**values, "epoch": float(epoch)}, step=step)
        logger.save()
    except Exception as error:
        others = {key: value for key, value in values.items() if key not in str(error)}
        if 0 < len(others) < len(values):
            log_values(logger, others, epoch, step)
        raise


def _start_of(logger: Any) -> str:
    """Return what a logger puts before each name."""
    start = getattr(logger, "_prefix", "")
    return f"{start}-" if start else ""


def markdown_list(rows: Iterable[Sequence[str]]) -> str:
    """Write rows of texts, of which the first is the name, as a Markdown list, which TensorBoard renders."""
    escaped = ([_escape(text) for text in row] for row in rows)
    return "\n".join(f"- **{name}**: {' '.join(texts)}" for name, *texts in escaped)


def _escape(text: str) -> str:
    """Escape a text so that Markdown shows it verbatim."""
    return re.sub(r"([\\`*_\[\]#])", r"\\\1", html.escape(text, quote=False)).replace("\n", "<br>")


def _takes(logger: Any, method: str, argument: str) -> bool:
    """Return whether a method has this argument; its name alone could mean something else."""
    function = getattr(logger, method, None)
    return function is not None and argument in inspect.signature(function).parameters


def _lay_out(tags: Iterable[str]) -> list[Any]:
    """Lay out a chart; its tags are regular expressions for how tags start."""
    return ["Multiline", [f"{re.escape(name)}$" for name in tags]]


def announce_values(trainer: Trainer, pl_module: LightningModule, settings: MonitorSettings) -> None:
    """Add the values of the monitor to the table of the hyperparameters that Lightning is about to log.

    TensorBoard keeps the first table of a run, and the public ``log_hyperparams`` would write values at step 0 too.
    """
    params = _hyperparameters(trainer, pl_module)
    for logger in _tensorboards(trainer):
        if params and getattr(logger, "_default_hp_metric", False):
            _write(logger, params, ["hp_metric", *_columns(settings)])


def close_table(trainer: Trainer, settings: MonitorSettings) -> None:
    """Write a table at the end of training; TensorBoard ignores it if the run has one, whoever wrote it."""
    for logger in _tensorboards(trainer):
        _write(logger, dict(logger.hparams) or _describe(settings), _columns(settings))


def _columns(settings: MonitorSettings) -> list[str]:
    return [tag(settings.prefix, name) for name in _COLUMNS if name in settings.names]


def _describe(settings: MonitorSettings) -> dict[str, Any]:
    """Describe a run without hyperparameters: a table needs some, and sorts by numbers."""
    eps = settings.budgets[0] if len(settings.budgets) == 1 else settings.describe()["eps"]
    return {"eps": eps, "attacks": ", ".join(settings.plan.attacks) or "none"}


def _tensorboards(trainer: Trainer) -> Iterator[Any]:
    for logger in trainer.loggers:
        if trainer.is_global_zero and "TensorBoardLogger" in kinds_of(logger):
            yield logger


def _hyperparameters(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
    """Merge the hyperparameters of the module and the data module, as Lightning does."""
    owners: list[Any] = [pl_module, getattr(trainer, "datamodule", None)]
    logged = [dict(owner.hparams_initial) for owner in owners if getattr(owner, "_log_hyperparams", False)]
    # The entry of LightningCLI is its own
    return {name: value for params in logged for name, value in params.items() if name != "_class_path"}


def _write(logger: Any, params: dict[str, Any], metrics: Sequence[str]) -> None:
    """Write the table without values: TensorBoard takes the last scalar of each name."""
    from torch.utils.tensorboard.summary import hparams

    plain = logger._sanitize_params(_flatten_dict(_convert_params(params)))
    writer = logger.experiment._get_file_writer()
    for summary in hparams(plain, {f"{_start_of(logger)}{metric}": 0.0 for metric in metrics}):
        writer.add_summary(summary)
