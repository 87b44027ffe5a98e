import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_robustness._lightning.epoch_means import EpochMeans


def test_weighted_means_and_a_new_start():
    means = EpochMeans()
    for value, weight in ((1.0, 3), (5.0, 1)):
        means.add("first", torch.tensor(value, dtype=torch.float64), weight)
    means.add("second", torch.tensor(2.0, requires_grad=True), torch.tensor(7))
    values = means.compute(SingleDeviceStrategy())
    assert {name: value.item() for name, value in values.items()} == {"first": pytest.approx(2.0), "second": 2.0}
    assert not values["second"].requires_grad
    assert means.compute(SingleDeviceStrategy()) == {}


def test_nothing_counts_for_nothing():
    means = EpochMeans()
    means.add("some", torch.tensor(float("nan")), 0)
    means.add("none", torch.tensor(float("nan")), 0)
    means.add("some", 4.0, 2)
    assert means.compute(SingleDeviceStrategy()) == {"some": torch.tensor(4.0)}


def test_values_of_another_shape_count_by_their_mean():
    means = EpochMeans()
    means.add("loss", torch.tensor([3.0]), 2)
    means.add("loss", torch.tensor(6.0), 1)
    assert means.compute(SingleDeviceStrategy()) == {"loss": torch.tensor(4.0)}


class TwoRanks:
    """A strategy that adds what another process has."""

    root_device = torch.device("cpu")

    def reduce(self, tensor, reduce_op):
        assert reduce_op == "sum"
        return tensor + torch.tensor([30.0, 3.0])


def test_all_processes_count_by_their_samples():
    means = EpochMeans()
    means.add("value", torch.tensor(2.0), 1)
    assert means.compute(TwoRanks())["value"].item() == 8.0
