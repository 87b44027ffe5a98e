"""One run of a Trainer as the monitor sees it, from ``setup`` to ``teardown``."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_robustness._lightning.board import Board
from lightning_robustness._lightning.faults import Faults
from lightning_robustness._lightning.settings import MonitorSettings
from lightning_robustness._lightning.sinks import log_values
from lightning_robustness._lightning.step import StepRoute
from lightning_robustness._lightning.trainer import (
    evaluation_loader,
    forward_of,
    group_size,
    has_trained,
    is_sharded,
    log_step,
    logged_in_this_epoch,
    num_training_batches,
    takes_any_key,
    tolerance_of,
)
from lightning_robustness._lightning.watch import Watch, announce, check_sample, warn_of_classes, warn_of_leaks
from lightning_robustness._measurement.assisted import Assisted
from lightning_robustness._measurement.feature_pass import OUTPUT_WARNINGS, FeaturePass
from lightning_robustness._measurement.findings import SHUFFLED, Findings, conclude
from lightning_robustness._measurement.inspection import (
    Found,
    agree,
    check_route,
    inspect,
    largest_difference,
    rehearse,
)
from lightning_robustness._measurement.keys import get_key, name_of, tag
from lightning_robustness._measurement.meters import Meter, measure
from lightning_robustness._measurement.meters.attack import Examples, attack_again
from lightning_robustness._measurement.plan import FINAL, Plan
from lightning_robustness._measurement.rows import Rows
from lightning_robustness._measurement.samples import FixedSample, LoaderShare, loader_share
from lightning_robustness._measurement.subject import Subject
from lightning_robustness._model.access import ExtraInputs
from lightning_robustness._model.batch import Batch, require_labels
from lightning_robustness._model.route import Route
from lightning_robustness._processes import Processes

_NUM_COMPARED = 64  # samples whose outputs are compared with what validation computed
_HEADLINES = ("rdi", "fim")  # shown in the progress bar
_NUM_EXAMPLES = 4  # pictures of adversarial inputs, per attack


class Run:
    """One run of a Trainer: what was found out about its module, the sample, the board, and the epoch under way."""

    def __init__(self, settings: MonitorSettings, trainer: Trainer) -> None:
        self.settings = settings
        self.faults = Faults(trainer)
        self._trainer = trainer
        self.board = Board(settings, trainer, self.prefix, self.faults)
        self.epoch = 0
        self._processes = Processes()
        self.found: Found | None = None  # on the first batch of validation
        self._extra: ExtraInputs | None = None  # what the network takes from a batch besides inputs
        self._is_checked = settings.access.forward_fn is not None  # what a user says is not questioned
        self._sample: FixedSample | None = None
        self._margins: tuple[int, Rows] | None = None  # of the last validation, after how many training batches
        self._watch: Watch | StepRoute | None = None

    @property
    def prefix(self) -> str:
        """Prefix of the keys of this run."""
        return f"test_{self.settings.prefix}" if self._trainer.testing else self.settings.prefix

    @property
    def _module(self) -> LightningModule:
        return self._trainer.lightning_module

    def log(self, values: Mapping[str, float], attack: str | None = None) -> None:
        """Log values as the module would, one attack on the progress bar; some loggers get theirs from us."""
        headlines = (*_HEADLINES, f"adv_acc/{attack}")
        is_safe, has_details = takes_any_key(self._trainer), self.settings.log_details
        for name, value in values.items():
            is_given = is_safe and (has_details or not get_key(name).group)
            logger = None if is_given else False  # True would warn of a Trainer without a logger
            # All processes have the same values, except for the times
            options: dict[str, Any] = {"sync_dist": True, "reduce_fx": "max", "batch_size": 1, "logger": logger}
            self._module.log(tag(self.prefix, name), value, prog_bar=name in headlines, **options)
        if not is_safe:
            self.hand_over({tag(self.prefix, name): value for name, value in values.items()})

    def hand_over(self, values: Mapping[str, float]) -> None:
        """Hand values to loggers by ourselves, so that one that rejects a key does not end the run."""
        has_details = self.settings.log_details
        chosen = {key: value for key, value in values.items() if has_details or key.startswith(f"{self.prefix}/")}
        for logger in self._trainer.loggers:
            with self.faults.skipping(f"some values could not be logged by {type(logger).__name__}"):
                log_values(logger, chosen, self.epoch, log_step(self._trainer))

    def close_epoch(self) -> None:
        """Stop watching validation, and remove all hooks."""
        if self._watch is not None:
            self._watch.close()
        self._watch, self.faults.error = None, None

    def before_batch(self, loaded: Any) -> None:
        """See a batch before validation does."""
        if self.faults.error is not None:
            return
        with self.faults.guard():
            batch = self.settings.access.read(loaded)
            if self.found is None and is_sharded(self._trainer):
                # No process can run a pass of its own: the first validation step shows what otherwise that does
                self._watch = StepRoute(self._module, batch, self.settings.access.head)
                return
            if self.found is None:
                self.found = self._inspect(batch)
            if not isinstance(self._watch, Watch):
                self._watch = self._open(self.found.route)
            self._watch.before(batch)

    def after_batch(self) -> None:
        """See what validation made of the batch."""
        if self.faults.error is not None or self._watch is None:
            return
        with self.faults.guard():
            if isinstance(self._watch, StepRoute):
                self._watch = self._open_after(self._watch)
                return
            is_ours, self._is_checked = self._watch.after(), self._watch.is_checked
            if is_ours and self._watch.uses_hooks:
                self.faults.warn(
                    "validation does not run the network on the unchanged inputs of its batch, so RDI and ROBY take "
                    "another forward pass. All values are of `forward`, or `forward_fn=`, on these inputs.",
                    key="forward",
                )

    def end_sanity_check(self) -> None:
        """End the epoch without measuring anything."""
        if self._watch is None:
            self._check_loader()
        elif isinstance(self._watch, Watch) and self._watch.sample is not None:
            difference = 0.0
            with self.faults.guard():
                difference = self._difference(self._watch.sample, self._watch.features)
            check_sample(self.faults, difference, self._watch)
        self.close_epoch()

    def find_collisions(self) -> set[str]:
        """Return our keys that someone else has logged in this validation epoch; refuse them before training."""
        collisions = {key for key in logged_in_this_epoch(self._trainer) if name_of(self.prefix, key)}
        if collisions:
            self.faults.refuse(
                f"expected to be alone in logging {', '.join(sorted(collisions))} but the module or another callback "
                f"logs it too. Pass another `prefix` than {self.settings.prefix!r}.",
                consequence="Ours is left out.",
            )
        return collisions

    def end_epoch(self, due: Sequence[str], is_last: bool) -> Findings | None:
        """Measure everything at the end of a validation epoch; None if the epoch was left out."""
        left_out, watch, error = f"left epoch {self.epoch} out", self._watch, self.faults.error
        self.close_epoch()
        found: Found | None = None
        with self.faults.skipping(left_out):
            with self._processes.step():
                if error is not None:
                    raise error
            found = agree(self._processes, None if watch is None else self.found)
            if found is None:
                self._check_loader()
                self.faults.report(left_out, f"no batch came from loader {self.settings.dataloader_idx}")
        if found is None:
            return None
        self.found = found
        # An error in one of several processes is raised, since the others would wait for this one
        with self.faults.skipping(left_out, is_raised_early=True) if self._processes.number == 1 else nullcontext():
            return self._end(found, watch, due, is_last)
        return None

    def _end(self, found: Found, watch: Watch | StepRoute | None, due: Sequence[str], is_last: bool) -> Findings | None:
        """Measure everything with what was found out about the module."""
        own = watch.features if isinstance(watch, Watch) else self._features(found.route)
        features = own.compute(self._processes)
        self._margins = num_training_batches(self._trainer), features.margins
        if features.outputs in OUTPUT_WARNINGS:
            self.faults.warn(OUTPUT_WARNINGS[features.outputs], key=features.outputs)
        warn_of_classes(self.faults, self._trainer, self.settings.dataloader_idx, features, found.route)
        if self._sample is None:
            self._keep(watch.sample if isinstance(watch, Watch) else None)
        subject = self._subject()
        plan, difference = self.settings.plan, 0.0
        with suppress(Exception):  # what measures will say that the network fails
            difference = 0.0 if self._sample is None else self._difference(self._sample, own)
        if not check_sample(self.faults, max(self._processes.gather(difference)), watch):
            features = features._replace(margins=Rows.join([]))  # they are not of the sample's positions
        rows = {} if found.is_discrete else self._measure([*plan.meters(), *plan.attack_meters(due)], subject)
        findings = self._conclude(plan, features, rows)
        if findings is None:
            return None
        if findings.is_shuffled:
            self.faults.warn(SHUFFLED, key="shuffled")
        return self._shown(findings, subject, is_last)

    def _conclude(self, plan: Plan, *found: Any) -> Findings | None:
        """Draw the conclusions, the same in all processes; None where that fails."""
        with self.faults.skipping(f"left epoch {self.epoch} out", is_raised_early=True):
            return conclude(plan, *found)
        return None

    def attack_at_the_end(self, due: Sequence[str]) -> tuple[dict[str, float], dict[str, Assisted]]:
        """Run attacks after the last validation epoch, and the one that gives the final verdict.

        Margins of that epoch assist if no training batch came since.
        """
        values, estimates = dict[str, float](), dict[str, Assisted]()
        if self.found is None or self.found.is_discrete:
            return values, estimates
        settings, subject = self.settings, self._subject()
        batch, margins = self._margins or (-1, None)
        margins = margins if batch == num_training_batches(self._trainer) else None
        rows = self._measure(settings.plan.attack_meters(due), subject) if due else {}
        if rows and (findings := self._conclude(settings.plan, None, rows, margins)):
            findings = self._shown(findings, subject, is_last=True)
            values, estimates = findings.values, findings.estimates
        final = settings.final_plan
        verdict = self._conclude(final, None, self._measure(final.attack_meters(), subject), margins)
        last = {} if verdict is None else verdict.values
        return values | {key: value for key, value in last.items() if key.endswith(f"/{FINAL}")}, estimates

    def _inspect(self, batch: Batch) -> Found:
        """Find out about the module, and try everything that may fail, on the first batch of the run."""
        settings, is_new = self.settings, not has_trained(self._trainer)
        if settings.attacks:
            require_labels(batch.y, "attacks", otherwise="watch without them: `attacks=()`")
        subject = self._subject()
        warn_of_leaks(self.faults, subject, batch.first(2))
        subject, found = inspect(subject, batch, settings.needs_gradients)
        if settings.needs_gradients and not found.is_discrete and is_new:  # later, what fails is left out when it does
            rehearse(subject, batch, settings.plan.meters(), settings.attacks)
        announce(self._trainer, settings.dataloader_idx, found.route)
        self._extra = subject.extra
        return found

    def _open_after(self, step: StepRoute) -> Watch:
        """Find out about the module by the validation step that has just run on the first batch of the run."""
        step.close()
        route, call = step.find()
        if group_size(self._trainer) > 1 and route.head is not None:
            reason = "layers are divided among processes, each of which may have a part of the embedding"
            route = route._replace(head=None, num_features=0, reason=reason)
        check_route(self._module, route, step.batch.y, self.settings.access.num_classes)
        announce(self._trainer, self.settings.dataloader_idx, route)
        self.found = Found(route)
        watch = self._open(route)
        watch.before(step.batch)
        watch.after(call if route.head is not None else call._replace(embedding=None))
        return watch

    def _open(self, route: Route) -> Watch:
        settings, trainer = self.settings, self._trainer
        loader, num_batches = evaluation_loader(trainer, settings.dataloader_idx)
        share = loader_share(loader, num_batches, is_alone=self._processes.number == 1)
        if share.num_replicas == 1 and self._processes.number > 1:  # no process knows what the others see
            share = LoaderShare(None, self._processes.number, self._processes.rank)
        if trainer.global_rank % group_size(trainer):  # of processes that see the same samples, one counts
            share = share._replace(total=0)
        size = _NUM_COMPARED if trainer.sanity_checking else settings.sample_size
        sample = FixedSample(size, share.total, settings.plan.seed) if self._sample is None else None
        has_passes = not is_sharded(trainer)
        is_checked = self._is_checked or not has_passes
        return Watch(self._subject(), route, self._features(route), share, sample, is_checked, has_passes)

    def _features(self, route: Route) -> FeaturePass:
        plan, device = self.settings.plan, self._module.device
        return FeaturePass(route.num_classes, plan.storage, device, route.head is not None, plan.roby_p)

    def _keep(self, sample: FixedSample | None) -> None:
        """Keep the sample for the rest of the run; a process without batches has none of its samples."""
        sample = sample or FixedSample(0, None)
        positions = self._processes.gather((sample.needs_sharing, sample.positions))
        if self._processes.number > 1 and any(needs_sharing for needs_sharing, _ in positions):
            sample.share_with(torch.cat([own for _, own in positions]))
        self._sample = sample

    def _difference(self, sample: FixedSample, features: FeaturePass) -> float:
        """Compare some of the sample's outputs with those that validation computed, relative to the tolerance."""
        if not self.settings.needs_gradients or self.found is None or self.found.is_discrete:
            return 0.0
        subject = self._subject()
        samples = sample.take(_NUM_COMPARED, subject.extra_names)
        return largest_difference(subject, samples, features.outputs()) / tolerance_of(self._trainer, features.is_half)

    def _measure(self, meters: Sequence[Meter], subject: Subject) -> dict[str, Rows]:
        """Measure one part after the other; leave out what fails."""
        rows: dict[str, Rows] = {}
        if self._sample is None:
            return rows
        for meter in meters:
            with self.faults.skipping(f"{meter.label} failed and is left out of epoch {self.epoch}"):
                samples = self._sample.take(meter.size, subject.extra_names)
                rows[meter.name] = measure(meter, subject, samples, self._processes)
        return rows

    def _shown(self, findings: Findings, subject: Subject, is_last: bool) -> Findings:
        """Show findings on the board, and warn of masked gradients; add the time that pictures took."""
        start = perf_counter()
        if findings.signs:
            reasons = " ".join(f"{sign.evidence} {sign.explanation} {sign.remedy}" for sign in findings.signs)
            self.faults.warn(f"gradients seem to be masked, so success rates are too low. {reasons}", key="masking")
        examples: dict[str, Examples] = {}
        if self.board.draws(is_last):
            with self.faults.skipping("pictures of adversarial inputs are left out"):
                examples = self._examples(findings, subject)
        self.board.show(findings, examples, self.epoch, subject, self._sample)
        findings.values["seconds/figures"] = perf_counter() - start
        return findings

    def _examples(self, findings: Findings, subject: Subject) -> dict[str, Examples]:
        """Attack a few of the samples again that were broken."""
        found: dict[str, Examples] = {}
        for meter in self.settings.plan.attack_meters(findings.attacks):
            rows = findings.attacks[meter.key]
            positions = rows.positions[rows["success"]][:_NUM_EXAMPLES]
            if self._sample is not None and len(positions):
                samples = self._sample.take(meter.size, subject.extra_names)
                examples = attack_again(meter, subject, samples, positions, self._processes)
                found |= {} if examples is None else {meter.key: examples}
        return found

    def _subject(self) -> Subject:
        """Describe the network, on the device where it is now, as far as it is known."""
        plan, access, wanted = self.settings.plan, self.settings.access, self.settings.progress
        is_shown = self._trainer.progress_bar_callback is not None if wanted is None else wanted
        progress = is_shown and self._trainer.is_global_zero
        forward, device = forward_of(self._module, access.forward_fn), self._module.device
        route = None if self.found is None else self.found.route
        options = plan.batch_size, plan.seed, progress, self._extra, route
        return Subject(self._module, access, forward, device, *options)

    def _check_loader(self) -> None:
        """Check that there is a loader of this index, where no batch came from it."""
        with self.faults.guard():
            evaluation_loader(self._trainer, self.settings.dataloader_idx)
