import copy

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_robustness import AdversarialTraining, AdversarialWeightPerturbation
from lightning_robustness.losses import mart_loss, trades_loss
from tests.callbacks.modules import digits_data, make_trainer
from tests.callbacks.test_adversarial_training import (
    ATTACK,
    SETTINGS,
    Deterministic,
    Manual,
    Recorder,
    assert_same_weights,
    loader,
)


class ManualDeterministic(Manual, Deterministic):
    """Optimizes by itself."""


def fit(path, *callbacks, module=Deterministic, data=None, **kwargs):
    L.seed_everything(3, verbose=False)
    module = module()
    # In double precision, since Adam turns rounding errors of gradients that are zero into steps
    make_trainer(path, *callbacks, max_epochs=2, precision="64-true", **kwargs).fit(
        module, loader() if data is None else data
    )
    return module


def adversarial_cross_entropy(model, x, y, x_adv):
    return nn.functional.cross_entropy(model(x_adv), y)


def by_hand(gamma, attack=None, accumulate=1, warmup_epochs=0, skip_odd=False, loss=adversarial_cross_entropy):
    """The published loop: a proxy gives the perturbation, the weights are moved, the gradients taken, and back."""
    L.seed_everything(3, verbose=False)
    module, index = Deterministic().double(), 0
    (optimizer,), (schedule,) = module.configure_optimizers()
    module.train()
    for epoch in range(2):
        for number, (x, y) in enumerate(loader()):
            module.net[7].eval()
            x = x.double()
            x_adv = x if attack is None else attack(module, x, y, index=index)
            proxy = copy.deepcopy(module)
            proxy.zero_grad()
            loss(proxy, x, y, x_adv=x_adv).backward()
            weights = [(p, q.grad) for p, q in zip(module.parameters(), proxy.parameters(), strict=True) if p.ndim > 1]
            kept = [p.detach().clone() for p, _ in weights]
            with torch.no_grad():
                for p, g in weights if epoch >= warmup_epochs else []:
                    p += gamma * p.norm() / g.norm() * g
            if not (skip_odd and number % 2):
                (loss(module, x, y, x_adv=x_adv) / accumulate).backward()
            with torch.no_grad():
                for (p, _), value in zip(weights, kept, strict=True):
                    p.copy_(value)
            index += 1
            if (number + 1) % accumulate == 0 or number == 4:
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
    return module


def assert_close(first, second):
    torch.testing.assert_close(dict(first.state_dict()), dict(second.state_dict()), atol=1e-9, rtol=1e-7)


class PlainBackward(ManualDeterministic):
    """Optimizes by itself, in a way that calls no hook after the backward pass."""

    def manual_backward(self, loss):
        loss.backward()


@pytest.mark.parametrize("module", [Deterministic, ManualDeterministic, PlainBackward])
def test_weights_of_a_loop_by_hand(tmp_path, module):
    awp = AdversarialWeightPerturbation(gamma=0.05)
    assert_close(fit(tmp_path, awp, module=module), by_hand(0.05))


def test_adversarial_batches_and_accumulation(tmp_path):
    callbacks = AdversarialTraining(**SETTINGS), AdversarialWeightPerturbation()
    module = fit(tmp_path, *callbacks, accumulate_grad_batches=2)
    assert_close(module, by_hand(0.01, ATTACK, accumulate=2))


@pytest.mark.parametrize(("name", "loss"), [("trades", trades_loss), ("mart", mart_loss)])
@pytest.mark.parametrize("module", [Deterministic, ManualDeterministic])
def test_weights_are_perturbed_for_the_loss_that_replaces_that_of_the_step(tmp_path, name, loss, module):
    callbacks = AdversarialTraining(ATTACK, loss=name), AdversarialWeightPerturbation(gamma=0.05)
    assert_close(fit(tmp_path, *callbacks, module=module), by_hand(0.05, ATTACK, loss=loss))


class SkippingOdd(Deterministic):
    def training_step(self, batch, batch_idx):
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)


def test_an_optimizer_step_without_a_backward_pass_before_it(tmp_path):
    module = fit(tmp_path, AdversarialWeightPerturbation(), module=SkippingOdd, accumulate_grad_batches=2)
    assert_close(module, by_hand(0.01, accumulate=2, skip_odd=True))


