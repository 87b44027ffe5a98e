"""One run of a Trainer as the monitor sees it, from ``setup`` to ``teardown``."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_robustness.callbacks.faults import Faults
from lightning_robustness.callbacks.monitor_settings import MonitorSettings
from lightning_robustness.callbacks.run_board import RunBoard
from lightning_robustness.callbacks.step_route import StepRoute
from lightning_robustness.callbacks.trainer_access import (
    evaluation_loader,
    forward_of,
    group_size,
    has_trained,
    is_sharded,
    logged_in_this_epoch,
)
from lightning_robustness.callbacks.validation_watch import ValidationWatch
from lightning_robustness.measurement.attack_meter import AttackMeter
from lightning_robustness.measurement.attack_names import FINAL
from lightning_robustness.measurement.boundary_curve import BoundaryCurve
from lightning_robustness.measurement.feature_meter import FeatureMeter
from lightning_robustness.measurement.fixed_sample import FixedSample
from lightning_robustness.measurement.inspection import check_route, inspect_model, open_inputs, rehearse
from lightning_robustness.measurement.keys import is_tag
from lightning_robustness.measurement.meter import SampleMeter
from lightning_robustness.measurement.subject import Subject
from lightning_robustness.utilities.batch import read_batch, read_extras, require_labels
from lightning_robustness.utilities.extra_inputs import ExtraInputs, find_extra_inputs
from lightning_robustness.utilities.leaks import find_leaks
from lightning_robustness.utilities.loader_share import loader_share
from lightning_robustness.utilities.logits import pick_entry
from lightning_robustness.utilities.logits_route import Route
from lightning_robustness.utilities.sample import SpreadSample


class MonitorRun:
    """One run of a Trainer: what was found out about its module, the sample, the board, and the epoch under way.

    Args:
        settings: Settings of the monitor.
        trainer: The Trainer.
        pl_module: Its module.

    Attributes:
        settings: Settings of the monitor, for this run.
        prefix: First part of keys.
        board: Everything that is shown besides scalars.
        faults: Errors and warnings of the run.
        epoch: Number of the epoch under way.
        has_seen_data: Whether a batch of validation was seen.

    """

    def __init__(self, settings: MonitorSettings, trainer: Trainer, pl_module: LightningModule) -> None:
        self.faults = Faults(trainer, "RobustnessMonitor")
        self.epoch = 0
        self.has_seen_data = False
        self.settings = settings
        self.prefix = f"test_{settings.prefix}" if trainer.testing else settings.prefix
        self.board = RunBoard(settings, trainer, pl_module, self.prefix, self.faults)
        self._trainer = trainer
        self._module = pl_module
        self._route: Route | None = None
        self._is_checked = settings.forward_fn is not None  # what a user says is not questioned
        self._extra: ExtraInputs | None = None
        self._is_discrete = False
        self._sample: FixedSample | None = None
        self._num_parts = 1
        self._watch: ValidationWatch | None = None
        # Where parameters are sharded, the first validation step shows what otherwise a pass of our own does
        self._is_sharded = is_sharded(trainer)
        self._first: tuple[StepRoute, Tensor, Tensor | None] | None = None

    @property
    def has_sample(self) -> bool:
        """Whether there are samples to attack."""
        return self._sample is not None

    def close_epoch(self) -> None:
        """Stop watching validation, and remove all hooks."""
        if self._watch is not None:
            self._watch.close()
        if self._first is not None:
            self._first[0].close()
        self._first, self._watch, self.faults.error = None, None, None

    def before_batch(self, batch: Any) -> None:
        """See a batch before validation does."""
        self.has_seen_data = True
        if self.faults.error is not None:
            return
        with self.faults.guard():
            x, y = read_batch(batch, self.settings.batch_fn)
            if self._is_sharded and self._route is None:
                self._first = StepRoute(self._module, x, self.settings.head), x, y
                return
            name, extras = read_extras(batch, self.settings.batch_fn, len(x))
            route = self._inspect(x, y, name, extras)
            if self._watch is None:
                self._watch = self._open(route, x.device)
            self._watch.before(x, y, extras)
            if self._extra is not None:
                self._extra.values = extras

    def after_batch(self) -> None:
        """See what validation made of the batch."""
        if self.faults.error is not None:
            return
        with self.faults.guard():
            if self._first is not None:
                self._inspect_step(*self._first)
            if self._watch is None:
                return
            is_ours, self._is_checked = self._watch.after(), self._watch.is_checked
            if is_ours and self._watch.uses_hooks:
                self.faults.warn(
                    "validation does not run the network on the inputs of its batch as they are, so RDI and ROBY take "
                    "another forward pass. All values are of `forward`, or `forward_fn=`, on these inputs.",
                    key="forward",
                )

    def end_sanity_check(self) -> None:
        """End the epoch without measuring anything."""
        if self._watch is None:
            self._check_loader()
        self.close_epoch()

    def find_collisions(self) -> set[str]:
        """Return our keys that someone else has logged in this validation epoch.

        Raises:
            MisconfigurationException: If there are some and training has not begun.

        """
        collisions = {key for key in logged_in_this_epoch(self._trainer) if is_tag(self.prefix, key)}
        if collisions:
            self.faults.refuse(
                f"expected to be alone in logging {', '.join(sorted(collisions))} but the module or another callback "
                f"logs it too. Pass another `prefix` than {self.settings.prefix!r}.",
                consequence="Ours is left out.",
            )
        return collisions

    def end_epoch(self, attacks: Sequence[str]) -> dict[str, float] | None:
        """Measure everything at the end of a validation epoch; None if the epoch was left out."""
        left_out, watch = f"left epoch {self.epoch} out", self._watch
        is_complete, (num_classes, has_embedding) = self.faults.agree(left_out), self._agree_on_classes()
        self.close_epoch()
        if not is_complete:
            return None
        if not num_classes:
            self._check_loader()
            self.faults.report(left_out, f"no batch came from loader {self.settings.dataloader_idx}")
            return None
        # A process to which no batch came takes part with zero samples
        settings, device = self.settings, self._module.device
        meter = FeatureMeter(num_classes, settings.mode, device, has_embedding) if watch is None else watch.meter
        values = self.faults.compute(left_out, meter.compute)
        if values is None:
            return None
        values["seconds/features"] = meter.seconds
        if self._sample is None:
            self._keep(SpreadSample(0, None) if watch is None or watch.sample is None else watch.sample)
        meters, attack_meter = settings.make_meters(), settings.make_attack_meter(settings.attacks)
        values |= self._measure(meters)
        values |= self._attack(attack_meter, attacks)
        start = perf_counter()
        histograms = {f"distances/{name}": distances for name, distances in meter.distances.items()}
        for sample_meter in meters:
            histograms |= sample_meter.histograms()
        curve = next((curve for sample_meter in meters if (curve := sample_meter.curve()) is not None), None)
        self._show(attack_meter, histograms, curve)
        return {**values, "seconds/figures": perf_counter() - start, "skipped": 0.0}

    def attack_at_the_end(self, attacks: Sequence[str]) -> dict[str, float]:
        """Run attacks after the last validation epoch, and the one that gives the final verdict."""
        settings, values = self.settings, dict[str, float]()
        if attacks:
            meter = settings.make_attack_meter(settings.attacks)
            values |= self._attack(meter, attacks)
            self._show(meter)
        verdict = self._attack(settings.make_attack_meter(settings.final), list(settings.final))
        return values | {key: value for key, value in verdict.items() if key.endswith(f"/{FINAL}")}

    def _inspect(self, x: Tensor, y: Tensor | None, name: str | None, extras: Mapping[str, Tensor]) -> Route:
        """Find out about the module, and try everything that may fail, on the first batch of the run."""
        if self._route is None:
            settings, meters = self.settings, self.settings.make_meters()
            function = partial(settings.forward_fn, self._module) if settings.forward_fn else self._module
            self._extra = find_extra_inputs(function, "inputs_embeds" if settings.embed_fn else name, extras)
            if self._extra is not None:
                self._extra.values = {key: value[:2] for key, value in extras.items()}
            if settings.attacks or settings.final:
                require_labels(y, "attacks", otherwise="watch without them: `attacks=()`")
            subject = self._subject(x.device)
            loaded = replace(subject, forward=subject.from_loader)
            if not has_trained(self._trainer):
                self._warn_of_leaks(loaded.forward, x[:2])
            found = inspect_model(self._module, loaded, x, y, settings.head, settings.num_classes)
            first = open_inputs(subject, x, extras) if settings.attacks or settings.final or meters else None
            self._is_discrete = first is None
            if first is not None and not has_trained(self._trainer):  # later, what fails is left out when it does
                subject = replace(subject, forward=pick_entry(subject.forward, found.entry), embed=None)
                rehearse(subject, first, meters, {**settings.attacks, **settings.final})
            self._route = _announced(found)
        return self._route

    def _inspect_step(self, step: StepRoute, x: Tensor, y: Tensor | None) -> None:
        """Find out about the module by the validation step that has just run on the first batch of the run."""
        self._first = None
        step.close()
        route, call = step.find(y)
        if group_size(self._trainer) > 1 and route.head is not None:
            reason = "layers are divided among processes, each of which may have a part of the embedding"
            route = route._replace(head=None, num_features=0, reason=reason)
        check_route(self._module, route, call.logits, y, self.settings.num_classes)
        self._route = _announced(route)
        self._watch = self._open(route, x.device)
        self._watch.before(x, y)
        self._watch.after(call if route.head is not None else call._replace(embedding=None))

    def _warn_of_leaks(self, forward: Callable[..., Any], x: Tensor) -> None:
        leaks: list[str] = []
        with suppress(Exception):  # a model that fails is refused by the inspection, which comes next
            leaks = find_leaks(forward, x)
        if leaks:
            self.faults.warn(
                f"forward passes change {', '.join(leaks[:10])}, which cannot be put back, so those of the monitor "
                "change training. Let `forward` leave them alone where `lightning_robustness.is_sandboxed()`.",
                key="leaks",
            )

    def _check_loader(self) -> None:
        """Check that there is a loader of this index, where no batch came from it."""
        with self.faults.guard():
            evaluation_loader(self._trainer, self.settings.dataloader_idx)

    def _agree_on_classes(self) -> tuple[int, bool]:
        """Return the number of classes, 0 if no batch came to any process, and whether there are embeddings."""
        route = None if self._watch is None else self._route
        found = [0, 0, 0] if route is None else [route.num_classes, route.head is not None, self._is_discrete]
        numbers = torch.tensor(found, dtype=torch.long, device=self._module.device)
        number, has_embedding, is_discrete = self._trainer.strategy.reduce(numbers, reduce_op="max").tolist()
        self._is_discrete = bool(is_discrete)
        return number, bool(has_embedding)

    def _open(self, route: Route, device: torch.device) -> ValidationWatch:
        settings, trainer = self.settings, self._trainer
        loader, num_batches = evaluation_loader(trainer, settings.dataloader_idx)
        share, sample = loader_share(loader, num_batches), None
        if self._sample is None and not trainer.sanity_checking:
            sizes = [settings.attack_samples, *(meter.size for meter in settings.make_meters())]
            # Without a distributed sampler, each process draws its own part: it does not know what others see
            self._num_parts = trainer.world_size if share.num_replicas == 1 else 1
            sample = SpreadSample(-(-max(sizes) // self._num_parts), share.total, settings.seed)
        meter = FeatureMeter(route.num_classes, settings.mode, device, route.head is not None)
        forward = None if self._is_sharded else self._subject(device).from_loader
        is_checked = self._is_checked or self._is_sharded
        # Of processes that see the same samples, one counts
        is_counted = trainer.global_rank % group_size(trainer) == 0
        return ValidationWatch(self._module, forward, route, meter, share, sample, is_checked, is_counted)

    def _keep(self, sample: SpreadSample) -> None:
        """Keep the sample for the rest of the run."""

        def collect() -> None:
            self._sample = FixedSample(sample, self._num_parts, () if self._extra is None else self._extra.names)

        if not self.faults.attempt(f"the sample failed and is left out of epoch {self.epoch}", collect):
            self._sample = None

    def _measure(self, meters: Sequence[SampleMeter]) -> dict[str, float]:
        values: dict[str, float] = {}
        if self._sample is None or self._is_discrete:
            return values
        subject = self._subject(self._module.device)
        for meter in meters:
            left_out = f"{meter.label} failed and is left out of epoch {self.epoch}"
            if self.faults.attempt(left_out, partial(meter.update, subject, self._sample.take(meter.size))):
                values |= {**meter.compute(), f"seconds/{meter.name}": meter.seconds}
        return values

    def _attack(self, meter: AttackMeter, attacks: Sequence[str]) -> dict[str, float]:
        if self._sample is None or self._is_discrete or not attacks:
            return {}
        subject, samples = self._subject(self._module.device), self._sample.take(self.settings.attack_samples)
        for name in attacks:
            left_out = f"the attack {name!r} failed and is left out of epoch {self.epoch}"
            if not self.faults.attempt(left_out, partial(meter.update, name, subject, samples)):
                meter.drop(name)
        values = meter.compute()
        if meter.signs:
            reasons = " ".join(f"{sign.evidence} {sign.explanation} {sign.remedy}" for sign in meter.signs)
            self.faults.warn(f"gradients seem to be masked, so success rates are too low. {reasons}", key="masking")
        return values | {f"seconds/{name}": seconds for name, seconds in meter.seconds.items()}

    def _subject(self, device: torch.device) -> Subject:
        settings, wanted = self.settings, self.settings.progress
        shown = self._trainer.progress_bar_callback is not None if wanted is None else wanted
        progress = shown and self._trainer.is_global_zero
        forward = forward_of(self._module, settings.forward_fn)
        if self._extra is not None:
            forward = self._extra.bind(forward)
        forward = pick_entry(forward, None if self._route is None else self._route.entry)
        embed = None if settings.embed_fn is None else partial(settings.embed_fn, self._module)
        options = device, settings.batch_size, settings.seed, progress, self._extra, embed
        return Subject(forward, settings.input_space, *options)

    def _show(
        self,
        attacks: AttackMeter,
        histograms: Mapping[str, Tensor] = MappingProxyType({}),
        curve: BoundaryCurve | None = None,
    ) -> None:
        subject, samples = self._subject(self._module.device), None if self._sample is None else self._sample.samples
        self.board.show(self._route, self.epoch, subject, samples, attacks, histograms, curve)


def _announced(route: Route) -> Route:
    """Say in the log what was found."""
    head = "no embedding" if route.head is None else f"{route.num_features} features of {route.head!r}"
    rank_zero_info(f"RobustnessMonitor sees {route.num_classes} classes, and {head}.")
    return route
