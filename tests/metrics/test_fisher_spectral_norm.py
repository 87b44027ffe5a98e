import pytest
import torch
from torch import nn

from lightning_robustness import InputSpace
from lightning_robustness.functional import fisher_spectral_norm
from lightning_robustness.metrics import FisherSpectralNorm


def network(num_classes=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, num_classes))


def batches(batch_size):
    return torch.rand(31, 6, generator=torch.Generator().manual_seed(1)).split(batch_size)


@pytest.mark.parametrize("method", ["auto", "exact", "lanczos", "power", "rayleigh", "blackbox"])
def test_components_equal_those_of_the_whole(method):
    model, metric = network(), FisherSpectralNorm(method)
    for x in batches(7):
        metric.update(model, x)
    (x,) = batches(31)
    expected = fisher_spectral_norm(model, x, method, return_components=True)
    values = expected.spectral_norm.double()
    parts = metric.compute_components()
    assert metric.compute() == parts["mean"]
    assert parts["mean"].item() == pytest.approx(values.mean().item(), rel=1e-4)
    assert parts["inverse"].item() == pytest.approx(values.reciprocal().mean().item(), rel=1e-4)
    assert parts["geometric"].item() == pytest.approx(values.log().mean().exp().item(), rel=1e-4)
    assert parts["max"].item() == pytest.approx(values.max().item(), rel=1e-4)
    assert parts["products"].item() == pytest.approx(expected.products.double().mean().item(), rel=0.1)
    assert (parts["saturated"], parts["count"]) == (0, 31)
    assert {"trace", "jacobian_norm", "lipschitz"} <= parts.keys() or method not in ("auto", "exact")
    for name in ("trace", "jacobian_norm", "lipschitz"):
        if name in parts:
            assert parts[name].item() == pytest.approx(getattr(expected, name).mean().item(), rel=1e-4)


def test_saturated_samples():
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    metric = FisherSpectralNorm(input_space=InputSpace(low=None, high=None))
    metric.update(lambda x: x @ weight.T, torch.tensor([[0.0, 0.0], [1e4, 0.0], [40.0, 0.0]]))
    parts = metric.compute_components()
    assert all(value.isfinite() for value in parts.values())
    assert parts["saturated"].item() == pytest.approx(2 / 3)
    assert parts["inverse"].item() == pytest.approx((2 + 2e12) / 3, rel=1e-4)
    assert parts["mean"].item() == pytest.approx(0.5 / 3, rel=1e-4)
