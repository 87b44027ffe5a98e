import pytest
import torch
from torch import nn

from lightning_robustness._lightning.step import StepCheck, StepRoute
from lightning_robustness._model.batch import Batch
from lightning_robustness._model.route import find_route
from tests import zoo
from tests._model.heads import assert_call, count_hooks, expected_call, inputs, inputs_of

X = torch.rand(6, 5, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """Has heads that its forward pass does not run."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(5, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 1), nn.Linear(7, 3)])
        self.confidence = nn.Linear(4, 1)

    def forward(self, x):
        return self.body(x)


def compare(step, y=None, is_ours=False):
    model = Model()
    check = StepCheck(model, find_route(model, X[:2]), X)
    with torch.no_grad():
        step(model)
        check.close()
        assert count_hooks(model) == 0
        check.compare(model(X), is_ours, y)


LATER = {
    r"also runs 'heads.0'.* takes 4 features.* to 3\..*module.get_submodule\('heads.0'\)\(module\(x\)\)`": (
        lambda model: model.heads[0](model(X))
    ),
    r"`forward_fn=lambda module, x: module.confidence\(module\(x\)\.relu\(\)\)`. If it does return": (
        lambda model: model.confidence(model.body(X).relu())
    ),
    r"pass a `forward_fn=` that ends in it": lambda model: model.heads[0](model(X).tanh()),
}


@pytest.mark.parametrize("match", LATER)
def test_a_layer_that_goes_on_from_what_forward_returns(match):
    with pytest.raises(ValueError, match=match):
        compare(LATER[match])


def test_a_pass_that_returns_something_else():
    class Two(Model):
        def forward(self, x, short=False):
            return self.body(x)[:, :2] if short else self.body(x)

    model = Two()
    check = StepCheck(model, find_route(model, X[:2]), X)
    with torch.no_grad():
        model(X), model(X, short=True)
        check.close()
        with pytest.warns(UserWarning, match="several times"):
            check.compare(model(X), False, None)


def test_one_pass_or_several_with_the_same_logits(recwarn):
    compare(lambda model: model(X))
    compare(lambda model: (model(X), model(X.clone())))
    compare(lambda model: (model(X[:2]), model(X)))
    assert not recwarn


def test_layers_that_do_something_else():
    compare(lambda model: model.heads[2](torch.rand(6, 7)))
    compare(lambda model: model.heads[0](torch.rand(5, 4)))  # not as many rows
    # An output for each sample, where there are four classes, is no classifier
    compare(lambda model: model.confidence(model(X)), y=torch.tensor([0, 1, 2, 3, 0, 1]))


def test_logits_of_other_inputs():
    match = r"runs it on other inputs and gets other logits.*`forward_fn=lambda module, x: module\(x\)`"
    with pytest.raises(ValueError, match=match):
        compare(lambda model: model(2 * X - 1), is_ours=True)
    compare(lambda model: model(2 * X - 1), is_ours=False)  # the pass on the batch itself was seen
    compare(lambda model: None, is_ours=True)  # nothing to compare with
    compare(lambda model: model(X + 1e-4), is_ours=True)
    with pytest.warns(UserWarning, match="several times"):
        compare(lambda model: (model(1 - X), model(X.clone())), is_ours=True)


def watch(network, x, head=None):
    """Watch a step that runs the network on the batch, and on other inputs before and after."""
    hooks, step = count_hooks(network), StepRoute(network, Batch(x, None), head)
    with torch.no_grad():
        for batch in (1 - x, x, 1 - x):
            network(batch)
    step.close()
    assert count_hooks(network) == hooks
    return step


KINDS = [
    *(zoo.Zoo, zoo.NestedHead, zoo.Attention, zoo.PooledTokens, zoo.PointwiseConvolution, zoo.Audio),
    *(zoo.LogSoftmaxEnd, zoo.SoftmaxEnd, zoo.InDictionary, zoo.InObject, zoo.LogitsAndFeatures),
    *(zoo.WeightNorm, zoo.SpectralNorm, zoo.Auxiliary, zoo.Distillation, zoo.HeadCalledTwice),
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_route_of_a_step_is_that_of_a_pass(kind):
    network = kind()
    x = inputs_of(network)
    expected = find_route(network, x)
    route, call = watch(network, x).find()
    assert (route.head, route.entry, route.sources) == (expected.head, expected.entry, expected.sources)
    assert (route.num_classes, route.num_features) == (expected.num_classes, expected.num_features)
    assert_call(call, expected_call(network, x))


def test_a_head_that_is_given():
    network = zoo.Zoo()
    name = find_route(network, inputs()).head
    assert watch(network, inputs(), name).find()[0].head == name
    with pytest.raises(ValueError, match=r"`head`.*'nowhere'"):
        StepRoute(network, Batch(inputs(), None), "nowhere")
    with pytest.raises(ValueError, match=r"`head`.* logits come from"):
        watch(network, inputs(), next(name for name, _ in network.named_children())).find()


class Scaled(zoo.Zoo):
    """A temperature, which is no layer, comes after the head."""

    def forward(self, x):
        return super().forward(x) / 2


def test_logits_that_no_layer_returns_have_no_head():
    network = Scaled()
    route, call = watch(network, inputs()).find()
    assert (route.head, route.num_features, call.embedding) == (None, 0, None)
    assert route.reason == "no layer returns the logits themselves, and no graph of autograd leads back to one"
    assert find_route(network, inputs()).head is not None
    with torch.no_grad():
        torch.testing.assert_close(call.logits, network(inputs()))
