import numpy as np
import pytest
import torch
from torch import nn

from lightning_robustness.functional import boundary_distance
from lightning_robustness.metrics import BoundaryDistance


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


def data(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(32, 6, generator=generator, dtype=torch.double).to(dtype)
    return x, torch.randint(4, (32,), generator=generator)


def test_components():
    (x, y), budgets, positions = data(), (0.0, 0.01, 0.1), (0.05, 0.5, 0.95)
    metric = BoundaryDistance("l2", budgets=budgets, quantiles=positions)
    for part in range(0, 32, 5):
        metric.update(network(), x[part : part + 5], y[part : part + 5])
    distances = boundary_distance(network(), x, y, "l2").double().numpy()
    parts = metric.compute_components()
    assert parts["median"].item() == pytest.approx(np.median(distances), abs=1e-6)
    assert parts["quantiles"].numpy() == pytest.approx(np.quantile(distances, positions), abs=1e-6)
    shares = (distances[:, None] > np.array(budgets)).mean(axis=0)
    assert parts["beyond"].numpy() == pytest.approx(shares)
    assert 0 < shares[-1] < shares[0] < 1
    # Wilson's interval is where the normal test of the share does not reject
    for bound in ("beyond_low", "beyond_high"):
        r = parts[bound].double().numpy()
        assert np.abs(shares - r) / np.sqrt(r * (1 - r) / 32) == pytest.approx(1.959964, rel=1e-3)
    assert (parts["infinite"], parts["count"]) == (0, 32)


@pytest.mark.parametrize(("name", "value"), [("confidence", 1.0), ("confidence", 0), ("quantiles", [0.5, 1.5])])
def test_shares_are_checked(name, value):
    with pytest.raises(ValueError, match=f"`{name}`.*1"):
        BoundaryDistance(**{name: value})


def test_zero_gradients_are_counted():
    metric = BoundaryDistance(budgets=(0.5,))
    metric.update(lambda x: torch.stack([0 * x[:, 0], (x[:, 0] - 0.5).relu()], dim=1), torch.tensor([[0.0], [1.0]]))
    # Left of the kink both logits are equal, so that the sample is on the boundary; at 1 the margin is 0.5, slope 1
    assert metric.compute_components()["infinite"] == 0
    metric.update(lambda x: 0 * x[:, :2] + torch.tensor([1.0, 0.0]), torch.rand(3, 6))
    parts = metric.compute_components()
    assert (parts["infinite"], parts["count"]) == (3, 5)
    assert parts["median"] == torch.inf
    assert parts["beyond"].tolist() == pytest.approx([3 / 5])
    assert not any(part.float().isnan().any() for part in parts.values())


def test_no_quantiles_and_no_budgets():
    metric = BoundaryDistance(budgets=(), quantiles=())
    metric.update(network(), *data())
    parts = metric.compute_components()
    assert parts["quantiles"].shape == parts["beyond"].shape == (0,)