def test_dropout_differs_from_batch_to_batch(tmp_path):
    masks = []

    class Watched(Recorder):
        def __init__(self):
            super().__init__()
            self.net[5].register_forward_hook(self.watch)

        def watch(self, layer, args, output):
            if layer.training:  # not the first look at the module
                masks.append(output == 0)

        def training_step(self, batch, batch_idx):
            return None  # so that the passes are those of the perturbation

    data = DataLoader([digits_data(0, 32).tensors] * 3, batch_size=None)
    fit(tmp_path, AdversarialWeightPerturbation(), module=Watched, data=data)
    assert len(masks) == 6
    assert not any(torch.equal(masks[i], masks[j]) for i in range(6) for j in range(i))


def test_no_weights_to_perturb(tmp_path):
    class Biases(Deterministic):
        def __init__(self):
            super().__init__()
            for p in self.parameters():
                p.requires_grad_(p.ndim == 1)

    module = fit(tmp_path, AdversarialWeightPerturbation(), module=Biases)
    assert_same_weights(module, fit(tmp_path, module=Biases))


def test_warm_up(tmp_path):
    module = fit(tmp_path, AdversarialWeightPerturbation(gamma=0.05, warmup_epochs=1))
    assert_close(module, by_hand(0.05, warmup_epochs=1))
    with pytest.raises(AssertionError, match="not close"):
        assert_close(module, by_hand(0.05))


def test_without_size_it_changes_nothing(tmp_path):
    assert_same_weights(fit(tmp_path, AdversarialWeightPerturbation(gamma=0.0)), fit(tmp_path))


class Witness(L.Callback):
    """Weights at the points of a training step."""

    def __init__(self):
        self.weights = {}

    def keep(self, name, pl_module):
        self.weights[name] = {key: p.detach().clone() for key, p in pl_module.named_parameters()}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.keep("start", pl_module)

    def on_before_backward(self, trainer, pl_module, loss):
        self.keep("loss", pl_module)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.keep("step", pl_module)


def test_gradients_see_perturbed_weights_and_the_optimizer_does_not(tmp_path):
    witness = Witness()
    fit(tmp_path, AdversarialWeightPerturbation(gamma=0.1), witness, limit_train_batches=1)
    for name, start in witness.weights["start"].items():
        assert torch.equal(witness.weights["step"][name], start)
        distance = (witness.weights["loss"][name] - start).norm()
        assert distance == pytest.approx(0.1 * start.norm().item() if start.ndim > 1 else 0.0, rel=1e-4)


@pytest.mark.parametrize(("margin", "distance"), [(20, 0.1), (60, 0.1), (80, 0.1), (250, 0.0)])
def test_the_size_is_the_same_on_confident_samples(tmp_path, margin, distance):
    """Norms of gradients below 1e-22 underflow in single precision, and beyond a margin of 103 gradients are zero."""

    class Confident(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(2, 2, bias=False)
            self.net.weight.data = start.clone()

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, batch_idx):
            self.moved = (self.net.weight.detach() - start).norm() / start.norm()
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    start = torch.tensor([[1000.0, 0.0], [-1000.0, 0.0]])
    data = DataLoader([(torch.tensor([[1.0, 0.0]]) * margin / 2000, torch.tensor([0]))], batch_size=None)
    module = Confident()
    make_trainer(tmp_path, AdversarialWeightPerturbation(gamma=0.1)).fit(module, data)
    assert module.moved.item() == pytest.approx(distance, rel=1e-4)


class Skipping(Deterministic):
    def training_step(self, batch, batch_idx):
        return None


class Broken(Deterministic):
    def training_step(self, batch, batch_idx):
        raise ZeroDivisionError


def test_weights_come_back_without_a_backward_pass(tmp_path):
    L.seed_everything(3, verbose=False)
    expected = Deterministic()
    assert_same_weights(fit(tmp_path, AdversarialWeightPerturbation(), module=Skipping), expected.double())
    module = Broken()
    module.load_state_dict(expected.state_dict())
    with pytest.raises(ZeroDivisionError):
        make_trainer(tmp_path, AdversarialWeightPerturbation()).fit(module, loader())
    assert_same_weights(module.double(), expected)


def test_no_labels(tmp_path):
    data = DataLoader([digits_data(0, 32).tensors[0]], batch_size=None)
    with pytest.raises(ValueError, match="labels, for the cross-entropy"):
        fit(tmp_path, AdversarialWeightPerturbation(), data=data)
