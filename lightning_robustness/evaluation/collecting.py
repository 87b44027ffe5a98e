"""Collect the sample that is attacked, in all processes."""

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

import numpy as np
from torch import nn

from lightning_robustness._measurement.fixed_sample import FixedSample
from lightning_robustness._measurement.samples import SpreadSample
from lightning_robustness._measurement.subject import Samples
from lightning_robustness._model.access import ExtraInputs, find_extra_inputs
from lightning_robustness._processes import Processes
from lightning_robustness.evaluation.loading import EMPTY, OwnShare, iterate, take_share
from lightning_robustness.evaluation.resume import DataFingerprint, Records, hash_tensor


def collect(
    model: nn.Module,
    dataloader: Iterable[Any],
    batch_fn: Callable[..., Any] | None,
    size: int | None,
    seed: int,
    progress: bool,
    forward: Callable[..., Any] | None = None,
    input_name: str | None = None,
    processes: Processes | None = None,
    records: Records | None = None,
) -> tuple[Samples, ExtraInputs | None]:
    """Collect a sample with labels that is spread over a loader."""
    processes = processes or Processes()
    records = records or Records(None, processes)
    own, fingerprint = take_share(model, dataloader, processes, seed), DataFingerprint()
    sample = SpreadSample(2**62 if size is None else size, own.share.total, seed)
    extra, checksum, names = None, None, tuple[str, ...]()
    with processes.step(), closing(iterate(model, own, batch_fn, sample, seed, progress)) as batches:
        for number, batch in enumerate(batches):
            processes.poll()
            if number == 0:
                checksum = hash_tensor(batch.x)
                extra = find_extra_inputs(forward or model, input_name or batch.name, batch.extras)
                names = () if extra is None else extra.names
            if records.is_kept:
                fingerprint.add_labels(batch.positions, batch.y)
    check_shares(own, processes.gather(checksum))
    fixed = fix_sample(processes, own, sample, names)
    if not sum(processes.gather(len(fixed.samples.x))):
        raise ValueError(EMPTY)
    with processes.step():
        samples = fixed.samples._replace(y=fixed.samples.labels())
        fingerprint.add_inputs(samples if records.is_kept else samples.select(samples.positions[:0]))
    records.check(DataFingerprint.describe(processes.gather(fingerprint)))
    return samples, extra


def fix_sample(processes: Processes, own: OwnShare, sample: SpreadSample, names: Iterable[str]) -> FixedSample:
    """Return the share of a sample, which has its size over all processes."""
    if own.share.total is None and processes.number > 1:
        sample.share_with(np.concatenate(processes.gather(sample.indices)))
    return FixedSample(sample, names=names)


def check_shares(own: OwnShare, checksums: Iterable[int | None]) -> None:
    """Check that processes have different samples, where nothing says so."""
    found = [checksum for checksum in checksums if checksum is not None]
    if own.is_assumed and len(found) > 1 and len(set(found)) == 1:
        raise ValueError(
            "Expected a share of the data in each process but all of them start with the same batch. Pass a DataLoader "
            "over a map-style data set, of which each process takes its share, or an iterable that gives each process "
            "its own."
        )
