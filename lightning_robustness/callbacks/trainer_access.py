"""What the monitor has to know of a Trainer."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils._pytree import tree_leaves

from lightning_robustness.utilities.rank_zero import rank_zero_warn

# Their parameters are spread over processes, so that none can differentiate the network by itself
_SHARDED = {"FSDPStrategy", "ModelParallelStrategy"}


def check_strategy(trainer: Trainer) -> None:
    """Check that each process holds the whole network.

    Raises:
        MisconfigurationException: If it does not.

    """
    strategy = trainer.strategy
    names = {parent.__name__ for parent in type(strategy).__mro__}
    if names & _SHARDED or getattr(strategy, "zero_stage_3", False):
        raise MisconfigurationException(
            f"RobustnessMonitor needs the whole network in each process, to differentiate it by itself, but "
            f"{type(strategy).__name__} spreads its parameters over processes. Train with strategy='ddp', or evaluate "
            "a checkpoint afterwards with `lightning_robustness.evaluation.evaluate`."
        )


def check_validation(trainer: Trainer) -> None:
    """Check that there is something to watch during training.

    Raises:
        MisconfigurationException: If there is no validation loop. One that is switched off gets a warning.

    """
    if trainer.limit_val_batches == 0:
        rank_zero_warn("RobustnessMonitor has nothing to watch, since `limit_val_batches` is 0.")
    elif not trainer.enable_validation:
        raise MisconfigurationException(
            "RobustnessMonitor watches validation, but there is none. Give the Trainer a validation loader, and the "
            "module a `validation_step`, which may be empty."
        )


def has_trained(trainer: Trainer) -> bool:
    """Whether there is a training run to lose."""
    return trainer.state.fn == "fit" and not trainer.sanity_checking and trainer.global_step > 0


def evaluation_loader(trainer: Trainer, dataloader_idx: int) -> tuple[Any, float]:
    """A validation or test loader, and the number of batches that come from it."""
    loaders = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
    if trainer.testing:
        numbers = trainer.num_test_batches
    else:
        numbers = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
    leaves = getattr(loaders, "flattened", None) or tree_leaves(loaders)
    return leaves[dataloader_idx], numbers[dataloader_idx]


def log_step(trainer: Trainer) -> int:
    """Step that Lightning logs the values of a validation epoch with; it may run before the step is counted."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def epoch(trainer: Trainer) -> int:
    """Epoch that was begun last; ``trainer.current_epoch`` is one ahead at the end of training."""
    return max(trainer.fit_loop.epoch_progress.current.ready - 1, 0)
