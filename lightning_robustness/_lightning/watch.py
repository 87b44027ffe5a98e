"""One pass over a validation loader, watched from outside."""

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from lightning_robustness._isolation.sandbox import is_compiled
from lightning_robustness._lightning.step import NOT_SEEN, StepCheck
from lightning_robustness._measurement.feature_meter import FeatureMeter
from lightning_robustness._measurement.samples import LoaderShare, SpreadSample
from lightning_robustness._model.head import HeadCall
from lightning_robustness._model.route import Route


class ValidationWatch:
    """Feed the features of every batch to a meter and its inputs to a sample, while somebody else runs the network."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any] | None,
        route: Route,
        meter: FeatureMeter,
        share: LoaderShare,
        sample: SpreadSample | None,
        is_checked: bool = True,
        is_counted: bool = True,
    ) -> None:
        self.meter = meter
        self.sample = sample
        self._forward = forward
        self._model = model
        self._route = route
        self._tap = route.tap(model)
        self._share = share
        self._check: StepCheck | None = None
        self._is_counted = is_counted
        self._num_seen = 0
        self._batch: tuple[Tensor, Tensor | None, int] | None = None
        # Hooks would become part of compiled code, or would not be called by it
        self.uses_hooks = not is_compiled(model.modules())
        self.is_checked = is_checked or not self.uses_hooks

    def before(self, x: Tensor, y: Tensor | None, extras: Mapping[str, Tensor] | None = None) -> None:
        """See a batch, with its other entries, before validation does."""
        indices = self._share.indices(self._num_seen, len(x))
        number = len(indices) if self._is_counted else 0
        self._num_seen += len(x)
        if self.sample is not None:
            others = {name: value[:number] for name, value in (extras or {}).items()}
            self.sample.add(indices[:number], x[:number], None if y is None else y[:number], others)
        self._batch = x, y, number
        if self.uses_hooks:
            self._tap.attach()
            self._tap.listen(x)
        if not self.is_checked:
            self._check = StepCheck(self._model, self._route, x)

    def after(self, call: HeadCall | None = None) -> bool:
        """See what validation made of the batch; return whether it took a forward pass of our own."""
        if self._batch is None:
            return False
        (x, y, number), self._batch = self._batch, None
        call, check = call or self._tap.take(), self._check
        self._close_check()
        is_ours = call is None
        if call is None:
            if self._forward is None:
                raise ValueError(NOT_SEEN)
            start = perf_counter()
            call = self._tap.run(self._forward, x)
            self.meter.seconds += perf_counter() - start
        if check is not None:
            check.compare(call.logits, is_ours, y)
            self.is_checked = True
        embedding, logits = call
        call = HeadCall(None if embedding is None else embedding[:number], logits[:number])
        if not all(features.isfinite().all() for features in call if features is not None):
            raise FloatingPointError("the logits or the embedding of some samples are NaN or infinite")
        self.meter.update(call, None if y is None else y[:number])
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
