import pytest
import torch
from torch import nn

from lightning_robustness import InputSpace
from lightning_robustness.functional import clever_score
from lightning_robustness.metrics import CleverScore
from tests.metrics.tester import check_metric_contract, update_in_batches

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
FEW = {"num_batches": 3, "points_per_batch": 4}


def data(num_samples=10):
    return torch.rand(num_samples, 3, generator=torch.Generator().manual_seed(1))


class OfTheModel(CleverScore):
    """The metric for one model, so that the tester need not know about it."""

    def __init__(self):
        super().__init__(radius=0.5, **FEW)

    def update(self, x):
        super().update(MODEL, x)


def score(x):
    return clever_score(MODEL, x, radius=0.5, **FEW)


def test_contract():
    check_metric_contract(OfTheModel, lambda x: score(x).mean(), (data(),), atol=1e-5)


def test_components():
    metric = update_in_batches(OfTheModel(), 4, data())
    values = score(data())
    parts = metric.compute_components()
    assert parts["mean"].item() == pytest.approx(values.mean().item(), rel=1e-4)
    assert parts["min"].item() == pytest.approx(values.min().item(), rel=1e-4)
    assert parts["count"] == 10
    metric.reset()
    metric.update(data()[:0])
    assert metric.compute_components() == {"mean": 0, "min": 0, "count": 0}


def test_the_model_is_not_stored_and_works_in_inference_mode():
    metric = CleverScore(radius=0.5, **FEW)
    with torch.inference_mode(), torch.autocast("cpu"):
        metric.update(MODEL, data())
    torch.testing.assert_close(metric.compute(), score(data()).mean())
    assert not list(metric.children())
    assert not metric.state_dict()


def test_options_reach_the_function():
    options = {"norm": "linf", "input_space": InputSpace(-9, 9, std=2.0), "chunk_size": 8, "seed": 3, **FEW}
    metric = CleverScore(0.3, **options)
    metric.update(MODEL, data())
    torch.testing.assert_close(metric.compute(), clever_score(MODEL, data(), 0.3, **options).mean())


def test_adversarial_training_moves_it_in_the_robust_direction(digits, digits_network, robust_digits_network):
    metrics = [CleverScore(radius=0.2, norm="linf", num_batches=15, points_per_batch=10) for _ in range(2)]
    for metric, network in zip(metrics, (digits_network, robust_digits_network), strict=True):
        metric.update(network, digits[0][1200:1240])
    assert CleverScore.higher_is_better
    assert metrics[1].compute() > 1.1 * metrics[0].compute()


def evaluate_share(rank, shares):
    metric = OfTheModel()
    metric.update(data()[shares[rank]])
    return metric.compute_components()


@pytest.mark.parametrize("shares", [(slice(0, 3), slice(3, 10)), (slice(0, 0), slice(0, 10))])
def test_two_processes_equal_one(two_processes, shares):
    metric = OfTheModel()
    metric.update(data())
    for result in two_processes(evaluate_share, shares):
        torch.testing.assert_close(result, metric.compute_components(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"radius": -1.0}, "`radius` to be a finite number above 0 but got -1.0"),
        ({"radius": 1.0, "norm": "l0"}, "`norm` to be one of .* but got 'l0'"),
        ({"radius": 1.0, "num_batches": 0}, "`num_batches` to be an integer of at least 1 but got 0"),
    ],
)
def test_arguments_are_checked(arguments, match):
    with pytest.raises(ValueError, match=match):
        CleverScore(**arguments)


def test_plot():
    metric = OfTheModel()
    metric.update(data())
    _, axis = metric.plot()
    assert axis.get_ylim()[0] <= 0
    _, axis = metric.plot([torch.tensor(0.1), torch.tensor(0.4)])
    assert list(axis.lines[0].get_ydata()) == pytest.approx([0.1, 0.4])
