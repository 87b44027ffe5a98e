import pytest
import torch
from torch import nn

from lightning_robustness._measurement.meters.clever import CleverMeter
from lightning_robustness.input_space import InputSpace
from tests._measurement.subjects import rows_of


def test_of_a_linear_model_it_is_the_distance_to_the_boundary():
    model = nn.Linear(2, 2)
    model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
    x = torch.tensor([[0.75, 0.5], [1.0, 0.5], [0.5, 1.0]])
    meter = CleverMeter(3, 1.0)
    rows = rows_of(meter, model, x, space=InputSpace(low=None, high=None))
    expected = (0.25 + 0.5 + 0.5) / 3 / 2**0.5
    assert meter.values(rows) == {"clever": pytest.approx(expected, rel=1e-3), "samples_clever": 3}
    assert meter.describe() == "at most 3 samples, radius 1"
    assert rows.seconds > 0
