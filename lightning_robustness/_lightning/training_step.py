from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from lightning_robustness._isolation.sandbox import is_compiled
from lightning_robustness._lightning.settings import AdversarialLoss
from lightning_robustness._lightning.step import TrainingCheck
from lightning_robustness._lightning.trainer import check_strategy, check_takes_batch, forward_of, num_training_batches
from lightning_robustness._measurement.inspection import inspect_outputs
from lightning_robustness._model.access import Access, ExtraInputs, pick_entry
from lightning_robustness._model.batch import Batch
from lightning_robustness._model.route import Route
from lightning_robustness._processes import rank_zero_warn
from lightning_robustness.attacks import PGD
from lightning_robustness.losses import mart_loss, trades_loss

# Weights of the divergence in the papers
_WEIGHTS: dict[AdversarialLoss, float] = {"trades": 6.0, "mart": 5.0}


def published_attack(loss: AdversarialLoss) -> PGD:
    """Return the attack that the paper of a loss trains against: TRADES maximises the divergence itself."""
    return PGD(steps=10, start="gaussian", loss="kl" if loss == "trades" else "cross_entropy")


def compute_loss(
    loss: AdversarialLoss, weight: float | None, forward: Callable[..., Any], x: Tensor, y: Tensor, x_adv: Tensor
) -> Tensor:
    """Compute the loss, with the weight of its paper where none is given."""
    weight = _WEIGHTS[loss] if weight is None else weight
    if loss == "trades":
        return trades_loss(forward, x, y.long(), weight=weight, x_adv=x_adv)
    return mart_loss(forward, x, y.long(), weight=weight, x_adv=x_adv)


def step_with_loss(
    trainer: Trainer, pl_module: LightningModule, step: Callable[[], Any], make_loss: Callable[[], Tensor]
) -> tuple[Any, Tensor | None]:
    """Run a training step for everything but its loss, which is replaced.

    What the step does to running statistics is undone, so that they come from the passes of the new loss.
    """
    statistics, token = _Statistics(pl_module), REPLACEMENT.set(make_loss)
    try:
        if not pl_module.automatic_optimization:
            return _manual_step(pl_module, step, make_loss, statistics)
        output = step()
    finally:
        REPLACEMENT.reset(token)
    if find_loss(output) is None:  # the module leaves the batch out
        return output, None
    statistics.restore()
    with trainer.precision_plugin.train_step_context():
        loss = make_loss()
    return ({**output, "loss": loss} if isinstance(output, Mapping) else loss), loss


