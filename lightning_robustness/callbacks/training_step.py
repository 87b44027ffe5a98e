"""Wrap the training step of a run without changing the module."""

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_robustness.callbacks.trainer_access import check_strategy

# Computes the loss that replaces the one of the training step under way; None if the step's own counts
REPLACEMENT: ContextVar[Callable[[], Tensor] | None] = ContextVar("REPLACEMENT", default=None)


class _TrainingStep:
    """Training step of a strategy, wrapped in functions, the first one outermost."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self.step = step
        self.functions: list[Callable[..., Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = self.step
        for function in reversed(self.functions):
            step = partial(function, step)
        return step(*args, **kwargs)


class TrainingStepCallback(Callback):
    """Callback that wraps the training step, for instance to change its batch.

    From ``on_train_start`` until the run ends, it stands between the Trainer and the strategy's ``training_step``,
    which calls the module's. So it sees the batch on its device, before DistributedDataParallel and autocast, in
    automatic and manual optimization. Of several such callbacks, the first in the Trainer's list is outermost.
    """

    def __init__(self) -> None:
        self._function: Callable[..., Any] | None = None

    def around_training_step(
        self, trainer: Trainer, pl_module: LightningModule, step: Callable[..., Any], batch: Any, *args: Any
    ) -> Any:
        """Run the training step, ``step(batch, *args)``, and return its output."""
        raise NotImplementedError

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        check_strategy(trainer, self)
        if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            raise MisconfigurationException(
                f"Expected `training_step` to take a batch but it takes `dataloader_iter`, from which it fetches "
                f"batches that {type(self).__name__} cannot see. Let it take `batch`."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        current = vars(trainer.strategy).get("training_step")
        if not isinstance(current, _TrainingStep):
            current = _TrainingStep(trainer.strategy.training_step)
            trainer.strategy.training_step = current  # type: ignore[method-assign]
        self._function = partial(self.around_training_step, trainer, pl_module)
        current.functions.append(self._function)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release(trainer.strategy)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release(trainer.strategy)

    def _release(self, strategy: Strategy) -> None:
        current = vars(strategy).get("training_step")
        if isinstance(current, _TrainingStep) and self._function in current.functions:
            current.functions.remove(self._function)
            if not current.functions:
                del strategy.training_step  # uncovers the method of the class
        self._function = None


def find_loss(output: Any) -> Tensor | None:
    """Find the loss in the output of a training step."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else None
