import math
from itertools import chain

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_robustness._measurement.samples import LoaderShare, loader_share


def data_set(total):
    return TensorDataset(torch.arange(total))


def watch(loader, num_batches=None):
    """Go through a loader as the monitor does; return indices and the samples that they belong to."""
    num_batches = len(loader) if num_batches is None else num_batches
    share, indices, samples, seen = loader_share(loader, num_batches), [], [], 0
    for _, (batch,) in zip(range(int(num_batches)), loader, strict=False):
        mine = share.positions(seen, len(batch)).tolist()
        seen += len(batch)
        indices += mine
        samples += batch[: len(mine)].tolist()
    return share, indices, samples


def watch_processes(
    total, num_replicas, batch_size, limit=None, kind=DistributedSampler, loader_drops=False, **options
):
    """All processes, one after the other."""
    results = []
    for rank in range(num_replicas):
        sampler = kind(data_set(total), num_replicas=num_replicas, rank=rank, **options)
        loader = DataLoader(data_set(total), batch_size, sampler=sampler, drop_last=loader_drops)
        results.append(watch(loader, None if limit is None else min(limit, len(loader))))
    shares, indices, samples = zip(*results, strict=True)
    assert [share.rank for share in shares] == list(range(num_replicas))
    assert {share.num_replicas for share in shares} == {num_replicas}
    assert len({share.total for share in shares}) == 1
    return shares[0].total, list(chain(*indices)), list(chain(*samples))


@pytest.mark.parametrize(("total", "drop_last"), [(7, False), (12, False), (7, True), (3, True)])
def test_a_plain_loader_gives_everything_in_order(total, drop_last):
    loader = DataLoader(data_set(total), batch_size=4, drop_last=drop_last)
    share, indices, samples = watch(loader)
    number = total // 4 * 4 if drop_last else total
    assert share == LoaderShare(number)
    assert indices == samples == list(range(number))


@pytest.mark.parametrize("num_batches", [0, 1, 2])
def test_limited_numbers_of_batches(num_batches):
    share, indices, samples = watch(DataLoader(data_set(11), batch_size=4), num_batches)
    assert share == LoaderShare(4 * num_batches)
    assert indices == samples == list(range(4 * num_batches))


@pytest.mark.parametrize(
    ("sampler", "total"),
    [
        (SubsetRandomSampler(range(2, 9)), 7),
        (RandomSampler(range(11)), 11),
        (RandomSampler(range(11), replacement=True, num_samples=30), 30),
        (WeightedRandomSampler(torch.ones(11), 5), 5),
    ],
)
def test_samplers_say_how_many_come(sampler, total):
    share, indices, samples = watch(DataLoader(data_set(11), batch_size=4, sampler=sampler))
    assert share == LoaderShare(total)
    assert indices == list(range(total))  # in the order in which they come
    assert len(samples) == total


def test_shuffling():
    share, indices, samples = watch(DataLoader(data_set(11), batch_size=4, shuffle=True))
    assert share == LoaderShare(11)
    assert indices == sorted(samples) == list(range(11))
    assert samples != indices


def test_a_batch_sampler_of_torch():
    sampler = BatchSampler(SubsetRandomSampler(range(5)), batch_size=2, drop_last=False)
    share, indices, samples = watch(DataLoader(data_set(11), batch_sampler=sampler))
    assert share == LoaderShare(5)
    assert indices == sorted(samples) == list(range(5))


class Buckets(BatchSampler):
    """Batches of other sizes than it says."""

    def __iter__(self):
        yield from ([0], [1, 2, 3], [4, 4, 4, 4])

    def __len__(self):
        return 3


class Stream(IterableDataset):
    def __iter__(self):
        return iter((torch.tensor(index),) for index in range(11))


class StreamWithLength(Stream):
    def __len__(self):
        return 11


class SamplerWithoutLength(Sampler):
    def __init__(self):
        pass

    def __iter__(self):
        return iter(range(11))


