import pytest
import torch
from torch import nn

from lightning_robustness import InputSpace
from lightning_robustness.functional import lipschitz_constant
from lightning_robustness.metrics import LipschitzConstant
from tests.metrics.tester import check_metric_contract, update_in_batches

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


def data(num_samples=24):
    return torch.rand(num_samples, 6, generator=torch.Generator().manual_seed(1))


class OfTheModel(LipschitzConstant):
    """The metric for one model, so that the tester need not know about it."""

    def update(self, x):
        super().update(MODEL, x)


def test_contract():
    check_metric_contract(OfTheModel, lambda x: lipschitz_constant(MODEL, x).mean(), (data(),), atol=1e-6)


def test_components():
    metric = update_in_batches(OfTheModel(), 5, data())
    values = lipschitz_constant(MODEL, data())
    parts = metric.compute_components()
    assert parts["mean"].item() == pytest.approx(values.mean().item(), rel=1e-5)
    assert parts["max"].item() == pytest.approx(values.max().item(), rel=1e-5)
    assert parts["count"] == 24
    metric.reset()
    metric.update(data()[:0])
    assert metric.compute_components() == {"mean": 0, "max": 0, "count": 0}


def test_the_model_is_not_stored_and_left_as_it_was():
    metric, model = LipschitzConstant(), nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.inference_mode(), torch.autocast("cpu"):
        metric.update(model, data())
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not list(metric.children())
    assert not metric.state_dict()


def test_options_reach_the_function():
    space = InputSpace(low=None, high=None, std=0.5)
    metric = LipschitzConstant(input_space=space)
    metric.update(MODEL, data())
    torch.testing.assert_close(metric.compute(), 2 * lipschitz_constant(MODEL, data()).mean())


def test_adversarial_training_moves_it_in_the_robust_direction(digits, digits_network, robust_digits_network):
    metrics = LipschitzConstant(), LipschitzConstant()
    for metric, network in zip(metrics, (digits_network, robust_digits_network), strict=True):
        metric.update(network, digits[0][1200:1500])
    assert not LipschitzConstant.higher_is_better
    assert metrics[1].compute() < metrics[0].compute()


def evaluate_share(rank, shares):
    metric = OfTheModel()
    metric.update(data()[shares[rank]])
    return metric.compute_components()


@pytest.mark.parametrize("shares", [(slice(0, 10), slice(10, 24)), (slice(0, 24), slice(0, 0))])
def test_two_processes_equal_one(two_processes, shares):
    metric = OfTheModel()
    metric.update(data())
    for result in two_processes(evaluate_share, shares):
        torch.testing.assert_close(result, metric.compute_components(), atol=1e-6, rtol=0)


def test_plot():
    metric = OfTheModel()
    metric.update(data())
    _, axis = metric.plot()
    assert axis.get_ylim()[0] <= 0
    _, axis = metric.plot([torch.tensor(0.1), torch.tensor(0.4)])
    assert list(axis.lines[0].get_ydata()) == pytest.approx([0.1, 0.4])
