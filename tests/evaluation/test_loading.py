import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_robustness.evaluation.collecting import collect
from lightning_robustness.evaluation.loading import check_loader, on_device
from lightning_robustness.utilities.loader_share import loader_share

MODEL = nn.Linear(1, 2)


class Stream(IterableDataset):
    def __iter__(self):
        yield from ((torch.tensor([float(number)]), number % 3) for number in range(50))


def dataset(number):
    return TensorDataset(torch.arange(float(number)).unsqueeze(1), torch.arange(number) % 7)


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader(dataset(50), batch_size=8), 50),
        (DataLoader(dataset(50), batch_size=8, drop_last=True), 48),
        (DataLoader(dataset(50), batch_sampler=[[0, 1], [2, 3]]), None),
        (DataLoader(Stream(), batch_size=8), None),
        ([(torch.rand(3, 1), torch.zeros(3))], None),
    ],
)
def test_number_of_samples(loader, expected):
    assert loader_share(loader).total == expected


@pytest.mark.parametrize(
    "loader", [DataLoader(dataset(350), batch_size=50), list(DataLoader(dataset(350), batch_size=50))]
)
def test_sample_is_spread_over_the_loader(loader):
    (x, y, indices, _), extra = collect(MODEL, loader, None, 35, seed=0, progress=False)
    assert extra is None
    assert len(x) == 35
    assert x.flatten().tolist() == indices.tolist()
    assert (x.flatten().long() % 7 == y).all()
    assert x.flatten().histc(7, 0, 350).min() >= 1  # in every seventh of the loader


@pytest.mark.parametrize("loader", [DataLoader(dataset(50), batch_size=8), DataLoader(Stream(), batch_size=8)])
def test_all_samples_in_order(loader):
    (x, *_), _ = collect(MODEL, loader, None, None, seed=0, progress=False)
    assert x.flatten().tolist() == list(range(50))


@pytest.mark.parametrize("own", [False, True])
def test_shuffled_loader_gives_the_same_samples_and_leaves_the_random_state(own):
    generator = torch.Generator().manual_seed(3) if own else None
    loader = DataLoader(dataset(100), batch_size=10, shuffle=True, generator=generator)
    states = [g.get_state() for g in (torch.default_generator, generator) if g is not None]
    first = collect(MODEL, loader, None, 10, seed=0, progress=False)[0].x
    again = [g.get_state() for g in (torch.default_generator, generator) if g is not None]
    assert all(torch.equal(before, after) for before, after in zip(states, again, strict=True))
    torch.rand(3)
    assert torch.equal(collect(MODEL, loader, None, 10, seed=0, progress=False)[0].x, first)


def test_batches_of_other_forms():
    batch = {"picture": torch.rand(4, 1), "kind": torch.arange(4)}
    (x, y, *_), _ = collect(MODEL, [batch], lambda batch: (batch["picture"], batch["kind"]), 4, seed=0, progress=False)
    assert torch.equal(x, batch["picture"])
    assert y.tolist() == [0, 1, 2, 3]


def test_errors():
    with pytest.raises(ValueError, match=r"`dataloader`.* empty"):
        collect(MODEL, [], None, 4, seed=0, progress=False)
    with pytest.raises(ValueError, match=r"labels.*`batch_fn="):
        collect(MODEL, [torch.rand(4, 1)], None, 4, seed=0, progress=False)


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_model_that_is_there_stays(device):
    model = nn.Linear(1, 2)
    weight = model.weight
    with on_device(model, device) as place:
        assert place == torch.device("cpu")
    assert model.weight is weight


class Mover(nn.Linear):
    """Tells where it is moved instead of going there."""

    def __init__(self):
        super().__init__(1, 2)
        self.moves = []

    def to(self, device):
        self.moves.append(str(device))


def fail_on(model, device):
    with on_device(model, device) as place:
        raise RuntimeError(f"{place} is out of memory")


def test_model_is_moved_and_comes_back():
    model = Mover()
    with pytest.raises(RuntimeError, match="cuda:1 is out of memory"):
        fail_on(model, "cuda:1")
    assert model.moves == ["cuda:1", "cpu"]


class Heavy(Mover):
    def to(self, device):
        super().to(device)
        if device == "cuda:1":
            raise RuntimeError("no room for it")


def test_model_that_cannot_be_moved_comes_back():
    model = Heavy()
    with pytest.raises(RuntimeError, match="no room for it"):
        fail_on(model, "cuda:1")
    assert model.moves == ["cuda:1", "cpu"]


class DataModule:
    def test_dataloader(self):
        return []


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataModule(), "the data module DataModule. Pass"),
        (dataset(3), r"TensorDataset. Pass `DataLoader\("),
        (3, "`dataloader`.* int"),
    ],
)
def test_what_is_no_loader(loader, message):
    with pytest.raises(TypeError, match=message):
        check_loader(loader)


@pytest.mark.parametrize("loader", [[], iter([]), Stream(), DataLoader(dataset(3))])
def test_what_is_a_loader(loader):
    assert check_loader(loader) is None
