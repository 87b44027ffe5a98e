"""The pass over all samples: it finds out about the model, measures features and collects the sample."""

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple

from torch import nn

from lightning_robustness._measurement.feature_meter import FeatureMeter
from lightning_robustness._measurement.fixed_sample import FixedSample
from lightning_robustness._measurement.inspection import inspect_model, open_inputs, warn_of_unused_layers
from lightning_robustness._measurement.meters import without_update_warning
from lightning_robustness._measurement.samples import SpreadSample
from lightning_robustness._measurement.subject import Subject
from lightning_robustness._measurement.threat_model import is_image
from lightning_robustness._model.access import find_extra_inputs, pick_entry
from lightning_robustness._model.batch import require_labels
from lightning_robustness._model.route import Route
from lightning_robustness._processes import Processes
from lightning_robustness.evaluation.collecting import check_shares, fix_sample
from lightning_robustness.evaluation.loading import EMPTY, LoadedBatch, OwnShare, iterate, take_share
from lightning_robustness.evaluation.resume import DataFingerprint, Records, hash_tensor
from lightning_robustness.metrics._base import Mode

_PART = "features"


@dataclass
class FeatureSettings:
    """Arguments of ``evaluate`` for the pass over all samples."""

    batch_fn: Callable[..., Any] | None
    head: str | nn.Module | None
    num_classes: int | None
    mode: Mode
    sample_size: int
    has_attacks: bool
    has_gradients: bool


class _Found(NamedTuple):
    """Facts that a process found in its share; one without samples found none."""

    num_samples: int = 0
    num_classes: int = 0
    head: str | None = None
    is_discrete: bool = False
    is_image: bool = False
    checksum: int | None = None


class FeaturePass:
    """The pass over all samples."""

    def __init__(
        self, model: nn.Module, subject: Subject, settings: FeatureSettings, processes: Processes, records: Records
    ) -> None:
        self._model, self._settings, self._processes, self._records = model, settings, processes, records
        self._own_forward = subject.forward is not model  # a `forward_fn`
        self._meter: FeatureMeter | None = None
        self._found = _Found()
        self._fingerprint = DataFingerprint()
        self.subject = subject
        self.route: Route | None = None
        self.num_classes = 0
        self.head: str | None = None
        self.is_discrete = self.is_image = False
        self.sample: FixedSample | None = None
        self.values: dict[str, float] | None = None
        self.seconds = 0.0

    def run(self, dataloader: Iterable[Any]) -> None:
        """Go through the loader, in all processes."""
        start, is_interrupted = perf_counter(), False
        own = take_share(self._model, dataloader, self._processes, self.subject.seed)
        sample = SpreadSample(self._settings.sample_size, own.share.total, self.subject.seed)
        saved = self._records.values(_PART)
        try:
            with self._processes.step():
                self._go_through(own, sample, is_measured=saved is not None)
        except KeyboardInterrupt:
            is_interrupted = True
        self._agree(own)
        if saved is not None:
            self.values, self.seconds = saved["values"], saved["seconds"]
        elif self.num_classes:
            self.values = self._compute()
            self.seconds = perf_counter() - start
        if is_interrupted:
            raise KeyboardInterrupt
        if not self.num_classes:
            raise ValueError(EMPTY)
        self._keep(own, sample)
        if saved is None:
            self._records.save_values(_PART, {"values": self.values, "seconds": self.seconds})

    def _go_through(self, own: OwnShare, sample: SpreadSample, is_measured: bool) -> None:
        settings, seed, progress = self._settings, self.subject.seed, self.subject.progress
        with closing(iterate(self._model, own, settings.batch_fn, sample, seed, progress)) as batches:
            for batch in batches:
                self._processes.poll()
                if settings.has_attacks:
                    require_labels(batch.y, "attacks", otherwise="measure without them: `attacks=()`")
                if self._records.is_kept:
                    self._fingerprint.add_labels(batch.positions, batch.y)
                route = self.route or self._inspect(batch)
                if not is_measured:
                    self._measure(route, batch)
                self._found = self._found._replace(num_samples=self._found.num_samples + len(batch.x))

    def _measure(self, route: Route, batch: LoadedBatch) -> None:
        subject = self.subject
        y = None if batch.y is None else batch.y.to(subject.device)
        if subject.extra is not None:
            subject.extra.values = batch.extras
        if self._meter is None:
            self._meter = FeatureMeter(
                route.num_classes, self._settings.mode, subject.device, has_embedding=route.head is not None
            )
            self._tap = route.tap(self._model)
        self._meter.update(self._tap.run(subject.from_loader, batch.x.to(subject.device)), y)

    def _inspect(self, batch: LoadedBatch) -> Route:
        subject, settings = self.subject, self._settings
        x, y = batch.x.to(subject.device), None if batch.y is None else batch.y.to(subject.device)
        name = "inputs_embeds" if subject.embed else batch.name
        extra = find_extra_inputs(subject.forward, name, batch.extras)
        if extra is not None:
            extra.values = {key: value[:2] for key, value in batch.extras.items()}
            subject = replace(subject, forward=extra.bind(subject.forward), extra=extra)
        loaded = replace(subject, forward=subject.from_loader)
        self.route = route = inspect_model(self._model, loaded, x, y, settings.head, settings.num_classes)
        if not self._own_forward:
            warn_of_unused_layers(self._model, route)
        self.subject = replace(subject, forward=pick_entry(subject.forward, route.entry))
        is_discrete = settings.has_gradients and open_inputs(subject, x, batch.extras) is None
        self._found = _Found(
            0, route.num_classes, route.head, is_discrete, is_image(x) and subject.embed is None, hash_tensor(x)
        )
        return route

    def _agree(self, own: OwnShare) -> None:
        """Tell the facts to processes without samples."""
        everywhere = [found for found in self._processes.gather(self._found) if found.num_samples]
        if not everywhere:
            return
        check_shares(own, [found.checksum for found in everywhere])
        self.num_classes, self.head = everywhere[0].num_classes, everywhere[0].head
        self.is_discrete = any(found.is_discrete for found in everywhere)
        self.is_image = everywhere[0].is_image

    def _compute(self) -> dict[str, float]:
        has_embedding = self.head is not None
        meter = self._meter or FeatureMeter(
            self.num_classes, self._settings.mode, self.subject.device, has_embedding=has_embedding
        )
        with without_update_warning():
            return meter.compute()

    def _keep(self, own: OwnShare, sample: SpreadSample) -> None:
        extra = self.subject.extra
        self.sample = fix_sample(self._processes, own, sample, () if extra is None else extra.names)
        if self._records.is_kept:
            self._fingerprint.add_inputs(self.sample.samples)
            self._records.check(DataFingerprint.describe(self._processes.gather(self._fingerprint)))
