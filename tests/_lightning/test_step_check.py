import pytest
import torch
from torch import nn

from lightning_robustness._lightning.step import StepCheck
from lightning_robustness._model.route import find_route
from tests._model.heads import count_hooks

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
    r"goes on with 'heads.0'.* takes 4 features.* to 3\..*module.get_submodule\('heads.0'\)\(module\(x\)\)`": (
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


def test_several_passes_with_different_logits():
    with pytest.warns(UserWarning, match="test-time augmentation.*`forward_fn=`"):
        compare(lambda model: model(X).softmax(1) + model(X.flip(-1)).softmax(1))


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
