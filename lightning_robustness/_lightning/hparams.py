"""The table of runs in TensorBoard's HParams tab, with the final values of the monitor as columns."""

from collections.abc import Iterator, Sequence
from typing import Any

from lightning.fabric.utilities.logger import _convert_params, _flatten_dict
from lightning.pytorch import LightningModule, Trainer

from lightning_robustness._lightning.settings import MonitorSettings
from lightning_robustness._lightning.trainer import kinds_of
from lightning_robustness._measurement.keys import logged_keys, tag

# Columns of the table, where they are measured
_COLUMNS = ("acc", "adv_acc/worst", "adv_acc/pgd", "boundary_acc", "rdi", "roby", "fim")


def announce_values(trainer: Trainer, pl_module: LightningModule, settings: MonitorSettings) -> None:
    """Add the values of the monitor to the table of the hyperparameters that Lightning is about to log.

    TensorBoard goes by the first table of a run. Lightning writes one with nothing but ``hp_metric`` if the module or
    the data module has hyperparameters, so this must come before it, with the same hyperparameters. With
    ``default_hp_metric=False`` Lightning leaves the table to the user, and so does this function.
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
    logged = logged_keys(settings.parts, list(settings.plan.attacks))
    return [tag(settings.prefix, name) for name in _COLUMNS if name in logged]


def _describe(settings: MonitorSettings) -> dict[str, Any]:
    """Describe a run without hyperparameters: a table needs some."""
    budget = settings.plan.budget  # a number, so that TensorBoard can sort and filter runs by it
    return {"eps": "none" if budget is None else budget.eps, "attacks": ", ".join(settings.plan.attacks) or "none"}


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

    start = f"{logger._prefix}-" if getattr(logger, "_prefix", "") else ""
    plain = logger._sanitize_params(_flatten_dict(_convert_params(params)))
    writer = logger.experiment._get_file_writer()
    for summary in hparams(plain, {f"{start}{metric}": 0.0 for metric in metrics}):
        writer.add_summary(summary)
