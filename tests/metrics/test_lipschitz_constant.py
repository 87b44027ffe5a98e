import pytest
import torch
from torch import nn

from lightning_robustness import InputSpace
from lightning_robustness.functional import lipschitz_constant
from lightning_robustness.metrics import LipschitzConstant
from tests.metrics.tester import update_in_batches

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


def data(num_samples=24):
    return torch.rand(num_samples, 6, generator=torch.Generator().manual_seed(1))


def test_components():
    metric = update_in_batches(LipschitzConstant(), 5, data(), model=(MODEL,))
    values = lipschitz_constant(MODEL, data())
    parts = metric.compute_components()
    assert parts["mean"].item() == pytest.approx(values.mean().item(), rel=1e-5)
    assert parts["max"].item() == pytest.approx(values.max().item(), rel=1e-5)
    assert parts["count"] == 24
    metric.reset()
    metric.update(MODEL, data()[:0])
    assert metric.compute_components() == {"mean": 0, "max": 0, "count": 0}


def test_options_reach_the_function():
    space = InputSpace(low=None, high=None, std=0.5)
    metric = LipschitzConstant(input_space=space)
    metric.update(MODEL, data())
    torch.testing.assert_close(metric.compute(), 2 * lipschitz_constant(MODEL, data()).mean())
