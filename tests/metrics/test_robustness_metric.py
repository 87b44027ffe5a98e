import pytest
import torch

from lightning_robustness.metrics._base import RobustnessMetric


class Mean(RobustnessMetric):
    """The mean of some numbers, with the largest as a part."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self._add_float_state("total", torch.zeros(()))
        self._add_float_state("largest", torch.zeros(()), "max")
        self._add_counts("count")

    def update(self, values):
        self.total = self.total + values.sum()
        self.largest = torch.maximum(self.largest, values.max())
        self.count = self.count + len(values)

    def compute(self):
        self._components = {"mean": self.total / self.count, "max": self.largest}
        return self._components["mean"]


def test_components_are_those_of_all_batches():
    metric = Mean()
    metric.update(torch.tensor([1.0, 2.0]))
    assert metric.compute_components() == {"mean": 1.5, "max": 2}
    metric.update(torch.tensor([6.0]))
    components = metric.compute_components()
    assert components == {"mean": 3, "max": 6}
    components.clear()
    assert metric.compute_components() == {"mean": 3, "max": 6}


def test_sums_do_not_round_in_float32():
    metric = Mean()
    metric.update(torch.tensor([2.0**25]))
    for _ in range(3):
        metric.update(torch.tensor([1.0]))
    assert metric.compute() == (2**25 + 3) / 4


def evaluate_share(rank, shares):
    metric = Mean()
    metric.update(torch.tensor(shares[rank]))
    return metric.compute_components()


def test_two_processes_equal_one(two_processes):
    for components in two_processes(evaluate_share, [[1.0, 2.0, 9.0], [4.0]]):
        assert components == {"mean": 4, "max": 9}


def test_plot():
    metric = Mean()
    metric.update(torch.tensor([1.0, 2.0]))
    _, axis = metric.plot()
    assert list(axis.lines[0].get_ydata()) == pytest.approx([1.5])
    _, axis = metric.plot([torch.tensor(0.1), torch.tensor(0.4)])
    assert list(axis.lines[0].get_ydata()) == pytest.approx([0.1, 0.4])