UNKNOWN = {
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "stream with length": lambda: DataLoader(StreamWithLength(), batch_size=4),
    "batches of the data set": lambda: DataLoader([(torch.arange(8),), (torch.arange(3),)], batch_size=None),
    "batch sampler": lambda: DataLoader(data_set(11), batch_sampler=Buckets(SequentialSampler(range(4)), 2, False)),
    "list of lists": lambda: DataLoader(data_set(11), batch_sampler=[[0, 1], [2]]),
    "sampler without length": lambda: DataLoader(data_set(11), batch_size=4, sampler=SamplerWithoutLength()),
    "list of batches": lambda: [(torch.arange(8),), (torch.arange(3),)],
    "generator": lambda: ((torch.arange(3),) for _ in range(2)),
}


@pytest.mark.parametrize("loader", UNKNOWN)
def test_loaders_of_which_nothing_is_known(loader):
    share, indices, samples = watch(UNKNOWN[loader](), num_batches=100)
    assert share == LoaderShare(None)
    assert indices == list(range(len(samples)))
    assert len(samples) == len([sample for (batch,) in UNKNOWN[loader]() for sample in batch])


def test_infinitely_many_batches():
    assert loader_share(DataLoader(data_set(11), batch_size=4), math.inf) == LoaderShare(None)


@pytest.mark.parametrize(("total", "batch_size"), [(1, 2), (7, 2), (12, 3)])  # in order, see below
def test_two_processes_see_a_shuffled_data_set_once(total, batch_size):
    number, indices, samples = watch_processes(total, 2, batch_size, shuffle=True)
    assert number == total
    assert sorted(indices) == sorted(samples) == list(range(total))


def test_indices_are_those_of_the_data_set():
    _, indices, samples = watch_processes(7, 2, 2, shuffle=False)
    assert indices == samples == [0, 2, 4, 6, 1, 3, 5]


@given(
    st.integers(1, 60),
    st.integers(1, 5),
    st.integers(1, 9),
    st.one_of(st.none(), st.integers(0, 4)),
    st.booleans(),
    st.booleans(),
)
def test_any_number_of_processes(total, num_replicas, batch_size, limit, drops, loader_drops):
    assume(total >= num_replicas or not drops)  # of nothing, torch makes no loader
    number, indices, samples = watch_processes(
        total, num_replicas, batch_size, limit, drop_last=drops, loader_drops=loader_drops, shuffle=False
    )
    # no sample twice, and none that is left out between others
    assert sorted(indices) == list(range(number))
    assert sorted(samples) == sorted(indices)
    if limit is None and not drops and not loader_drops:
        assert number == total


def test_limited_numbers_of_batches_of_two_processes():
    number, indices, samples = watch_processes(20, 2, 3, limit=2, shuffle=False)
    assert number == 12
    assert sorted(indices) == sorted(samples) == list(range(12))


def test_samples_that_a_distributed_sampler_leaves_out():
    number, indices, samples = watch_processes(7, 2, 2, drop_last=True, shuffle=False)
    assert number == 6
    assert sorted(indices) == sorted(samples) == list(range(6))


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_a_sampler_that_repeats_nothing(batch_size):
    """Lightning's own, with unequal shares, also in numbers of batches."""
    number, indices, samples = watch_processes(9, 2, batch_size, kind=UnrepeatedDistributedSampler, shuffle=False)
    assert number == 9
    assert sorted(indices) == sorted(samples) == list(range(9))


def test_rows_beyond_the_samples_of_a_single_process_are_not_repeated_ones():
    """A loader may make several rows of a sample."""
    loader = DataLoader(data_set(6), batch_size=2, collate_fn=lambda batch: [torch.stack([x for (x,) in batch] * 2)])
    share, indices, samples = watch(loader)
    assert share == LoaderShare(6)
    assert indices == list(range(12))
    assert samples == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5]
