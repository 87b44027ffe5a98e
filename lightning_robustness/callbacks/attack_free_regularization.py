from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from lightning_robustness._arguments import check_integer, check_number, check_option
from lightning_robustness._isolation.sandbox import is_compiled, is_sandboxed
from lightning_robustness._lightning.guard import check_alone
from lightning_robustness._lightning.settings import check_prefix
from lightning_robustness._lightning.training_step import TrainingStepCallback, find_loss, log_mean
from lightning_robustness._model.access import Access, as_classes, compute_logits
from lightning_robustness._model.batch import Batch, require_labels
from lightning_robustness.input_space import InputSpace
from lightning_robustness.losses import boundary_penalty, fisher_penalty, rdi_loss
from lightning_robustness.losses.penalties import FisherKind


class AttackFreeRegularization(TrainingStepCallback):
    r"""Add terms that make a network robust without an attack to the loss that ``training_step`` returns.

    .. math::
        L + w_{\text{RDI}} \, (1 - \text{RDI}) + w_{\text{F}} \, \frac{1}{N} \sum_i \|G(x_i)\|
        + w_{\text{B}} \, \frac{1}{N} \sum_i h(x_i)

    With RDI of the logits of the batch by true labels, see :func:`~lightning_robustness.losses.rdi_loss`, the Fisher
    information :math:`G` of the inputs, see :func:`~lightning_robustness.losses.fisher_penalty`, and a hinge :math:`h`
    that asks for a distance to the decision boundary of at least a margin, see
    :func:`~lightning_robustness.losses.boundary_penalty`. The logits for RDI are those that ``training_step`` computes,
    taken from a hook on the classifier head, or else from another forward pass.

    At the end of each epoch it logs the means of ``rdi_loss``, ``fisher`` and ``boundary``, those that are on, under
    keys that start with the ``prefix``.

    Args:
        rdi_weight: Weight of the RDI loss; 0 for none.
        fisher_weight: Weight of the Fisher information; 0 for none.
        fisher_kind: ``"spectral"`` for its largest eigenvalue, ``"trace"`` for its trace.
        num_products: Steps of power iteration, or random vectors for the trace. None for exact values, which take a
            product with the Jacobian for each class.
        boundary_weight: Weight of the hinge on the distance to the decision boundary, in l-infinity; 0 for none.
        boundary_margin: Distance that it asks for, in un-normalised units.
        boundary_rivals: Number of rival classes that it looks at, those with the highest logits.
        input_space: Range and normalisation of the inputs, by default values in [0, 1] that are not normalised.
        head: The classifier head, by name or as a module; by default it is found.
        forward_fn: Callable that takes the module and inputs and returns logits, where ``module(x)`` does not.
        batch_fn: Callable that takes a batch and returns inputs and labels, for batches of unusual form.
        prefix: Start of the keys.

    Raises:
        ValueError: If a weight is negative, or an argument of the hinge out of range.

    Example:
        >>> from lightning_robustness.callbacks import AttackFreeRegularization
        >>> regularization = AttackFreeRegularization(rdi_weight=0.1, fisher_weight=0.1)
        >>> # Trainer(callbacks=[regularization])

    """

    def __init__(
        self,
        *,
        rdi_weight: float = 0.1,
        fisher_weight: float = 0.1,
        fisher_kind: FisherKind = "spectral",
        num_products: int | None = 1,
        boundary_weight: float = 0.0,
        boundary_margin: float = 8 / 255,
        boundary_rivals: int = 1,
        input_space: InputSpace | None = None,
        head: str | nn.Module | None = None,
        forward_fn: Callable[..., Any] | None = None,
        batch_fn: Callable[..., Any] | None = None,
        prefix: str = "attack_free",
    ) -> None:
        super().__init__(Access(input_space, head, forward_fn=forward_fn, batch_fn=batch_fn))
        check_option("fisher_kind", fisher_kind, FisherKind)
        if num_products is not None:
            check_integer("num_products", num_products, minimum=1)
        check_prefix(prefix)
        self._rdi_weight = check_number("rdi_weight", rdi_weight)
        self._fisher_weight = check_number("fisher_weight", fisher_weight)
        self._boundary_weight = check_number("boundary_weight", boundary_weight)
        self._fisher_penalty = partial(
            fisher_penalty, kind=fisher_kind, num_products=num_products, input_space=self.access.input_space
        )
        self._boundary_penalty = partial(
            boundary_penalty,
            margin=check_number("boundary_margin", boundary_margin, exclusive=True),
            num_rivals=check_integer("boundary_rivals", boundary_rivals, minimum=1),
            input_space=self.access.input_space,
        )
        self._prefix = prefix

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        check_alone(trainer, self, self._prefix)
        if stage == "fit" and not pl_module.automatic_optimization:
            raise MisconfigurationException(
                "Expected automatic optimization for AttackFreeRegularization, which adds to the loss that "
                "`training_step` returns, but the module optimizes by itself. Add `losses.rdi_loss`, "
                "`losses.fisher_penalty` and `losses.boundary_penalty` to the loss in `training_step` instead."
            )

    @override
    def around_training_step(
        self, trainer: Trainer, pl_module: LightningModule, step: Callable[..., Any], batch: Any, *args: Any
    ) -> Any:
        loaded = self.as_floats(pl_module, self.access.read(batch))
        outputs: list[Tensor] = []
        forward = self.forward(pl_module, loaded)
        with self._recording(pl_module, loaded, outputs):
            output = step(batch, *args)
        loss = find_loss(output)
        if loss is None:
            return output
        for name, weight, value in self._terms(forward, loaded, outputs):
            log_mean(pl_module, f"{self._prefix}/{name}", value, len(loaded.x))
            loss = loss + weight * value.to(loss.dtype)
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def _terms(
        self, forward: Callable[..., Any], batch: Batch, outputs: list[Tensor]
    ) -> Iterator[tuple[str, float, Tensor]]:
        x = batch.x
        if self._rdi_weight:
            labels = require_labels(batch.y, "the RDI loss", otherwise="`rdi_weight=0` to leave it out")
            logits = next((as_classes(output, len(x)) for output in outputs if len(output) == len(x)), None)
            value = rdi_loss(compute_logits(forward, x) if logits is None else logits, labels)
            yield "rdi_loss", self._rdi_weight, value
        if self._fisher_weight:
            yield "fisher", self._fisher_weight, self._fisher_penalty(forward, x)
        if self._boundary_weight:
            otherwise = "`boundary_weight=0` to leave it out"
            labels = require_labels(batch.y, "the distance to the boundary", otherwise=otherwise)
            yield "boundary", self._boundary_weight, self._boundary_penalty(forward, x, labels)

    def _recording(
        self, pl_module: LightningModule, batch: Batch, outputs: list[Tensor]
    ) -> AbstractContextManager[Any]:
        """Collect the logits that a training step computes, as far as a module returns them."""
        sources = [name for name, transform in self.sources(batch).items() if transform == "identity"]
        if not self._rdi_weight or not sources or is_compiled(pl_module.modules()):
            return nullcontext()  # another forward pass will do

        def record(module: nn.Module, args: Any, output: Any) -> None:
            is_logits = isinstance(output, Tensor) and output.ndim == 2 and output.requires_grad
            if is_logits and not is_sandboxed():  # in a sandbox the network is attacked, or differentiated twice
                outputs.append(output)

        return pl_module.get_submodule(sources[0]).register_forward_hook(record)
