import numpy as np
import pytest
import torch
from torch import nn

from lightning_robustness.functional import boundary_distance, fisher_spectral_norm
from lightning_robustness.measurement.fisher_meter import FisherMeter
from lightning_robustness.utilities.input_space import InputSpace
from tests.measurement.subjects import samples, subject


def network(num_classes=4, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, num_classes)).to(dtype)


def inputs(number=31, dtype=torch.float32):
    return torch.rand(number, 6, generator=torch.Generator().manual_seed(1), dtype=torch.double).to(dtype)


@pytest.mark.parametrize("batch_size", [1, 7, 31])
@pytest.mark.parametrize(
    ("method", "num_classes", "dtype"),
    [
        ("auto", 4, torch.float32),
        ("auto", 4, torch.float64),
        ("auto", 2, torch.float32),
        ("lanczos", 4, torch.float64),
        ("rayleigh", 4, torch.float64),
    ],
)
def test_fisher_information(batch_size, method, num_classes, dtype):
    model, x, space = network(num_classes, dtype), inputs(dtype=dtype), InputSpace(mean=0.5, std=0.25)
    x = space.normalize(x)
    meter = FisherMeter(31, method, space, seed=3)
    meter.update(subject(model, space, batch_size=batch_size), samples(x))
    distances = boundary_distance(model, x, input_space=space).double().numpy()
    parts = fisher_spectral_norm(model, x, method, input_space=space, seed=3, return_components=True)
    lambdas = parts.spectral_norm.double().numpy()
    expected = {
        "fim": lambdas.mean(),
        "fim_inverse": (1 / lambdas).mean(),
        "fim_geometric": np.exp(np.log(lambdas).mean()),
        "boundary": np.median(distances),
        "samples_fim": 31,
    }
    if method == "auto":
        expected["lipschitz"] = parts.lipschitz.mean().item()
    assert meter.compute() == pytest.approx(expected, rel=1e-4)
    assert meter.values.numpy() == pytest.approx(lambdas, rel=1e-4)
    assert meter.distances.numpy() == pytest.approx(distances, rel=1e-4)
    assert meter.per_sample() == {"fim": meter.values.tolist(), "boundary": meter.distances.tolist()}


@pytest.mark.parametrize("batch_size", [7, 31])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_robust_accuracy_to_first_order(batch_size, norm):
    model, x = network(), inputs()
    y = torch.where(torch.arange(31) % 3 == 0, 0, model(x).argmax(dim=1))
    distances = boundary_distance(model, x, y, norm).numpy()
    eps = float(np.quantile(distances, 0.79))  # between two samples
    assert eps > 0
    meter = FisherMeter(31, "exact", InputSpace(), 0, norm, eps)
    meter.update(subject(model, batch_size=batch_size), samples(x, y))
    values = meter.compute()
    assert values["boundary"] == pytest.approx(np.median(distances), rel=1e-4)
    assert values["boundary_acc"] == pytest.approx((distances > eps).mean())
    curve = meter.curve()
    assert (curve.norm, curve.eps[0], curve.eps[-1]) == (norm, 0.0, pytest.approx(4 * eps))
    assert curve.share == pytest.approx([(distances > budget).mean() for budget in curve.eps])
    assert all(low <= share <= high for low, share, high in zip(curve.low, curve.share, curve.high, strict=True))
    assert min(high - low for low, high in zip(curve.low, curve.high, strict=True)) > 0
    assert meter.describe() == f"at most 31 samples, method 'exact', boundary in {norm}, eps {eps:.4g}"


def test_no_robust_accuracy_without_labels_or_a_budget():
    model, x, y = network(), inputs(), torch.arange(31) % 4
    for eps, labels in ((None, y), (0.1, None)):
        meter = FisherMeter(31, "exact", InputSpace(), 0, "linf", eps)
        meter.update(subject(model), samples(x, labels))
        values = meter.compute()
        assert "boundary" in values
        assert "boundary_acc" not in values
        assert meter.curve() is None


def test_no_distance_without_gradients():
    meter = FisherMeter(31, "blackbox", InputSpace(), 0, "linf", 0.1)
    meter.update(subject(network()), samples(inputs(), torch.arange(31) % 4))
    assert meter.compute().keys() == {"fim", "fim_inverse", "fim_geometric", "samples_fim"}
    assert meter.per_sample().keys() == {"fim"}


def test_bad_budget():
    with pytest.raises(ValueError, match=r"`eps`.*-0\.1"):
        FisherMeter(31, "exact", InputSpace(), 0, "linf", -0.1)


def test_fisher_information_in_several_updates():
    model, x = network(), inputs()
    meter = FisherMeter(31, "exact", InputSpace(), seed=0)
    meter.update(subject(model, batch_size=8), samples(x[:1]))
    meter.update(subject(model, batch_size=8), samples(x[:0]))
    meter.update(subject(model, batch_size=8), samples(x[1:]))
    values = meter.compute()
    assert values["samples_fim"] == 31
    assert values["fim"] == pytest.approx(fisher_spectral_norm(model, x).mean().item(), rel=1e-4)
    assert meter.values.tolist() == pytest.approx(fisher_spectral_norm(model, x).tolist(), rel=1e-4)


def test_the_histogram_spans_decades_but_not_those_of_saturated_samples():
    meter = FisherMeter(4, "exact", InputSpace(), seed=0)
    meter.values = torch.tensor([1e-3, 1.0, 100.0, 1e-30])
    assert meter.histograms()["lambda_log10"].tolist() == pytest.approx([-3, 0, 2, -12])


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric FisherSpectralNorm was called before")
def test_fisher_information_of_nothing():
    meter = FisherMeter(31, "auto", InputSpace(), seed=0)
    meter.update(subject(network()), samples(torch.zeros(0, 0)))
    assert meter.compute() == {}
    assert meter.values.tolist() == []


def measure_fisher_of_share(rank, sizes, dtype):
    meter = FisherMeter(31, "exact", InputSpace(), seed=0, eps=0.05)
    x, y = inputs(sum(sizes), dtype).split(sizes)[rank], (torch.arange(sum(sizes)) % 4).split(sizes)[rank]
    # A process whose samples are not chosen does not know what others have
    meter.update(subject(network(dtype=dtype), batch_size=8), samples(x if len(x) else torch.zeros(0, 0), y))
    return meter.compute(), meter.values, meter.distances


@pytest.mark.parametrize("sizes", [[5, 26], [31, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fisher_information_of_two_processes_equals_that_of_one(two_processes, sizes, dtype):
    meter = FisherMeter(31, "exact", InputSpace(), seed=0, eps=0.05)
    meter.update(subject(network(dtype=dtype), batch_size=8), samples(inputs(31, dtype), torch.arange(31) % 4))
    expected = meter.compute()
    assert 0 < expected["boundary_acc"] < 1
    for values, lambdas, distances in two_processes(measure_fisher_of_share, sizes, dtype):
        assert values == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(lambdas, meter.values, rtol=1e-5, atol=0)
        torch.testing.assert_close(distances, meter.distances, rtol=1e-5, atol=1e-7)
