import math
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from scipy.stats import chisquare
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

from lightning_robustness._measurement.samples import FixedSample, LoaderShare, Samples, loader_share, spread_indices
from lightning_robustness._model.batch import Batch

SEEDS = st.integers(0, 2**32)


def stream(sample, indices, splits=(), has_labels=True):
    """Hand over samples, whose inputs and labels say which they are, in batches that end at the splits."""
    for batch in np.split(np.asarray(indices), splits):
        positions = torch.tensor(batch, dtype=torch.long)
        x = positions.reshape(-1, 1, 1) + torch.tensor([[0.0, 0.5]])
        sample.add(Batch(x, positions % 10 if has_labels else None, positions=positions))
    return sample


def collected(sample, size=10**6):
    """Positions of the samples that were kept, or of a smaller sample of them."""
    x, y, positions, _ = sample.take(size)
    if len(positions):
        assert torch.equal(x, positions.reshape(-1, 1, 1) + torch.tensor([[0.0, 0.5]]))
        assert torch.equal(y, positions % 10)
    return positions.tolist()


def splits(total):
    return st.lists(st.integers(0, total), max_size=8).map(sorted)


@given(st.integers(0, 300), st.integers(0, 1000), SEEDS)
def test_one_index_in_each_of_equal_parts(size, total, seed):
    indices = spread_indices(size, total, seed)
    size = min(size, total)
    assert indices.dtype == np.int64
    assert len(indices) == size
    for part, index in enumerate(indices.tolist()):
        # in integers: the part is from part / size to (part + 1) / size of the whole, each end rounded down
        assert part * total // size <= index < (part + 1) * total // size


