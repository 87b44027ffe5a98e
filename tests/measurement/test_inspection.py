import pytest
import torch
from torch import nn

from lightning_robustness.attacks import PGD
from lightning_robustness.measurement.fisher_meter import FisherMeter
from lightning_robustness.measurement.inspection import inspect_model, rehearse
from lightning_robustness.utilities.input_space import InputSpace
from tests.measurement.subjects import subject

X = torch.rand(8, 6, generator=torch.Generator().manual_seed(0))


def network(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3), *more)


def test_head_features_and_classes():
    model = network()
    route = inspect_model(model, subject(model), X)
    assert (route.head, route.num_features, route.num_classes) == ("2", 5, 3)
    assert inspect_model(model, subject(model), X, head=model[2], num_classes=3).head == "2"


def test_another_number_of_classes():
    model = network()
    with pytest.raises(ValueError, match=r"4 classes.*`num_classes`.* 3"):
        inspect_model(model, subject(model), X, num_classes=4)


def test_a_model_that_fails():
    with pytest.raises(ValueError, match=r"`Linear\(x\)`.*\(2, 6\).*forward_fn="):
        inspect_model(nn.Linear(5, 3), subject(nn.Linear(5, 3)), X)


def test_probabilities_get_a_warning():
    model = network(nn.Softmax(dim=1))
    with pytest.warns(UserWarning, match="Sequential look like probabilities"):
        inspect_model(model, subject(model), X)


def test_rehearsal_finds_what_cannot_work():
    def cut(x):
        return network()(x.detach())

    def broken(model, x, y):
        raise RuntimeError("no luck")

    meters = [FisherMeter(8, "exact", InputSpace(), seed=0)]
    rehearse(subject(network()), X, meters, {"pgd": PGD(), "mine": lambda model, x, y: x})
    with pytest.raises(ValueError, match=r"`fim_samples=0`.*blackbox"):
        rehearse(subject(cut), X, meters, {})
    with pytest.raises(RuntimeError, match="no luck"):
        rehearse(subject(network()), X, [], {"mine": broken})


def test_the_remedy_works_where_the_graph_is_cut():
    meter = FisherMeter(8, "blackbox", InputSpace(), seed=0)
    rehearse(subject(lambda x: network()(x.detach())), X, [meter], {})
