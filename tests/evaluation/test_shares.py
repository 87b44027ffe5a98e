from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from lightning_robustness._measurement.samples import kept_generators
from lightning_robustness.evaluation.collecting import collect
from lightning_robustness.evaluation.loading import take_share

MODEL = nn.Linear(1, 2)


class OneOf:
    """One of several processes that all do the same."""

    def __init__(self, rank, number):
        self.rank, self.number = rank, number

    def step(self):
        return nullcontext()

    def gather(self, value):
        return [value] * self.number


def dataset(number=23):
    return TensorDataset(torch.arange(float(number)).unsqueeze(1), torch.arange(number) % 3)


def generator():
    return torch.Generator().manual_seed(4)


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
    "shuffled by its own generator": lambda: DataLoader(dataset(), batch_size=4, shuffle=True, generator=generator()),
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
    whole = torch.zeros(0, 1) if name == "empty" else collect(MODEL, loader, None, None, seed=3, progress=False)[0].x
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
        positions.append(own.share.indices(0, sum(map(len, share))))
    assert torch.equal(torch.cat([whole[:0], *values]), whole)
    assert np.concatenate(positions).tolist() == list(range(len(whole)))
    lengths = [len(part) for part in positions]
    assert max(lengths) - min(lengths) <= 1


def first_row(batch):
    return batch[0]


def test_settings_of_the_loader_are_kept():
    loader = DataLoader(
        dataset(), 4, num_workers=2, collate_fn=first_row, timeout=7, prefetch_factor=3, persistent_workers=True
    )
    share = take_share(MODEL, loader, OneOf(1, 2), seed=0).loader
    for name in ("dataset", "num_workers", "collate_fn", "timeout", "prefetch_factor", "worker_init_fn"):
        assert getattr(share, name) == getattr(loader, name)
    assert not share.persistent_workers  # they would outlive it


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(5)


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
    assert own.share.indices(3, 2).tolist() == [7, 9]
