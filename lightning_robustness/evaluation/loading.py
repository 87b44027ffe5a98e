"""The share of a loader that each process takes, and the pass over it."""

import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from tqdm import tqdm  # type: ignore[import-untyped]  # `tqdm.auto` begins an iterator of its own

from lightning_robustness._isolation.sandbox import sandbox
from lightning_robustness._measurement.feature_pass import OUTPUT, FeaturePass, Features, summarize
from lightning_robustness._measurement.inspection import Found, agree, outputs_of
from lightning_robustness._measurement.meters import Interrupted, Meter, measure
from lightning_robustness._measurement.rows import Rows
from lightning_robustness._measurement.samples import (
    FixedSample,
    LoaderShare,
    Samples,
    kept_generators,
    loader_share,
    warn_of_missing_shares,
)
from lightning_robustness._measurement.subject import Subject
from lightning_robustness._model.access import compute_logits
from lightning_robustness._model.batch import Batch
from lightning_robustness._model.route import Route
from lightning_robustness._processes import Processes
from lightning_robustness.attacks import run_attack
from lightning_robustness.evaluation.resume import describe_fingerprint, fingerprint_data, hash_tensor, is_same
from lightning_robustness.evaluation.session import Session
from lightning_robustness.metrics._base import Storage

_SETTINGS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "pin_memory_device", "in_order"),
)


_NUM_FIRST = 8  # samples that tell models apart whose weights are the same
_NUM_ATTACKED = 3  # those that tell attacks apart which only their authors know


class OwnShare(NamedTuple):
    """Batches of this process."""

    loader: Iterable[Any]
    share: LoaderShare
    is_assumed: bool = False


def take_share(model: nn.Module, loader: Iterable[Any], processes: Processes, seed: int) -> OwnShare:
    """Return the batches that this process evaluates.

    Of an ordinary loader over a map-style data set, each process takes a block, in the order of a single process. A
    loader that shuffles does so with the seed. Loaders that divide the samples themselves, or about which nothing is
    known, are not divided again.
    """
    if processes.number == 1:
        warn_of_missing_shares(loader)
        return OwnShare(loader, loader_share(loader, is_alone=True))
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(batch_sampler, "sampler", getattr(loader, "sampler", None))
    unknown = LoaderShare(None, processes.number, processes.rank)
    if isinstance(sampler, DistributedSampler):
        if sampler.num_replicas != processes.number:
            raise ValueError(
                f"Expected a DistributedSampler for {processes.number} processes but it divides the samples among "
                f"{sampler.num_replicas}. Pass a loader without one: each process then takes its share."
            )
        known = loader_share(loader)
        return OwnShare(loader, known if known.total is not None else unknown)
    is_sharded = any(hasattr(owner, "num_replicas") for owner in (sampler, batch_sampler))
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or batch_sampler is None:
        return OwnShare(loader, unknown, is_assumed=True)
    return OwnShare(loader, unknown) if is_sharded else _take_block(model, loader, processes, seed)


