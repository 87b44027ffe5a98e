"""One pass over a validation loader, watched from outside."""

from torch import Tensor

from lightning_robustness._isolation.sandbox import is_compiled
from lightning_robustness._lightning.step import NOT_SEEN, StepCheck
from lightning_robustness._measurement.feature_pass import FeaturePass
from lightning_robustness._measurement.samples import FixedSample, LoaderShare
from lightning_robustness._measurement.subject import Subject
from lightning_robustness._model.batch import Batch
from lightning_robustness._model.head import HeadCall
from lightning_robustness._model.route import Route


class Watch:
    """Feed the features of every batch to a pass and its inputs to a sample, while somebody else runs the network.

    Batches that validation does not run through the head take a forward pass of our own, unless there can be none. The
    first batch is compared with such a pass, unless validation is known to compute the same logits. A process whose
    samples do not count takes part with none.
    """

    def __init__(
        self,
        subject: Subject,
        route: Route,
        features: FeaturePass,
        share: LoaderShare,
        sample: FixedSample | None = None,
        is_checked: bool = True,
        is_counted: bool = True,
        has_passes: bool = True,
    ) -> None:
        self.features = features
        self.sample = sample
        # Hooks would become part of compiled code, or would not be called by it
        self.uses_hooks = not is_compiled(subject.model.modules())
        self.is_checked = is_checked or not self.uses_hooks
        self._subject = subject
        self._route = route
        self._tap = route.tap(subject.model)
        self._share = share
        self._flags = is_counted, has_passes
        self._num_seen = 0
        self._check: StepCheck | None = None
        self._batch: tuple[Batch, int] | None = None

    def before(self, batch: Batch) -> None:
        """See a batch before validation does."""
        positions = self._share.positions(self._num_seen, len(batch.x))
        number = len(positions) if self._flags[0] else 0
        self._num_seen += len(batch.x)
        batch = batch._replace(positions=positions)
        if self.sample is not None:
            self.sample.add(batch.first(number))
        self._batch = batch, number
        if self.uses_hooks:
            self._tap.attach()
            self._tap.listen(batch.x)
        if not self.is_checked:
            self._check = StepCheck(self._subject.model, self._route, batch.x)

    def after(self, call: HeadCall | None = None) -> bool:
        """See what validation made of the batch; return whether it took a forward pass of our own."""
        if self._batch is None:
            return False
        (batch, number), self._batch = self._batch, None
        call, check = call or self._tap.take(), self._check
        self._close_check()
        is_ours = call is None
        if call is None:
            if not self._flags[1]:
                raise ValueError(NOT_SEEN)
            with self.features.timed():
                call = self._tap.run(self._subject.logits_of_loaded(batch), batch.x)
        if check is not None:
            check.compare(call.logits, is_ours, batch.y)
            self.is_checked = True
        call = HeadCall(_first(call.embedding, number), call.logits[:number])
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


def _first(values: Tensor | None, number: int) -> Tensor | None:
    return None if values is None else values[:number]
