from contextlib import nullcontext
from operator import itemgetter

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
)

from lightning_robustness._measurement.samples import kept_generators
from lightning_robustness._measurement.subject import Subject
from lightning_robustness._model.access import Access
from lightning_robustness._processes import Processes
from lightning_robustness.evaluation.loading import pass_over, take_share
from lightning_robustness.evaluation.resume import ResumeFolder
from lightning_robustness.evaluation.session import Session

MODEL = nn.Linear(1, 2)


def pass_through(loader, size, seed=0):
    subject = Subject(MODEL, Access(), MODEL, torch.device("cpu"), seed=seed)
    processes = Processes()
    session = Session(subject, processes, ResumeFolder(None, processes))
    passed = pass_over(loader, session, size, lambda subject, batch: (subject, None))
    assert (passed.session, passed.found, passed.features) == (session, None, None)
    return passed


def collect(loader, size, **options):
    """Collect a sample of a loader, all of it without a size."""
    passed = pass_through(loader, size, **options)
    assert not passed.is_interrupted
    return passed.take(2**62)


class Stream(IterableDataset):
    def __iter__(self):
        yield from ((torch.tensor([float(number)]), number % 3) for number in range(50))


def dataset(number=23):
    return TensorDataset(torch.arange(float(number)).unsqueeze(1), torch.arange(number) % 7)


@pytest.mark.parametrize("loader", [DataLoader(dataset(50), batch_size=8), DataLoader(Stream(), batch_size=8)])
def test_all_samples_in_order(loader):
    assert collect(loader, 9).positions.diff().min() > 0
    assert collect(loader, None).x.flatten().tolist() == list(range(50))


@pytest.mark.parametrize("own", [False, True])
def test_shuffled_loader_gives_the_same_samples_and_leaves_the_random_state(own):
    generator = torch.Generator().manual_seed(3) if own else None
    loader = DataLoader(dataset(100), batch_size=10, shuffle=True, generator=generator)
    states = [g.get_state() for g in (torch.default_generator, generator) if g is not None]
    first = collect(loader, 10).x
    again = [g.get_state() for g in (torch.default_generator, generator) if g is not None]
    assert all(torch.equal(before, after) for before, after in zip(states, again, strict=True))
    torch.rand(3)
    assert torch.equal(collect(loader, 10).x, first)


def test_an_empty_loader():
    with pytest.raises(ValueError, match=r"`dataloader`.* empty"):
        collect([], 4)


def test_an_interrupt_keeps_what_was_collected():
    def interrupted():
        yield torch.zeros(3, 1), torch.zeros(3, dtype=torch.long)
        raise KeyboardInterrupt

    passed = pass_through(interrupted(), 8)
    assert passed.is_interrupted
    assert passed.take(8).positions.tolist() == [0, 1, 2]


class OneOf:
    """One of several processes that all do the same."""

    def __init__(self, rank, number):
        self.rank, self.number = rank, number

    def step(self):
        return nullcontext()

    def gather(self, value):
        return [value] * self.number


class Buckets(BatchSampler):
    """Batches of unequal size, as a user's own sampler may give them."""

    def __iter__(self):
        yield from ([3, 1], [7], [0, 2, 4, 5, 6], [22, 8])

    def __len__(self):
        return 4


LOADERS = {
    "in order": lambda: DataLoader(dataset(), batch_size=4),
    "one batch": lambda: DataLoader(dataset(), batch_size=100),
    "shuffled": lambda: DataLoader(dataset(), batch_size=4, shuffle=True),
    "shuffled by its own generator": lambda: DataLoader(
        dataset(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(4)
    ),
    "without the last batch": lambda: DataLoader(dataset(), batch_size=4, drop_last=True),
    "a random part": lambda: DataLoader(dataset(), batch_size=4, sampler=SubsetRandomSampler(range(5, 17))),
    "own batches": lambda: DataLoader(dataset(), batch_sampler=Buckets(range(23), 2, drop_last=False)),
    "fewer than processes": lambda: DataLoader(dataset(2), batch_size=4),
    "empty": lambda: DataLoader(dataset(0), batch_size=4),
}


@pytest.mark.parametrize("number", [2, 3, 5])
@pytest.mark.parametrize("name", LOADERS)
def test_shares_together_are_the_loader(name, number):
    loader = LOADERS[name]()
    whole = torch.zeros(0, 1) if name == "empty" else collect(loader, None, seed=3).x
    values, positions = [], []
    for rank in range(number):
        state = torch.get_rng_state()
        own = take_share(MODEL, loader, OneOf(rank, number), seed=3)
        assert torch.equal(torch.get_rng_state(), state)
        assert own.share.total == len(whole)
        assert not own.is_assumed
        with kept_generators(own.loader):
            share = [x for x, _ in own.loader]
        values += share
        positions.append(own.share.positions(0, sum(map(len, share))))
    assert torch.equal(torch.cat([whole[:0], *values]), whole)
    assert torch.cat(positions).tolist() == list(range(len(whole)))
    lengths = [len(part) for part in positions]
    assert max(lengths) - min(lengths) <= 1


def test_settings_of_the_loader_are_kept():
    loader = DataLoader(
        dataset(), 4, num_workers=2, collate_fn=itemgetter(0), timeout=7, prefetch_factor=3, persistent_workers=True
    )
    share = take_share(MODEL, loader, OneOf(1, 2), seed=0).loader
    for name in ("dataset", "num_workers", "collate_fn", "timeout", "prefetch_factor", "worker_init_fn"):
        assert getattr(share, name) == getattr(loader, name)
    assert not share.persistent_workers  # they would outlive it


class ShardedSampler:
    """A sampler of another library, which knows its part."""

    num_replicas = 2

    def __iter__(self):
        yield from (0, 2)

    def __len__(self):
        return 2


@pytest.mark.parametrize(
    ("loader", "is_assumed"),
    [
        ([(torch.zeros(2, 1), torch.zeros(2))], True),
        (DataLoader(Stream(), batch_size=2), True),
        (DataLoader(dataset(), batch_size=None), True),
        (DataLoader(dataset(), batch_size=2, sampler=ShardedSampler()), False),
    ],
)
def test_other_loaders_are_taken_as_they_are(loader, is_assumed):
    own = take_share(MODEL, loader, OneOf(1, 2), seed=0)
    assert own.loader is loader
    assert own.is_assumed == is_assumed
    assert own.share.total is None
    assert own.share.positions(3, 2).tolist() == [7, 9]


@pytest.mark.parametrize(("size", "number"), [(None, 10), (1, 1), (7, 7), (20, 10)])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_distributed_sampler_in_a_single_process_is_named_and_its_share_is_sampled(rank, size, number):
    sampler = DistributedSampler(dataset(29), num_replicas=3, rank=rank, shuffle=False)
    with pytest.warns(UserWarning, match="one share in 3"):
        samples = collect(DataLoader(dataset(29), batch_size=4, sampler=sampler), size)
    assert len(samples.x) == number
    assert samples.x.flatten().tolist() == [(3 * position + rank) % 29 for position in samples.positions.tolist()]
