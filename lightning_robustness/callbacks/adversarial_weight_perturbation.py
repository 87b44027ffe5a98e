from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_robustness._arguments import check_integer, check_number
from lightning_robustness._isolation.sandbox import sandbox
from lightning_robustness._lightning.training_step import REPLACEMENT, TrainingStepCallback
from lightning_robustness._model.access import Access, compute_logits
from lightning_robustness._model.batch import require_labels


class AdversarialWeightPerturbation(TrainingStepCallback):
    r"""Compute the gradients of each training step at perturbed weights (AWP, Wu et al., 2020).

    .. math:: w \to w + \gamma \, \|w\|_2 \, \frac{g}{\|g\|_2}

    Where :math:`w` are the weights of a layer (any parameter of at least two dimensions) and :math:`g` is the gradient
    of the cross-entropy of the batch, in train mode; where
    :class:`~lightning_robustness.callbacks.AdversarialTraining` trains with TRADES or MART, the gradient of that loss.
    ``training_step`` and its backward pass see the perturbed weights; gradient clipping and the optimizer see the
    original ones, restored bit for bit. Manual optimization works with one backward pass per step and the optimizers
    from ``self.optimizers()``. Under DDP each process perturbs the weights for its own part of the batch.

    Place it after :class:`~lightning_robustness.callbacks.AdversarialTraining`, so that it gets the adversarial batch
    or the loss: AT-AWP and TRADES-AWP, as published.

    Args:
        gamma: Size of the perturbation, relative to the weights of a layer.
        warmup_epochs: Number of epochs at the beginning without perturbation.
        forward_fn: Callable that takes the module and inputs and returns logits, where ``module(x)`` does not.
        batch_fn: Callable that takes a batch and returns inputs and labels, for batches of unusual form.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> from lightning_robustness.callbacks import AdversarialTraining, AdversarialWeightPerturbation
        >>> callbacks = [AdversarialTraining(attack="pgd", eps=8 / 255), AdversarialWeightPerturbation(gamma=0.01)]

    """

    def __init__(
        self,
        gamma: float = 0.01,
        *,
        warmup_epochs: int = 0,
        forward_fn: Callable[..., Any] | None = None,
        batch_fn: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(Access(forward_fn=forward_fn, batch_fn=batch_fn))
        self.gamma = check_number("gamma", gamma)
        self.warmup_epochs = check_integer("warmup_epochs", warmup_epochs, minimum=0)
        self._kept: list[tuple[Tensor, Tensor]] = []

    @override
    def around_training_step(
        self, trainer: Trainer, pl_module: LightningModule, step: Callable[..., Any], batch: Any, *args: Any
    ) -> Any:
        if trainer.current_epoch >= self.warmup_epochs:
            self._perturb(pl_module, batch, self.index_of_batch(trainer))
        return step(batch, *args)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._restore()  # the hook above does not run after a raw `loss.backward()`

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._restore()  # in case neither hook ran

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()
        super().on_exception(trainer, pl_module, exception)

    def _perturb(self, pl_module: LightningModule, batch: Any, index: int) -> None:
        loaded = self.access.read(batch)
        x = loaded.x
        y = require_labels(loaded.y, "the cross-entropy")
        forward = self.forward(pl_module, loaded)
        weights = [p for p in pl_module.parameters() if p.requires_grad and p.ndim > 1]
        if not weights:
            return
        with sandbox(forward, x, y, index=index, eval_mode=False, precise=False) as (x, y):
            for weight in weights:
                weight.requires_grad_()
            make_loss = REPLACEMENT.get()
            loss = cross_entropy(compute_logits(forward, x).float(), y.long()) if make_loss is None else make_loss()
            gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        self._kept = [(w, w.detach().clone()) for w, g in zip(weights, gradients, strict=True) if g is not None]
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                if gradient is not None:  # scaled first, since norms of tiny gradients underflow
                    direction = gradient / gradient.abs().max().clamp(min=torch.finfo(gradient.dtype).tiny)
                    weight.add_(self.gamma * weight.norm() * direction / direction.norm().clamp(min=1.0))

    def _restore(self) -> None:
        with torch.no_grad():
            for weight, value in self._kept:
                weight.copy_(value)
        self._kept = []
