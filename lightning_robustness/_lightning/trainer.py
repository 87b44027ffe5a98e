import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils._pytree import tree_leaves

from lightning_robustness._processes import rank_zero_warn

# Their parameters are sharded, so no process can differentiate the network by itself
_SHARDED = {"FSDPStrategy", "ModelParallelStrategy"}
# Loggers that take any key; others may reject one, as MLflow does
_LENIENT = {"TensorBoardLogger", "CSVLogger", "WandbLogger"}


def kinds_of(thing: object) -> set[str]:
    """Return the names of the classes of an object of Lightning: ``pytorch_lightning`` has copies of the classes."""
    return {kind.__name__ for kind in type(thing).__mro__}


def is_sharded(trainer: Trainer) -> bool:
    """Return whether the parameters of the network are spread over processes."""
    return bool(kinds_of(trainer.strategy) & _SHARDED) or getattr(trainer.strategy, "zero_stage_3", False)


def group_size(trainer: Trainer) -> int:
    """Return the number of processes, of consecutive ranks, that see the same samples: with tensor parallelism only."""
    arguments: Any = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return trainer.world_size // arguments["num_replicas"] if arguments else 1


def check_strategy(trainer: Trainer, callback: Callback) -> None:
    """Check that each process holds the whole network, as the callback needs it."""
    if is_sharded(trainer):
        raise MisconfigurationException(
            f"{type(callback).__name__} needs the whole network in each process, to differentiate it, but "
            f"{type(trainer.strategy).__name__} shards its parameters. Train with strategy='ddp'."
        )


def check_takes_batch(pl_module: LightningModule, step: str, callback: Callback) -> None:
    """Check that a step gets its batch from the Trainer."""
    if "dataloader_iter" in inspect.signature(getattr(pl_module, step)).parameters:
        raise MisconfigurationException(
            f"Expected `{step}` to take a batch but it takes `dataloader_iter`, from which it fetches batches that "
            f"{type(callback).__name__} cannot see. Let it take `batch`."
        )


def check_validation(trainer: Trainer) -> None:
    """Check that training has a validation loop to watch."""
    if trainer.limit_val_batches == 0:
        rank_zero_warn("RobustnessMonitor has nothing to watch, since `limit_val_batches` is 0.")
    elif not trainer.enable_validation:
        raise MisconfigurationException(
            "RobustnessMonitor watches validation, but there is none. Give the Trainer a validation loader, and the "
            "module a `validation_step`, which may be empty."
        )


def has_trained(trainer: Trainer) -> bool:
    """Return whether an error would lose a training run."""
    is_training = trainer.state.fn == "fit" and not trainer.sanity_checking and num_training_batches(trainer) > 0
    return is_training and not trainer.fast_dev_run  # type: ignore[attr-defined]


def is_spawned(trainer: Trainer) -> bool:
    """Return whether Lightning starts processes that end with the run, as `ddp_spawn` and `ddp_fork` do."""
    return "_MultiProcessingLauncher" in kinds_of(trainer.strategy.launcher)


def num_training_batches(trainer: Trainer) -> int:
    """Count the training batches of the run so far.

    Unlike ``global_step``, this also counts batches of accumulated gradients and steps of raw optimizers.
    """
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def forward_of(pl_module: LightningModule, forward_fn: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return the callable for logits, with the default dtype of steps, which Lightning does not set outside of them."""
    forward = pl_module if forward_fn is None else partial(forward_fn, pl_module)
    context = pl_module.trainer.precision_plugin.tensor_init_context
    return forward if isinstance(context(), nullcontext) else partial(_call_within, context, forward)


def _call_within(
    context: Callable[[], AbstractContextManager[Any]], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with context():
        return forward(*args, **kwargs)


def evaluation_loader(trainer: Trainer, dataloader_idx: int) -> tuple[Any, float]:
    """Return a validation or test loader and the number of its batches."""
    loaders = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
    if trainer.testing:
        numbers = trainer.num_test_batches
    else:
        numbers = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
    leaves = getattr(loaders, "flattened", None) or tree_leaves(loaders)
    if dataloader_idx >= len(leaves):
        raise ValueError(
            f"Expected argument `dataloader_idx` to be below {len(leaves)}, the number of loaders, but got "
            f"{dataloader_idx}."
        )
    return leaves[dataloader_idx], numbers[dataloader_idx]


def logged_in_this_epoch(trainer: Trainer) -> set[str]:
    """Return all keys that were logged in the current validation epoch.

    ``trainer.callback_metrics`` also has keys of earlier epochs, and none during the sanity check.
    """
    return set(trainer._logger_connector.metrics["callback"])


def log_step(trainer: Trainer) -> int:
    """Return the step at which Lightning logs a validation epoch, which may run before the step is counted."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def takes_any_key(trainer: Trainer) -> bool:
    """Return whether loggers are of kinds that reject no key, so that Lightning can log without ending the run."""
    return all(type(logger).__name__ in _LENIENT for logger in trainer.loggers)


def find_class_names(trainer: Trainer, dataloader_idx: int, num_classes: int) -> list[str] | None:
    """Return the names of the classes, from the data module or the data set behind the evaluation loader."""
    loader, _ = evaluation_loader(trainer, dataloader_idx)
    owner, owners = getattr(loader, "dataset", None), [getattr(trainer, "datamodule", None)]
    while owner is not None and all(owner is not known for known in owners):
        owners.append(owner)
        owner = getattr(owner, "dataset", None)
    found = (_names(owner, attribute) for owner in owners for attribute in ("class_names", "classes"))
    return next((names for names in found if names is not None and len(names) == num_classes), None)


def _names(owner: Any, attribute: str) -> list[str] | None:
    names = getattr(owner, attribute, None)
    return [str(name) for name in names] if isinstance(names, (list, tuple)) else None


# Largest difference of outputs, relative to their size, in float32, TF32 included, and in lower precision
_EXACT, _MIXED = 0.005, 0.05


def tolerance_of(trainer: Trainer, is_half: bool) -> float:
    """Return the largest difference of outputs that the precision of the Trainer, or the module's own, explains."""
    return _EXACT if str(trainer.precision) in ("32-true", "64-true") and not is_half else _MIXED
