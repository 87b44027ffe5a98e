"""Callbacks that wrap the training step see whether it runs the network as ``forward`` does."""

import lightning as L
import pytest
import torch
from torch import nn

from lightning_robustness import AdversarialTraining, AdversarialWeightPerturbation, AttackFreeRegularization
from tests.callbacks.modules import Classifier, make_trainer, train_loader
from tests.callbacks.test_watching_changes_nothing import assert_identical

PGD = {"attack": "pgd", "eps": 0.1, "steps": 1, "overfitting_samples": 0}
CALLBACKS = {
    "trades": lambda **kwargs: AdversarialTraining(loss="trades", **PGD, **kwargs),
    "concat": lambda **kwargs: AdversarialTraining(combine="concat", **PGD, **kwargs),
    "awp": AdversarialWeightPerturbation,
    "attack-free": AttackFreeRegularization,
}


def loss_of(logits, batch):
    return nn.functional.cross_entropy(logits, batch[1])


class Normalised(Classifier):
    """Normalises in the step, but not in ``forward``."""

    def training_step(self, batch, batch_idx):
        return loss_of(self((batch[0] - 0.5) / 0.25), batch)


class InPlace(Classifier):
    def training_step(self, batch, batch_idx):
        return loss_of(self(batch[0].sub_(0.5).div_(0.25)), batch)


class Embedding(Classifier):
    """Has its last layer in the step."""

    def forward(self, x):
        return self.net[:9](x)

    def training_step(self, batch, batch_idx):
        return loss_of(self.net[9](self(batch[0])), batch)


class Same(Normalised):
    """Normalises in ``forward`` as well, without a module."""

    def forward(self, x):
        return self.net((x - 0.5) / 0.25)

    def training_step(self, batch, batch_idx):
        return loss_of(self.net((batch[0] - 0.5) / 0.25), batch)


class Mixup(Classifier):
    def training_step(self, batch, batch_idx):
        x, share = batch[0], torch.distributions.Beta(0.2, 0.2).sample()
        return loss_of(self(share * x + (1 - share) * x[torch.randperm(len(x))]), batch)


class Jitter(Classifier):
    """One brightness for the whole batch, and views of both kinds."""

    def training_step(self, batch, batch_idx):
        return loss_of(self(batch[0] * (0.5, 0.8)[batch_idx % 2]), batch) + loss_of(self(batch[0].flip(-1)), batch)


class Auxiliary(Classifier):
    """Runs a head on features, the network several times, and a layer on probabilities."""

    def __init__(self):
        super().__init__()
        self.auxiliary, self.transition = nn.Linear(32, 10), nn.Linear(10, 10)

    def training_step(self, batch, batch_idx):
        first, second = self(batch[0]), self(batch[0] + 0.1 * torch.rand_like(batch[0]))
        others = self.auxiliary(self.net[:9](batch[0])), self.transition(first.softmax(dim=1))
        return sum(loss_of(logits, batch) for logits in (first, second, *others))


class Manual(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss_of(self(batch[0].flip(-1)), batch))
        optimizer.step()


def fit(path, module, callback, **kwargs):
    L.seed_everything(3, verbose=False)
    trainer = make_trainer(path, callback, limit_train_batches=3, **kwargs)
    trainer.fit(module, train_loader())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in module.modules())
    return trainer


@pytest.mark.parametrize(
    ("name", "module"), [*((name, Normalised) for name in CALLBACKS), ("trades", InPlace), ("concat", InPlace)]
)
def test_inputs_that_the_step_alone_normalises(tmp_path, name, module):
    with pytest.warns(UserWarning, match=r"`training_step` normalises .* Pass `forward_fn=`") as caught:
        fit(tmp_path, module(), CALLBACKS[name]())
    assert sum("forward_fn" in str(warning.message) for warning in caught) == 1
    fit(tmp_path, module(), CALLBACKS[name](forward_fn=lambda module, x: module((x - 0.5) / 0.25)))
    fit(tmp_path, module(), CALLBACKS[name](forward_fn=lambda module, x: module(x)))


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_last_layer_that_the_step_alone_runs(tmp_path, name):
    with pytest.raises(ValueError, match=r"`training_step` also runs 'net.9'.*, pass `forward_fn=") as caught:
        fit(tmp_path, Embedding(), CALLBACKS[name]())
    remedy = str(caught.value).split("pass `forward_fn=")[1].split("`. If")[0]
    module = Embedding()
    before = module.net[9].weight.clone()
    fit(tmp_path, module, CALLBACKS[name](forward_fn=eval(remedy)))
    assert not torch.equal(module.net[9].weight, before)


@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize("module", [Classifier, Same, Mixup, Jitter, Auxiliary, Manual])
def test_honest_steps(tmp_path, module, name):
    if module is Manual and name == "attack-free":
        return
    fit(tmp_path, module(), CALLBACKS[name]())
    if module is not Manual:
        fit(tmp_path, module(), CALLBACKS[name](), accumulate_grad_batches=2)


def test_a_step_that_changes_its_inputs_in_place_gets_the_loss_of_the_others(tmp_path):
    def weights(kind):
        L.seed_everything(3, verbose=False)
        module = kind()
        fit(tmp_path, module, CALLBACKS["trades"](forward_fn=lambda module, x: module((x - 0.5) / 0.25)))
        return dict(module.state_dict())

    assert_identical(weights(InPlace), weights(Normalised))


def test_compiled_networks_are_not_watched(tmp_path):
    module = Normalised()
    module.net.compile(backend="eager")
    fit(tmp_path, module, CALLBACKS["trades"]())
