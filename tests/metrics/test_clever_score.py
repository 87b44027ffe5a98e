import pytest
import torch
from torch import nn

from lightning_robustness import InputSpace
from lightning_robustness.functional import clever_score
from lightning_robustness.metrics import CleverScore
from tests.metrics.tester import update_in_batches

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
FEW = {"num_batches": 3, "points_per_batch": 4}


def data(num_samples=10):
    return torch.rand(num_samples, 3, generator=torch.Generator().manual_seed(1))


def score(x):
    return clever_score(MODEL, x, radius=0.5, **FEW)


def test_components():
    metric = update_in_batches(CleverScore(0.5, **FEW), 4, data(), model=(MODEL,))
    values = score(data())
    parts = metric.compute_components()
    assert parts["mean"].item() == pytest.approx(values.mean().item(), rel=1e-4)
    assert parts["min"].item() == pytest.approx(values.min().item(), rel=1e-4)
    assert parts["count"] == 10
    metric.reset()
    metric.update(MODEL, data()[:0])
    assert metric.compute_components() == {"mean": 0, "min": 0, "count": 0}


def test_options_reach_the_function():
    options = {"norm": "linf", "input_space": InputSpace(-9, 9, std=2.0), "chunk_size": 8, "seed": 3, **FEW}
    metric = CleverScore(0.3, **options)
    metric.update(MODEL, data())
    torch.testing.assert_close(metric.compute(), clever_score(MODEL, data(), 0.3, **options).mean())


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
