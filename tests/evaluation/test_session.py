import re

import pytest
import torch
from torch import nn
from torch.utils.data import ChainDataset, DataLoader, TensorDataset

from lightning_robustness.evaluation import evaluate
from lightning_robustness.evaluation.session import check_loader, on_device

DATA = TensorDataset(torch.zeros(3, 1), torch.arange(3))
STREAM = ChainDataset([])


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_model_that_is_there_stays(device):
    model = nn.Linear(1, 2)
    weight = model.weight
    with on_device(model, device) as place:
        assert place == torch.device("cpu")
    assert model.weight is weight


class Mover(nn.Linear):
    """Tells where it is moved instead of going there, if it can."""

    def __init__(self, reason=None):
        super().__init__(1, 2)
        self.reason = reason
        self.moves = []

    def to(self, device):
        self.moves.append(str(device))
        if device == "cuda:1" and self.reason is not None:
            raise RuntimeError(self.reason)


def fail_on(model, device):
    with on_device(model, device) as place:
        raise RuntimeError(f"{place} is out of memory")


@pytest.mark.parametrize(("reason", "message"), [(None, "cuda:1 is out of memory"), ("no room", "no room")])
def test_model_is_moved_and_comes_back(reason, message):
    model = Mover(reason)
    with pytest.raises(RuntimeError, match=message):
        fail_on(model, "cuda:1")
    assert model.moves == ["cuda:1", "cpu"]


class DataModule:
    def test_dataloader(self):
        return []


X, Y = torch.rand(4, 2), torch.arange(4) % 2


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataModule(), "the data module DataModule. Pass"),
        (DATA, "TensorDataset. Pass `DataLoader("),
        (3, "got int"),
        ([X.byte(), Y], "Pass `DataLoader(TensorDataset(x, y), batch_size=128)`"),
        (
            (X, Y.double().numpy()),
            "`DataLoader(TensorDataset(torch.as_tensor(x), torch.as_tensor(y)), batch_size=128)`",
        ),
    ],
)
def test_objects_that_are_not_loaders(loader, message):
    with pytest.raises(TypeError, match=f"`dataloader`.*{re.escape(message)}"):
        check_loader(loader)


def test_columns_of_numpy_are_evaluated_by_the_remedy():
    x, y = X, Y.double().numpy()
    loader = DataLoader(TensorDataset(torch.as_tensor(x), torch.as_tensor(y)), batch_size=128)
    assert evaluate(nn.Linear(2, 2), loader, ["fgsm"], progress=False).metrics["samples"] == 4


@pytest.mark.parametrize("loader", [[], iter([]), STREAM, DataLoader(DATA)])
def test_objects_that_are_loaders(loader):
    assert check_loader(loader) is None
