import pytest
import torch

from lightning_robustness._lightning.step import StepRoute
from lightning_robustness._model.batch import Batch
from lightning_robustness._model.route import find_route
from tests._model.heads import NETWORKS, Network, assert_call, count_hooks, expected_call, inputs


def watch(network, x, head=None):
    """Watch a step that runs the network on the batch, and on other inputs before and after."""
    hooks, step = count_hooks(network), StepRoute(network, Batch(x, None), head)
    with torch.no_grad():
        for batch in (1 - x, x, 1 - x):
            network(batch)
    step.close()
    assert count_hooks(network) == hooks
    return step


@pytest.mark.filterwarnings("ignore:The model returns matrices of widths")
@pytest.mark.parametrize("make", NETWORKS)
def test_the_route_of_a_step_is_that_of_a_pass(make):
    network, x = make(num_classes=3).eval(), inputs()
    expected = find_route(network, x)
    route, call = watch(network, x).find()
    assert (route.head, route.entry, route.sources) == (expected.head, expected.entry, expected.sources)
    assert (route.num_classes, route.num_features) == (expected.num_classes, expected.num_features)
    assert_call(call, expected_call(network, x))


def test_a_head_that_is_given():
    network = Network(num_classes=3).eval()
    name = find_route(network, inputs()).head
    assert watch(network, inputs(), name).find()[0].head == name
    with pytest.raises(ValueError, match=r"`head`.*'nowhere'"):
        StepRoute(network, Batch(inputs(), None), "nowhere")
    with pytest.raises(ValueError, match=r"`head`.* logits come from"):
        watch(network, inputs(), next(name for name, _ in network.named_children())).find()


class Scaled(Network):
    """A temperature, which is no layer, comes after the head."""

    def forward(self, x):
        return super().forward(x) / 2


def test_logits_that_no_layer_returns_have_no_head():
    network = Scaled(num_classes=3).eval()
    route, call = watch(network, inputs()).find()
    assert (route.head, route.num_features, call.embedding) == (None, 0, None)
    assert route.reason == "no layer returns the logits as they are, and no graph of autograd leads back to one"
    assert find_route(network, inputs()).head is not None
    with torch.no_grad():
        torch.testing.assert_close(call.logits, network(inputs()))