def _take_block(model: nn.Module, loader: DataLoader, processes: Processes, seed: int) -> OwnShare:
    with processes.step():
        batches = _draw_batches(model, loader, seed)
    checksums = processes.gather(zlib.crc32(repr(batches).encode()))
    if len(set(checksums)) > 1:
        raise ValueError(
            "Expected the loader to go through the data in the same order in all processes but the orders differ. Pass "
            "one that does not shuffle, or whose sampler draws from torch's global random state; a sampler that gives "
            "each process its share has to be a DistributedSampler."
        )
    total = sum(map(len, batches))
    first, end = (-(-total * rank // processes.number) for rank in (processes.rank, processes.rank + 1))
    own, position = [], 0
    for batch in batches:
        own.append(batch[max(first - position, 0) : max(end - position, 0)])
        position += len(batch)
    # Workers that persist would outlive this loader
    settings = {name: getattr(loader, name) for name in _SETTINGS if hasattr(loader, name)}
    share = DataLoader(loader.dataset, batch_sampler=[batch for batch in own if batch], **settings)
    return OwnShare(share, LoaderShare(total, first=first))


def _draw_batches(model: nn.Module, loader: DataLoader, seed: int) -> list[list[Any]]:
    """Return the indices of each batch, as an iterator of the loader would draw them in the same random state."""
    with sandbox(model, seed=seed), kept_generators(loader):
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # the seed of its workers comes first
        return [list(batch) for batch in loader.batch_sampler]  # type: ignore[union-attr]


class Measured(NamedTuple):
    """Rows of meters by name, and what was being measured when the user interrupted."""

    rows: dict[str, Rows]
    interrupted: str | None = None


class Passed(NamedTuple):
    """A pass over a loader: what was found out about the model, the features of all samples, and the sample."""

    session: Session
    found: Found | None
    features: Features | None
    sample: FixedSample
    is_interrupted: bool

    def take(self, size: int) -> Samples:
        """Return a part of the sample."""
        return self.sample.take(size, self.session.subject.extra_names)

    def measure(self, meters: Iterable[Meter]) -> Measured:
        """Measure the sample with one meter after the other, until the user interrupts."""
        if self.is_interrupted:
            return Measured({}, "the features")
        subject, processes, folder = self.session
        rows: dict[str, Rows] = {}
        for meter in meters:
            try:
                rows[meter.name] = measure(meter, subject, self.take(meter.size), processes, folder)
            except Interrupted as stop:
                finished = {} if stop.rows is None else {meter.name: stop.rows}
                return Measured(rows | finished, stop.label)
        return Measured(rows)


def pass_over(
    dataloader: Iterable[Any],
    session: Session,
    size: int | None,
    look: Callable[[Subject, Batch], tuple[Subject, Found | None]],
    storage: Storage = "auto",
    roby_p: float = 2.0,
    attacks: Mapping[str, Callable[..., Any]] | None = None,
) -> Passed:
    """Go through a loader in all processes, and collect a sample of it; all of it without a size.

    ``look`` finds out about the model on the first batch, and may find a route for the features of all samples. What
    the attacks do has to be the same in all runs with the folder.
    """
    start = perf_counter()
    subject, processes, folder = session
    own = take_share(subject.model, dataloader, processes, subject.seed)
    features = folder.features
    sample = FixedSample(2**62 if size is None else size, own.share.total, subject.seed)
    is_known = features is not None

    def open_pass(route: Route) -> FeaturePass:
        return FeaturePass(route.num_classes, storage, subject.device, route.head is not None, roby_p)

    under_way = _Pass(subject, sample, look, None if is_known else open_pass, folder.is_kept)
    is_interrupted = False
    try:
        with processes.step(), closing(_batches(own, subject)) as batches:
            for batch in batches:
                processes.poll()
                under_way.add(batch)
    except KeyboardInterrupt:
        is_interrupted = True
    _check_shares(own, processes.gather(under_way.checksum))
    found = agree(processes, under_way.found if under_way.has_samples else None)
    if found is not None and features is None:
        # A process without samples takes part with none
        features = (under_way.features or open_pass(found.route)).compute(processes)
        # Loading and forward passes count too; the slowest process has the say
        features = features._replace(seconds=max(processes.gather(perf_counter() - start)))
    subject = under_way.subject if found is None else replace(under_way.subject, route=found.route)
    passed = Passed(session._replace(subject=subject), found, features, sample, is_interrupted)
    if is_interrupted:
        return passed
    if sample.needs_sharing and processes.number > 1:
        sample.share_with(torch.cat(processes.gather(sample.positions)))
    if not sum(processes.gather(len(sample.positions))):
        raise ValueError("Expected `dataloader` to hold at least one sample but it is empty.")
    _check_data(passed, under_way.fingerprint, attacks or {})
    if features is not None and not is_known:
        folder.save_features(features)
    return passed


@dataclass
class _Pass:
    """A pass under way in this process; features are collected and samples hashed where that is wanted."""

    subject: Subject
    sample: FixedSample
    look: Callable[[Subject, Batch], tuple[Subject, Found | None]]
    open_pass: Callable[[Route], FeaturePass] | None
    is_hashed: bool
    found: Found | None = None
    features: FeaturePass | None = None
    fingerprint: Counter[str] = field(default_factory=Counter)
    checksum: int | None = None
    has_samples: bool = False

    def add(self, batch: Batch) -> None:
        """Add a batch."""
        if self.checksum is None:
            self.checksum = hash_tensor(batch.x)
            self.subject, self.found = self.look(self.subject, batch.to(self.subject.device))
            if self.found is not None and self.open_pass is not None:
                self.features = self.open_pass(self.found.route)
        self.sample.add(batch)
        if self.is_hashed:
            self.fingerprint.update(fingerprint_data(batch, self.subject.extra_names))
        if self.found is not None and self.features is not None:
            moved, tap = batch.to(self.subject.device), self.found.route.tap(self.subject.model)
            self.features.add(moved, tap.run(self.subject.logits_of_loaded(moved), moved.x))
        self.has_samples = True


def _batches(own: OwnShare, subject: Subject) -> Generator[Batch, None, None]:
    """Go through the share of a loader, with a random state of its own.

    A caller that stops early must close the iterator: until then, the model stays in the sandbox.
    """
    number = 0
    # A loader that shuffles gives every model the same order, and the caller's random state is left alone
    with sandbox(subject.model, seed=subject.seed), kept_generators(own.loader):
        for loaded in tqdm(own.loader, desc="data", leave=False, disable=None if subject.progress else True):
            batch = subject.access.read(loaded)
            positions = own.share.positions(number, len(batch.x))
            number += len(batch.x)
            if len(positions):  # a distributed sampler repeats samples at the end
                yield batch.first(len(positions))._replace(positions=positions)


def _check_data(passed: Passed, fingerprint: Counter[str], attacks: Mapping[str, Callable[..., Any]]) -> None:
    """Check that earlier results in a folder are of the same data, and of a model and attacks that compute the same."""
    subject, processes, folder = passed.session
    if not folder.is_kept:
        return
    facts = describe_fingerprint(processes.gather(fingerprint))
    # Weights do not say which activation there is, or what a closure holds, and outputs not what gradients are
    samples = passed.take(2**62)
    samples = samples.select(samples.positions.argsort()[:_NUM_FIRST])
    with processes.step():
        own = {"outputs": outputs_of(subject, samples, _NUM_FIRST), "gradients": _gradients_of(subject, samples)}
    everywhere = processes.gather(own)
    for name in own:
        values = Rows.join([found[name]] for found in everywhere)[OUTPUT][:_NUM_FIRST]
        facts[f"the model: {name} of the first samples"] = _write(values)
    foreign = {name: attack for name, attack in attacks.items() if not _is_described(attack)}
    if foreign and not (passed.found is not None and passed.found.is_discrete):
        # In one batch in any number of processes, since draws of an attack may depend on it
        first = Samples.join(processes.gather(samples))
        first = first.select(range(min(_NUM_ATTACKED, len(first.positions))))
        with processes.step():
            if processes.rank == 0:
                facts |= _describe_attacks(foreign, subject, first, folder.recorded())
    folder.check(facts)


def _is_described(attack: Callable[..., Any]) -> bool:
    """Return whether settings say all about an attack: it is of this package, and so are its members."""
    members = getattr(attack, "attacks", ())
    is_own = type(attack).__module__.partition(".")[0] == __name__.partition(".")[0]
    return is_own and all(map(_is_described, members if isinstance(members, tuple) else ()))


def _describe_attacks(
    attacks: Mapping[str, Callable[..., Any]], subject: Subject, samples: Samples, known: Mapping[str, str]
) -> dict[str, str]:
    """Describe attacks by what they do to some samples; one that never does the same twice stays as it is known."""
    facts: dict[str, str] = {}
    for name, attack in attacks.items():
        found = _changes_by(name, attack, subject, samples)
        if any(key in known and not is_same(known[key], own) for key, own in found.items()):
            again = _changes_by(name, attack, subject, samples)
            if not all(is_same(again[key], own) for key, own in found.items()):
                found = {key: known.get(key, own) for key, own in found.items()}
        facts |= found
    return facts


def _changes_by(name: str, attack: Callable[..., Any], subject: Subject, samples: Samples) -> dict[str, str]:
    """Describe the sizes of perturbations, and outputs after the attack, of samples that all count as right."""
    sizes, outputs = [], []
    for batch in replace(subject, progress=False).batches(samples, "attack", _NUM_ATTACKED):
        forward, space, seed = subject.logits_of(batch), subject.input_space, subject.seed
        with sandbox(forward, batch.x, seed=seed) as (x,), torch.no_grad():
            y = compute_logits(forward, x).argmax(dim=1)
            found = run_attack(forward, attack, x, y, input_space=space, seed=seed, positions=batch.positions)
            outputs.append(summarize(compute_logits(forward, found.x_adv)).cpu())
        sizes.append(torch.stack([found.l2, found.linf], dim=1).cpu())
    return {
        f"the attack {name}: sizes of the first perturbations": _write(torch.cat(sizes)),
        f"the attack {name}: outputs of the first adversarial inputs": _write(torch.cat(outputs)),
    }


def _write(values: Tensor) -> str:
    return " ".join(f"{value:.6g}" for value in values.flatten().tolist())


def _gradients_of(subject: Subject, samples: Samples) -> Rows:
    """Return the norm of the gradient by each input; 0 where there is none, as black-box attacks allow."""
    parts = []
    for batch in replace(subject, progress=False).batches(samples, "gradients", _NUM_FIRST):
        forward, norms = subject.logits_of(batch), torch.zeros(len(batch.x))
        with suppress(RuntimeError), sandbox(forward, batch.x) as (x,):
            outputs = summarize(compute_logits(forward, x.requires_grad_().clone()))
            (gradient,) = torch.autograd.grad(outputs.sum(), x)
            norms = torch.linalg.vector_norm(gradient.flatten(1).float(), dim=1).nan_to_num().cpu()
        parts.append(Rows(batch.positions.cpu(), {OUTPUT: norms}))
    return Rows.join([parts])


def _check_shares(own: OwnShare, checksums: Iterable[int | None]) -> None:
    """Check that processes have different samples, where nothing says so: first batches have different checksums."""
    found = [checksum for checksum in checksums if checksum is not None]
    if own.is_assumed and len(found) > 1 and len(set(found)) == 1:
        raise ValueError(
            "Expected a share of the data in each process but all of them start with the same batch. Pass a DataLoader "
            "over a map-style data set, of which each process takes its share, or an iterable that gives each process "
            "its own."
        )
