from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_robustness._lightning.trainer import (
    evaluation_loader,
    find_class_names,
    has_trained,
    logged_in_this_epoch,
    num_training_batches,
)
from tests.callbacks.modules import Classifier, make_trainer, train_loader, val_loader


class Spy(L.Callback):
    """Note what the Trainer says in each validation epoch."""

    def __init__(self, look):
        self.look, self.seen = look, []

    def on_validation_epoch_end(self, trainer, pl_module):
        self.seen.append(self.look(trainer))


def seen_in_fit(tmp_path, look, loaders=None, **kwargs):
    spy = Spy(look)
    make_trainer(tmp_path, spy, **kwargs).fit(
        Classifier(), train_loader(), val_loader() if loaders is None else loaders
    )
    return spy.seen


def test_a_run_has_begun_after_its_first_batch(tmp_path):
    assert seen_in_fit(tmp_path, has_trained, max_epochs=2) == [False, True, True]
    assert seen_in_fit(tmp_path, num_training_batches, max_epochs=2) == [0, 10, 20]
    assert seen_in_fit(tmp_path, has_trained, fast_dev_run=True) == [False]
    assert seen_in_fit(tmp_path, num_training_batches, accumulate_grad_batches=4) == [0, 10]


def test_keys_of_this_epoch_also_on_the_sanity_check(tmp_path):
    assert seen_in_fit(tmp_path, logged_in_this_epoch) == [{"val_acc"}, {"val_acc"}]


@pytest.mark.parametrize(("limit", "number"), [(1.0, 4), (3, 3)])
def test_loaders_and_their_numbers_of_batches(tmp_path, limit, number):
    first, second = val_loader(), val_loader(batch_size=101)
    seen = seen_in_fit(tmp_path, lambda t: evaluation_loader(t, 0), [first, second], limit_val_batches=limit)
    assert [(loader.batch_size, batches) for loader, batches in seen] == [(32, 2), (32, number)]
    seen = seen_in_fit(tmp_path, lambda t: evaluation_loader(t, 1)[1], [first, second])
    assert seen == [1, 1]
    with pytest.raises(ValueError, match=r"`dataloader_idx`.* below 1, .* 1"):
        seen_in_fit(tmp_path, lambda t: evaluation_loader(t, 1), first)


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


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        *((names, NAMES) for names in (["cat", "dog"], ("cat", "dog"))),
        ([3, 5], ["3", "5"]),
        *((names, None) for names in (None, ["cat"], 2, {"cat": 0, "dog": 1})),
    ],
)
@pytest.mark.parametrize("attribute", ["classes", "class_names"])
def test_names_of_the_data_set(names, attribute, expected):
    data = dataset(**{attribute: names})
    assert names_of(data) == expected
    assert names_of(Subset(Subset(data, [0, 1, 2]), [0, 1])) == expected


def test_names_of_the_data_module_come_first():
    assert names_of(dataset(classes=["a", "b"]), class_names=NAMES) == NAMES
    assert names_of(dataset(classes=["a", "b", "c"]), number=3, class_names=NAMES) == ["a", "b", "c"]


def test_a_data_set_that_is_its_own():
    data = dataset()
    data.dataset = data
    assert names_of(data) is None
