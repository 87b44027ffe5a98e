import pytest
import torch

from lightning_robustness.metrics import ROBY
from tests import references


@pytest.mark.parametrize("normalization", ["pairs", "all", "none"])
def test_pairs_are_a_symmetric_matrix(normalization):
    features, preds = torch.randn(40, 3, dtype=torch.float64), torch.arange(40) % 4
    preds[preds == 2] = 0
    metric = ROBY(4, normalization=normalization, storage="streaming")
    metric.update(features, preds)
    parts, expected = metric.compute_components(), references.roby(features, preds, normalization=normalization)
    pairs = parts["pairs"]
    assert [pairs[0, 1], pairs[0, 3], pairs[1, 3]] == pytest.approx(expected["pairs"], abs=1e-10)
    torch.testing.assert_close(pairs, pairs.T, equal_nan=True)
    assert pairs.isnan().sum() == 4 + 6


@pytest.mark.parametrize("normalization", ["pairs", "none"])
def test_plot(normalization):
    metric = ROBY(3, normalization=normalization)
    metric.update(torch.randn(20, 5), torch.arange(20) % 3)
    _, axis = metric.plot()
    bounded = axis.get_ylim() == pytest.approx((-0.1, 1.1))  # the bounds, and a tenth of their distance
    assert bounded == (normalization == "pairs")
