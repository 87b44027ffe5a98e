import pytest
import torch
from torchmetrics import MetricCollection

from lightning_robustness._numbers import accumulation_dtype
from lightning_robustness.functional import attack_success_rate, robustness_difference_index, roby
from lightning_robustness.metrics import ROBY, AttackSuccessRate, RobustnessDifferenceIndex
from lightning_robustness.metrics._base import SampleMetric, mean


class Mean(SampleMetric):
    """The mean of some numbers, with the largest as a part."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self._add_states()

    def update(self, values):
        self._add(values)

    def _summarize(self, *columns):
        (values,) = columns
        return {"mean": mean(values), "max": values.amax() if len(values) else mean(values)}


def test_components_are_those_of_all_batches():
    metric = Mean()
    metric.update(torch.tensor([1.0, 2.0]))
    assert metric.compute_components() == {"mean": 1.5, "max": 2, "count": 2}
    metric.update(torch.tensor([6.0]))
    components = metric.compute_components()
    assert components == {"mean": 3, "max": 6, "count": 3}
    components.clear()
    assert metric.compute_components() == {"mean": 3, "max": 6, "count": 3}


def test_rows_have_the_widest_precision_of_the_device_they_are_on(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    metric = Mean()
    metric.update(torch.tensor([2.0**25, 1.0]))
    assert metric.compute_components() == {"mean": (2**25 + 1) / 2, "max": 2**25, "count": 2}
    on_meta = Mean().to("meta")
    on_meta.update(torch.ones(2))
    assert on_meta.metric_state["rows"][0].dtype == torch.float64
    assert accumulation_dtype(torch.device("mps")) == torch.float32


def test_other_metrics_of_a_collection_do_not_share_rows():
    """Both are 0 on the first batch."""

    class Double(Mean):
        def update(self, values):
            self._add(2 * values)

    metrics = MetricCollection([Mean(), Double()])
    for values in (torch.zeros(2), torch.ones(2)):
        metrics.update(values)
    assert metrics.compute() == {"Mean": 0.5, "Double": 1.0}


FEATURES, PREDS = torch.randn(60, 4, dtype=torch.float64), torch.arange(60) % 4
LABELS, DISTORTION = torch.arange(60) % 3, torch.rand(60)


@pytest.mark.parametrize(
    ("metric", "function", "tensors"),
    [
        (RobustnessDifferenceIndex(num_classes=4), robustness_difference_index, (FEATURES, PREDS)),
        (ROBY(num_classes=4), roby, (FEATURES, PREDS)),
        (
            AttackSuccessRate(),
            lambda *args, **options: attack_success_rate(*args[:3], distortion=args[3], **options),
            (PREDS, LABELS, LABELS.flip(0), DISTORTION),
        ),
    ],
)
def test_parts_of_a_function_have_the_names_and_values_of_the_class(metric, function, tensors):
    parts = function(*tensors, return_components=True)
    metric.update(*tensors)
    expected = metric.compute_components()
    assert list(parts._asdict()) == list(expected)
    for name, value in parts._asdict().items():
        torch.testing.assert_close(value, expected[name], equal_nan=True)
    torch.testing.assert_close(function(*tensors), parts[0])


def test_the_parts_of_a_computed_metric_move_with_it():
    metric = AttackSuccessRate()
    metric.update(PREDS, LABELS, LABELS.flip(0), DISTORTION)
    metric.compute()
    metric.to("meta")
    assert {part.device.type for part in metric.compute_components().values()} == {"meta"}
