import pytest
import torch
from torch import nn

from lightning_robustness._measurement.meters.clever import CleverMeter
from lightning_robustness.input_space import InputSpace
from tests._measurement.subjects import samples, subject


def test_of_a_linear_model_it_is_the_distance_to_the_boundary():
    model = nn.Linear(2, 2)
    model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
    x = torch.tensor([[0.75, 0.5], [1.0, 0.5], [0.5, 1.0]])
    meter = CleverMeter(3, 1.0, InputSpace(low=None, high=None), seed=0)
    meter.update(subject(model, InputSpace(low=None, high=None)), samples(x))
    assert meter.compute() == {"clever": pytest.approx((0.25 + 0.5 + 0.5) / 3 / 2**0.5, rel=1e-3), "samples_clever": 3}
    assert meter.describe() == "at most 3 samples, radius 1"
    assert meter.seconds > 0


@pytest.mark.filterwarnings("ignore:.*called before the ``update`` method")
def test_of_nothing():
    meter = CleverMeter(3, 1.0, InputSpace(), seed=0)
    meter.update(subject(nn.Identity()), samples(torch.zeros(0, 0)))
    assert meter.compute() == {}
