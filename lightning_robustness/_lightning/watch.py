"""One pass over a validation loader, watched from outside."""

from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_robustness._isolation.sandbox import find_leaks, is_compiled
from lightning_robustness._lightning.faults import Faults
from lightning_robustness._lightning.step import NOT_SEEN, StepCheck
from lightning_robustness._lightning.trainer import evaluation_loader
from lightning_robustness._measurement.feature_pass import FeaturePass, Features, doubt_logits
from lightning_robustness._measurement.samples import FixedSample, LoaderShare, warn_of_missing_shares
from lightning_robustness._measurement.subject import Subject
from lightning_robustness._model.batch import Batch
from lightning_robustness._model.head import HeadCall
from lightning_robustness._model.route import Route


class Watch:
    """Feed the features of every batch to a pass and its inputs to a sample, while Lightning runs the network.

    Batches that validation does not run through the head take a forward pass of our own, unless there can be none.
    """

    def __init__(
        self,
        subject: Subject,
        route: Route,
        features: FeaturePass,
        share: LoaderShare,
        sample: FixedSample | None = None,
        is_checked: bool = True,
        has_passes: bool = True,
    ) -> None:
        self.features = features
        self.sample = sample
        # Hooks would become part of compiled code, or would not be called by it
        self.uses_hooks = not is_compiled(subject.model.modules())
        self.is_checked = is_checked or not self.uses_hooks
        self._forward_of = subject.logits_of_loaded if has_passes else None
        self._open_check = partial(StepCheck, subject.model, route)
        self._tap = route.tap(subject.model)
        self._share = share
        self._num_seen = 0
        self._check: StepCheck | None = None
        self._batch: Batch | None = None
        self._first: Tensor | bool | None = None  # inputs of the first batch; then, whether validation changed them

    @property
    def changes_inputs(self) -> bool:
        """Return whether validation changed the inputs of its first batch in place."""
        return self._first is True

    def before(self, batch: Batch) -> None:
        """See a batch before validation does."""
        if self._first is None:
            self._first = batch.x[:2].clone()
        positions = self._share.positions(self._num_seen, len(batch.x))
        self._num_seen += len(batch.x)
        self._batch = batch._replace(positions=positions)
        if self.sample is not None:
            self.sample.add(self._batch.first(len(positions)))
        if self.uses_hooks:
            self._tap.attach()
            self._tap.listen(batch.x)
        if not self.is_checked:
            self._check = self._open_check(batch.x)

    def after(self, call: HeadCall | None = None) -> bool:
        """See what validation made of the batch; return whether it took a forward pass of our own."""
        if self._batch is None:
            return False
        batch, self._batch = self._batch, None
        if isinstance(self._first, Tensor):
            self._first = not torch.equal(batch.x[:2], self._first)
        call, check = call or self._tap.take(), self._check
        self._close_check()
        is_ours = call is None
        if call is None:
            if self._forward_of is None:
                raise ValueError(NOT_SEEN)
            with self.features.timed():
                call = self._tap.run(self._forward_of(batch), batch.x)
        if check is not None:
            check.compare(call.logits, is_ours, batch.y)
            self.is_checked = True
        number = len(batch.positions)
        call = HeadCall(None if call.embedding is None else call.embedding[:number], call.logits[:number])
        if not all(features.isfinite().all() for features in call if features is not None):
            raise FloatingPointError("the logits or the embedding of some samples are NaN or infinite")
        self.features.add(batch.first(number), call)
        return is_ours

    def close(self) -> None:
        """Remove all hooks."""
        self._tap.detach()
        self._close_check()
        self._batch = None

    def _close_check(self) -> None:
        if self._check is not None:
            self._check.close()
        self._check = None


_CHANGES_INPUTS = (
    "`validation_step` changes its inputs in place. Let it work on a copy, and pass a `forward_fn=` that prepares "
    "inputs in the same way."
)
_CAUSES = (
    "Likely causes: a callback that swaps weights for validation, as averaging does (put RobustnessMonitor first); a "
    "validation loader that shuffles or augments; `torch.autocast` in `validation_step` (set the `precision` of the "
    "Trainer instead); a hidden state that `forward` keeps between batches (start each batch without it); layers in "
    "train mode that `eval()` does not reach, as in a plain list (use an `nn.ModuleList`)."
)


def check_sample(faults: Faults, difference: float, watch: object) -> bool:
    """Refuse a network that has other outputs than in validation; later, warn. Return whether they agree.

    The difference is relative to the tolerance.
    """
    if difference <= 1:
        return True
    faults.refuse(
        "expected the outputs that validation computed for the fixed sample but the network now gives others. "
        + (_CHANGES_INPUTS if isinstance(watch, Watch) and watch.changes_inputs else _CAUSES),
        consequence="Attacks and Fisher information are of the current network and sample.",
    )
    return False


def warn_of_classes(faults: Faults, trainer: Trainer, dataloader_idx: int, features: Features, route: Route) -> None:
    """Warn where a limit on batches leaves classes out, as it does if samples are sorted, or outputs are no logits."""
    (loader, num_batches), margins = evaluation_loader(trainer, dataloader_idx), features.margins
    number = len(margins["y"].unique()) if len(margins) else route.num_classes
    with suppress(TypeError):  # streams have no length
        if number < route.num_classes and num_batches < len(loader):
            faults.warn(
                f"the first {num_batches} of {len(loader)} batches hold samples of {number} of {route.num_classes} "
                "classes, and all values are of these alone. Raise `limit_val_batches` or `limit_test_batches`, or "
                "mix the classes once, such as by `Subset(data, torch.randperm(len(data)))`.",
                key="few classes",
            )
            return
    if doubt := doubt_logits(features):
        faults.warn(doubt, key="no logits")


def announce(trainer: Trainer, dataloader_idx: int, route: Route) -> None:
    """Say in the log what was found."""
    if trainer.world_size == 1:
        warn_of_missing_shares(evaluation_loader(trainer, dataloader_idx)[0])
    head = "no embedding" if route.head is None else f"{route.num_features} features of {route.head!r}"
    rank_zero_info(f"RobustnessMonitor sees {route.num_classes} classes, and {head}.")


def warn_of_leaks(faults: Faults, subject: Subject, few: Batch) -> None:
    """Warn of what forward passes change and the sandbox cannot put back."""
    leaks: list[str] = []
    with suppress(Exception):  # a model that fails is refused by the inspection, which comes next
        subject = replace(subject, extra=subject.access.find_extras(subject.model, few))
        leaks = find_leaks(subject.logits_of_loaded(few), few.x)
    if leaks:
        faults.warn(
            f"forward passes change {', '.join(leaks[:10])}, which cannot be put back, so the monitor "
            "changes training. Let `forward` leave them alone where `lightning_robustness.is_sandboxed()`.",
            key="leaks",
        )