def test_a_large_data_set():
    indices = spread_indices(2**20, 2**40)
    assert np.array_equal(indices // 2**20, np.arange(2**20))


def test_indices_depend_on_the_seed_alone():
    np.random.seed(0)
    first = spread_indices(50, 1000, seed=3)
    np.random.seed(1)
    assert np.array_equal(spread_indices(50, 1000, seed=3), first)
    assert not np.array_equal(spread_indices(50, 1000, seed=4), first)


def test_every_index_is_as_likely():
    """Over many seeds, indices of a part come equally often."""
    counts = np.bincount(np.concatenate([spread_indices(4, 40, seed) for seed in range(5000)]), minlength=40)
    assert counts.reshape(4, 10).sum(axis=1).tolist() == [5000] * 4
    assert min(chisquare(part).pvalue for part in counts.reshape(4, 10)) > 0.001


@given(st.data(), st.integers(0, 40), st.integers(0, 120), SEEDS)
def test_the_sample_is_that_of_spread_indices_whatever_the_batches(data, size, total, seed):
    expected = spread_indices(size, total, seed).tolist()
    sample = stream(FixedSample(size, total, seed), range(total), data.draw(splits(total)))
    assert collected(sample) == collected(sample, size) == expected


@given(st.data(), st.integers(0, 40), st.integers(0, 120), SEEDS, st.integers(1, 4))
def test_several_processes_keep_together_what_one_keeps(data, size, total, seed, num_processes):
    expected = spread_indices(size, total, seed)
    smaller = expected[spread_indices(size // 2, len(expected), seed)].tolist()
    kept, kept_smaller = [], []
    for rank in range(num_processes):
        indices = range(rank, total, num_processes)
        sample = stream(FixedSample(size, total, seed), indices, data.draw(splits(len(indices))))
        kept += collected(sample)
        kept_smaller += collected(sample, size // 2)
    assert sorted(kept) == expected.tolist()
    assert sorted(kept_smaller) == smaller


@given(st.integers(1, 60), st.integers(0, 60), st.integers(60, 500), SEEDS)
def test_smaller_samples_are_part_of_the_larger_and_as_spread(size, smaller, total, seed):
    sample = stream(FixedSample(size, total, seed), range(total))
    positions = collected(sample)
    rows = [positions.index(position) for position in collected(sample, smaller)]
    assert len(rows) == min(smaller, size)
    assert rows == sorted(rows)
    for part, row in enumerate(rows):
        assert part * size // len(rows) <= row < (part + 1) * size // len(rows)


@given(st.data(), st.integers(0, 30), st.integers(0, 200), SEEDS)
def test_streams_give_the_same_sample_whatever_the_batches(data, size, total, seed):
    whole = stream(FixedSample(size, None, seed), range(total))
    batched = FixedSample(size, None, seed)
    for batch in np.split(np.arange(total), data.draw(splits(total))):
        stream(batched, batch)
        assert len(batched.positions) <= 2 * size
    positions = collected(whole)
    assert collected(batched) == positions
    assert len(positions) == len(set(positions)) == min(size, total)
    assert positions == sorted(positions)
    assert all(position < total for position in positions)


@given(st.lists(st.integers(0, 40), min_size=2, max_size=2), SEEDS)
def test_smaller_samples_of_a_stream_are_those_of_a_smaller_size(sizes, seed):
    small, large = sorted(sizes)
    sample = stream(FixedSample(large + 1, None, seed), range(300), range(0, 300, 7))
    assert set(collected(sample, small)) <= set(collected(sample, large))
    assert collected(sample, small) == collected(stream(FixedSample(small, None, seed), range(300)))


@pytest.mark.parametrize("total", [24, 100])
def test_samples_of_streams_are_uniform(total):
    """Over many seeds, every index is kept equally often, and so is every pair of neighbours."""
    kept = np.zeros((1500, total))
    for seed, row in enumerate(kept):
        row[collected(stream(FixedSample(6, None, seed), range(total), [total // 3]))] = 1
    assert (kept.sum(axis=1) == 6).all()
    # indices are drawn without replacement: the variance of a count is smaller than a Poisson one by 1 - 6 / total
    statistic = ((kept.sum(axis=0) - 9000 / total) ** 2).sum() / (9000 / total * (1 - 6 / total))
    assert abs(statistic - (total - 1)) < 4 * np.sqrt(2 * (total - 1))
    pairs = (kept[:, 1:] * kept[:, :-1]).sum()
    expected = 1500 * (total - 1) * 6 * 5 / (total * (total - 1))
    assert abs(pairs - expected) < 4 * np.sqrt(expected)


def test_rows_do_not_keep_their_batches_alive():
    for sample in (FixedSample(3, None), FixedSample(3, 100)):
        stream(sample, range(100), [50])
        assert {x.untyped_storage().nbytes() for part in sample._kept for x in part.x} == {2 * 4}


def test_later_changes_of_a_batch_do_not_reach_the_sample():
    for total in (None, 4):
        sample, x, y = FixedSample(4, total), torch.zeros(4, 2, requires_grad=True), torch.zeros(4, dtype=torch.long)
        sample.add(Batch(x, y, positions=torch.arange(4)))
        x.data.fill_(1), y.fill_(1)
        kept = sample.take(4)
        assert not kept.x.requires_grad
        assert kept.x.tolist() == [[0, 0]] * 4
        assert kept.y.tolist() == [0] * 4


@pytest.mark.parametrize("total", [None, 20])
def test_without_labels(total):
    samples = stream(FixedSample(5, total), range(20), [3], has_labels=False).take(5)
    assert samples.x.shape == (5, 1, 2)
    assert samples.y is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_types_are_kept(dtype):
    sample = FixedSample(2, 4)
    x, y = torch.rand(4, 3, dtype=dtype), torch.arange(4, dtype=torch.int32)
    sample.add(Batch(x, y, positions=torch.arange(4)))
    samples = sample.take(2)
    assert (samples.x.dtype, samples.y.dtype) == (dtype, torch.int32)


@pytest.mark.parametrize("total", [None, 100])
def test_a_process_whose_samples_are_not_chosen_has_none_of_the_right_kind(total):
    sample = FixedSample(0 if total is None else 1, total)
    chosen = set(spread_indices(1, 100).tolist())
    others = torch.tensor([index for index in range(100) if index not in chosen])
    sample.add(Batch(torch.rand(99, 3, 2, dtype=torch.double), torch.arange(99), positions=others))
    samples = sample.take(1)
    assert (samples.x.shape, samples.x.dtype) == ((0, 3, 2), torch.double)
    assert (samples.y.shape, samples.y.dtype) == ((0,), torch.long)
    assert samples.positions.tolist() == []


def test_a_process_that_sees_nothing_does_not_know_whether_there_are_labels():
    samples = FixedSample(3, 100).take(3)
    assert (len(samples.x), samples.y.tolist(), samples.positions.tolist()) == (0, [], [])


def test_labels_are_in_all_batches_or_in_none():
    sample = FixedSample(4, None)
    sample.add(Batch(torch.ones(1, 2), torch.tensor([1]), positions=torch.tensor([0])))
    with pytest.raises(ValueError, match="labels in all batches or in none"):
        sample.add(Batch(torch.ones(1, 2), None, positions=torch.tensor([1])))


@pytest.mark.parametrize("number", [2, 3])
def test_shares_of_a_stream_are_the_sample_of_the_whole(number):
    whole = stream(FixedSample(7, None, 1), range(50))
    shares = [stream(FixedSample(7, None, 1), range(rank, 50, number), [3]) for rank in range(number)]
    everywhere = torch.cat([share.positions for share in shares])
    for share in shares:
        assert share.needs_sharing
        share.share_with(everywhere)
    for size in (4, 7):
        assert sorted(position for share in shares for position in collected(share, size)) == collected(whole, size)


def ragged():
    """Samples of two shapes, in turns, each with a mask and something that models do not take."""
    x = [torch.full((2 + number % 2,), float(number)) for number in range(6)]
    extras = [{"mask": torch.tensor([number < 4]), "path": torch.tensor([number])} for number in range(6)]
    return Samples(x, torch.arange(6), torch.arange(6) * 10, extras)


def test_samples_that_can_be_measured_together_come_after_each_other():
    samples = ragged().only(["mask"])
    assert samples.positions.tolist() == [40, 0, 20, 50, 10, 30]  # by shape and mask
    assert [sorted(extras) for extras in samples.extras] == [["mask"]] * 6
    batches = samples.batches(2)
    assert [batch.positions.tolist() for batch in batches] == [[40], [0, 20], [50], [10, 30]]
    assert [batch.extras["mask"].tolist() for batch in batches] == [[[False]], [[True]], [[False]], [[True]]]
    for batch in batches:
        assert (batch.x[:, 0] * 10).tolist() == batch.positions.tolist()
        assert (batch.y * 10).tolist() == batch.positions.tolist()


def test_samples_by_position():
    samples, positions = ragged(), torch.tensor([30, 0, 70])
    assert samples.at(positions).positions.tolist() == [0, 30]
    assert samples.without(positions).positions.tolist() == [10, 20, 40, 50]
    joined = Samples.join([samples.without(positions), samples.select([]), samples.at(positions)])
    assert joined.positions.tolist() == [0, 10, 20, 30, 40, 50]
    assert [extras["path"].item() for extras in joined.extras] == list(range(6))


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


BATCHES = BatchSampler(SubsetRandomSampler(range(5)), batch_size=2, drop_last=False)
LOADERS = {
    "plain": ({"batch_size": 4}, None, 11, True),
    "whole batches": ({"batch_size": 4, "drop_last": True}, None, 8, True),
    "fewer than a batch": ({"batch_size": 12, "drop_last": True}, None, 0, True),
    **{f"{number} batches": ({"batch_size": 4}, number, 4 * number, True) for number in (0, 1, 2)},
    "shuffled": ({"batch_size": 4, "shuffle": True}, None, 11, False),
    "batch sampler": ({"batch_sampler": BATCHES}, None, 5, False),
    "subset": ({"batch_size": 4, "sampler": SubsetRandomSampler(range(2, 9))}, None, 7, False),
    "with replacement": ({"sampler": RandomSampler(range(11), replacement=True, num_samples=30)}, None, 30, False),
    "weighted": ({"sampler": WeightedRandomSampler(torch.ones(11), 5)}, None, 5, False),
}


@pytest.mark.parametrize(("options", "num_batches", "total", "is_in_order"), LOADERS.values(), ids=LOADERS)
def test_loaders_say_how_many_come(options, num_batches, total, is_in_order):
    share, indices, samples = watch(DataLoader(data_set(11), **options), num_batches)
    assert share == LoaderShare(total)
    assert indices == list(range(total))  # in the order in which they come
    assert len(samples) == total
    assert samples == indices or not is_in_order


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


@pytest.mark.parametrize(
    ("total", "batch_size", "limit", "drops", "expected"), [(20, 3, 2, False, 12), (7, 2, None, True, 6)]
)
def test_samples_that_limits_and_a_distributed_sampler_leave_out(total, batch_size, limit, drops, expected):
    number, indices, samples = watch_processes(total, 2, batch_size, limit, drop_last=drops, shuffle=False)
    assert number == expected
    assert sorted(indices) == sorted(samples) == list(range(expected))


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