def _manual_step(
    pl_module: LightningModule, step: Callable[[], Any], make_loss: Callable[[], Tensor], statistics: "_Statistics"
) -> tuple[Any, Tensor]:
    losses: list[Tensor] = []
    backward = pl_module.manual_backward

    def replaced(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        statistics.restore()
        losses.append(make_loss())
        backward(losses[-1], *args, **kwargs)

    pl_module.manual_backward = replaced  # type: ignore[method-assign]
    try:
        output = step()
    finally:
        del pl_module.manual_backward  # the class's own is found again
    if len(losses) != 1:
        raise MisconfigurationException(
            f"Expected `training_step` to call `self.manual_backward` once, so that its loss can be replaced, but it "
            f"did {len(losses)} times. Call `losses.trades_loss` or `losses.mart_loss` in `training_step` instead."
        )
    return output, losses[0]


class _Statistics:
    """Current running statistics of normalisation layers, known by the names of their buffers."""

    def __init__(self, module: nn.Module) -> None:
        buffers = [dict(part.named_buffers(recurse=False)) for part in module.modules()]
        kept = [own for own in buffers if any(name.startswith("running_") for name in own)]
        self._kept = [(buffer, buffer.clone()) for own in kept for buffer in own.values()]

    def restore(self) -> None:
        for buffer, copy in self._kept:
            buffer.copy_(copy)


# Computes the loss that replaces the one of the training step under way; None if the step's own counts
REPLACEMENT: ContextVar[Callable[[], Tensor] | None] = ContextVar("REPLACEMENT", default=None)


class TrainingStepCallback(Callback):
    """Callback that wraps the training step, for instance to change its batch.

    It wraps the strategy's ``training_step``, so it sees the batch on its device, before DistributedDataParallel and
    autocast. Of several such callbacks, the first in the Trainer's list is outermost.
    """

    def __init__(self, access: Access) -> None:
        self.access = access
        self._wrapped: Callable[..., Any] | None = None  # in place of the strategy's, if this callback is the first
        # How the network takes the entries of a batch, and where its logits are, by the names of the entries
        self._ways: dict[tuple[str | None, tuple[str, ...]], tuple[ExtraInputs | None, Route | None]] = {}
        self._takes_floats = False  # in place of bytes
        self._num_watched = 0  # training steps
        self._scaling: Tensor | None = None  # of the inputs in the step before

    def forward(self, pl_module: LightningModule, batch: Batch) -> Callable[..., Any]:
        """Return the callable from the inputs of a batch to logits, with what else the network takes from it."""
        forward = forward_of(pl_module, self.access.forward_fn)

        def bound(extra: ExtraInputs | None, own: Batch) -> Callable[..., Any]:
            return forward if extra is None else extra.bind(forward, own.extras)

        extra, route = self._ways.get(_names(batch)) or (self.access.find_extras(pl_module, batch), None)
        if route is None and len(batch.x):
            route = inspect_outputs(pl_module, self.access, partial(bound, extra), batch)
        self._ways[_names(batch)] = extra, route
        return pick_entry(bound(extra, batch), None if route is None else route.entry)

    def as_floats(self, pl_module: LightningModule, batch: Batch) -> Batch:
        """Return a batch with float copies of pixels in bytes, for which the network must give the same logits."""
        if self.access.takes_bytes(batch.x) and not self._takes_floats:
            self.forward(pl_module, batch)  # looks at all labels
            few = batch.first(3)
            self.access.as_float(few.x, self.forward(pl_module, few))
            self._takes_floats = True
        return batch._replace(x=self.access.as_float(batch.x))

    def extra_names(self, batch: Batch) -> tuple[str, ...]:
        """Return the names of what the network takes from a batch besides inputs, once it has run."""
        extra, _ = self._ways[_names(batch)]
        return () if extra is None else extra.names

    def sources(self, batch: Batch) -> Mapping[str, str]:
        """Return the modules that return the logits of a batch, as a route names them, once the network has run."""
        _, route = self._ways[_names(batch)]
        return {} if route is None else route.sources

    def index_of_batch(self, trainer: Trainer) -> int:
        """Return the number of the batch under way, over all epochs and processes, which random starts depend on."""
        return (num_training_batches(trainer) - 1) * trainer.world_size + trainer.global_rank

    def around_training_step(
        self, trainer: Trainer, pl_module: LightningModule, step: Callable[..., Any], batch: Any, *args: Any
    ) -> Any:
        """Run the training step, ``step(batch, *args)``, and return its output."""
        raise NotImplementedError

    def _watched(self, pl_module: LightningModule, step: Callable[..., Any], batch: Any, *args: Any) -> Any:
        """Run the training step, and see in the first two whether it runs the network as ``forward`` does."""
        route, is_said = None, self.access.forward_fn is not None  # what a user says is not questioned
        if self._num_watched < 2 and not is_said and not is_compiled(pl_module.modules()):
            given = self.access.read(batch, soft=True)
            _, route = self._ways.get(_names(given), (None, None))
        if route is None:
            return step(batch, *args)
        check = TrainingCheck(pl_module, route, given.x)
        try:
            output = step(batch, *args)
        finally:
            check.close()
        self._num_watched += check.check_layers(given.y)
        scaling, before = check.find_scaling(self.forward(pl_module, given)), self._scaling
        if scaling is not None and before is not None and torch.allclose(scaling, before, rtol=0.05, atol=0.05):
            rank_zero_warn(
                f"{type(self).__name__}: `training_step` normalises its inputs before the network, which `forward` "
                "does not, so the callback runs the network on other inputs than the step. Pass `forward_fn=`, a "
                "callable that takes the module and inputs, normalises them in the same way and returns logits. If "
                "what `forward` makes of the batch is meant, pass `forward_fn=lambda module, x: module(x)`."
            )
        self._scaling = scaling
        return output

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._ways, self._takes_floats = {}, False
        self._num_watched, self._scaling = 0, None
        check_strategy(trainer, self)
        check_takes_batch(pl_module, "training_step", self)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        own = [one for one in trainer.callbacks if isinstance(one, TrainingStepCallback)]  # type: ignore[attr-defined]
        if own[0] is not self:
            return
        self._wrapped = trainer.strategy.training_step
        for callback in reversed(own):
            step = partial(callback._watched, pl_module, self._wrapped)
            self._wrapped = partial(callback.around_training_step, trainer, pl_module, step)
        trainer.strategy.training_step = self._wrapped  # type: ignore[method-assign]

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release(trainer)

    def _release(self, trainer: Trainer) -> None:
        if self._wrapped is not None and vars(trainer.strategy).get("training_step") is self._wrapped:
            del trainer.strategy.training_step  # uncovers the method of the class
        self._wrapped = None


def _names(batch: Batch) -> tuple[str | None, tuple[str, ...]]:
    return batch.name, tuple(batch.extras)


def find_loss(output: Any) -> Tensor | None:
    """Find the loss in the output of a training step."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else None


def log_mean(pl_module: LightningModule, key: str, value: Tensor | float, num_samples: int) -> None:
    """Log the mean of a value over the samples of an epoch, from within a training step; it stays on the device."""
    pl_module.log(key, value, on_step=False, on_epoch=True, sync_dist=True, batch_size=num_samples)
