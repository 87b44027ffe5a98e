import pytest
import torch

from lightning_robustness.metrics import RobustnessDifferenceIndex
from tests import references


@pytest.mark.parametrize("storage", ["exact", "streaming"])
def test_components(storage):
    features, preds = torch.randn(40, 3, dtype=torch.float64), torch.arange(40) % 4
    preds[preds == 2] = 0
    metric = RobustnessDifferenceIndex(4, storage=storage)
    metric.update(features, preds)
    parts, expected = metric.compute_components(), references.rdi(features, preds)
    for name in ("rdi", "intra", "inter"):
        assert parts[name].item() == pytest.approx(expected[name], abs=1e-10)
    assert parts["distances"][[0, 1, 3]].tolist() == pytest.approx(expected["distances"], abs=1e-10)
    assert parts["distances"][2].isnan()
    assert parts["counts"].tolist() == [20, 10, 0, 10]


def test_components_follow_updates():
    metric = RobustnessDifferenceIndex(2)
    metric.update(torch.tensor([[0.0], [1.0]]), torch.tensor([0, 1]))
    assert metric.compute_components()["rdi"] == 1
    metric.update(torch.tensor([[1.0], [0.0]]), torch.tensor([0, 1]))
    assert metric.compute_components()["rdi"] == -1
