from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from lightning_robustness._measurement.assisted import assist
from lightning_robustness._measurement.meters.fisher import FisherMeter
from lightning_robustness._measurement.rows import Rows
from lightning_robustness.functional import boundary_distance, fisher_spectral_norm
from lightning_robustness.input_space import InputSpace
from tests._measurement.subjects import rows_of


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
    meter = FisherMeter(31, method)
    rows = rows_of(meter, model, x, space=space, batch_size=batch_size, seed=3)
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
    assert meter.values(rows) == pytest.approx(expected, rel=1e-4)
    assert rows[meter.per_sample["fim"]].numpy() == pytest.approx(lambdas, rel=1e-4)
    assert rows[meter.per_sample["boundary"]].numpy() == pytest.approx(distances, rel=1e-4)


@pytest.mark.parametrize("batch_size", [7, 31])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_robust_accuracy_to_first_order(batch_size, norm):
    model, x = network(), inputs()
    y = torch.where(torch.arange(31) % 3 == 0, 0, model(x).argmax(dim=1))
    distances = boundary_distance(model, x, y, norm).numpy()
    eps = float(np.quantile(distances, 0.79))  # between two samples
    assert eps > 0
    meter = FisherMeter(31, "exact", norm, eps)
    rows = rows_of(meter, model, x, y, batch_size=batch_size)
    values = meter.values(rows)
    assert values["boundary"] == pytest.approx(np.median(distances), rel=1e-4)
    assert values["boundary_acc"] == pytest.approx((distances > eps).mean())
    curve = meter.curve(rows, partial(assist, None, 0))
    assert (curve.norm, curve.eps[0], curve.eps[-1]) == (norm, 0.0, pytest.approx(4 * eps))
    assert curve.share == pytest.approx([(distances > budget).mean() for budget in curve.eps])
    assert all(low <= share <= high for low, share, high in zip(curve.low, curve.share, curve.high, strict=True))
    assert min(high - low for low, high in zip(curve.low, curve.high, strict=True)) > 0
    assert meter.describe() == f"at most 31 samples, method 'exact', boundary in {norm}, eps {eps:.4g}"


def test_no_robust_accuracy_without_labels_or_a_budget():
    model, x, y = network(), inputs(), torch.arange(31) % 4
    for eps, labels in ((None, y), (0.1, None)):
        meter = FisherMeter(31, "exact", "linf", eps)
        rows = rows_of(meter, model, x, labels)
        assert "boundary" in meter.values(rows)
        assert "boundary_acc" not in meter.values(rows)
        assert meter.curve(rows, partial(assist, None, 0)) is None


def test_no_distance_without_gradients():
    meter = FisherMeter(31, "blackbox", "linf", 0.1)
    rows = rows_of(meter, network(), inputs(), torch.arange(31) % 4)
    assert meter.values(rows).keys() == {"fim", "fim_inverse", "fim_geometric", "samples_fim"}
    assert meter.curve(rows, partial(assist, None, 0)) is None
    assert meter.histograms(rows).keys() == {"lambda_log10"}


def test_the_histogram_spans_decades_but_not_those_of_saturated_samples():
    rows = Rows(torch.arange(4), {"spectral_norm": torch.tensor([1e-3, 1.0, 100.0, 1e-30])})
    assert FisherMeter(4).histograms(rows)["lambda_log10"].tolist() == pytest.approx([-3, 0, 2, -12])


def measure_fisher_of_share(rank, sizes, dtype):
    meter = FisherMeter(31, "exact", eps=0.05)
    x, y = inputs(sum(sizes), dtype).split(sizes)[rank], (torch.arange(sum(sizes)) % 4).split(sizes)[rank]
    # A process whose samples are not chosen does not know what others have
    x = x if len(x) else torch.zeros(0, 0)
    rows = rows_of(meter, network(dtype=dtype), x, y, first=rank * sizes[0], batch_size=8)
    return meter.values(rows), rows


@pytest.mark.parametrize("sizes", [[5, 26], [31, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fisher_information_of_two_processes_equals_that_of_one(two_processes, sizes, dtype):
    meter = FisherMeter(31, "exact", eps=0.05)
    expected = rows_of(meter, network(dtype=dtype), inputs(31, dtype), torch.arange(31) % 4, batch_size=8)
    assert 0 < meter.values(expected)["boundary_acc"] < 1
    for values, rows in two_processes(measure_fisher_of_share, sizes, dtype):
        assert values == pytest.approx(meter.values(expected), rel=1e-5)
        assert torch.equal(rows.positions, expected.positions)
        for name, column in rows.columns.items():
            torch.testing.assert_close(column, expected[name], rtol=1e-5, atol=1e-7)
