from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_robustness._lightning.trainer import find_class_names

NAMES = ["cat", "dog"]


def dataset(**attributes):
    data = TensorDataset(torch.zeros(4, 1), torch.zeros(4).long())
    for name, value in attributes.items():
        setattr(data, name, value)
    return data


def names_of(data, number=2, **datamodule):
    trainer = SimpleNamespace(
        testing=False,
        sanity_checking=False,
        val_dataloaders=[DataLoader(dataset()), DataLoader(data)],
        num_val_batches=[4, 4],
        datamodule=SimpleNamespace(**datamodule) if datamodule else None,
    )
    return find_class_names(trainer, 1, number)


@pytest.mark.parametrize("names", [["cat", "dog"], ("cat", "dog"), {1: "dog", 0: "cat"}])
@pytest.mark.parametrize("attribute", ["classes", "class_names"])
def test_names_of_the_data_set(names, attribute):
    data = dataset(**{attribute: names})
    assert names_of(data) == NAMES
    assert names_of(Subset(Subset(data, [0, 1, 2]), [0, 1])) == NAMES


def test_names_of_the_data_module_come_first():
    assert names_of(dataset(classes=["a", "b"]), class_names=NAMES) == NAMES
    assert names_of(dataset(classes=["a", "b", "c"]), number=3, class_names=NAMES) == ["a", "b", "c"]


@pytest.mark.parametrize("names", [None, ["cat"], 2, {"cat": 0, "dog": 1}, {0: "cat", 2: "dog"}])
def test_nobody_knows(names):
    assert names_of(dataset(classes=names)) is None


def test_numbers_are_names_too():
    assert names_of(dataset(classes=[3, 5])) == ["3", "5"]


def test_a_data_set_that_is_its_own():
    data = dataset()
    data.dataset = data
    assert names_of(data) is None
