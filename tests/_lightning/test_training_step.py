import copy
import pickle
from functools import partial
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader

from lightning_robustness import (
    AdversarialTraining,
    AdversarialWeightPerturbation,
    AttackFreeRegularization,
    RobustnessMonitor,
)
from lightning_robustness._lightning.training_step import TrainingStepCallback, find_loss, published_attack
from lightning_robustness._model.access import Access
from lightning_robustness.attacks import PGD
from tests.callbacks.modules import Classifier, digits_data, make_trainer, train_loader, val_loader
from tests.callbacks.test_adversarial_training import ByHand
from tests.callbacks.test_watching_changes_nothing import assert_identical


class Scale(TrainingStepCallback):
    """Scales inputs, and writes down what it sees."""

    def __init__(self, factor, notes):
        super().__init__(Access())
        self.factor, self.notes = factor, notes

    def around_training_step(self, trainer, pl_module, step, batch, *args):
        self.notes.append(("before", self.factor, batch[0].max().item()))
        output = step([batch[0] * self.factor, batch[1]], *args)
        self.notes.append(("after", self.factor))
        return output


class Module(Classifier):
    def __init__(self, notes):
        super().__init__()
        self.notes = notes

    def training_step(self, batch):
        self.notes.append(("step", batch[0].max().item()))
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


def test_the_first_callback_is_outermost_and_nothing_is_left(tmp_path):
    notes = []
    trainer = make_trainer(tmp_path, Scale(0.5, notes), Scale(0.1, notes), limit_train_batches=1)
    module = Module(notes)
    for _ in range(2):
        notes.clear()
        trainer.fit_loop.max_epochs = trainer.current_epoch + 1
        trainer.fit(module, train_loader())
        expected = [("before", 0.5, 1.0), ("before", 0.1, 0.5), ("step", 0.05), ("after", 0.1), ("after", 0.5)]
        assert [entry[:-1] for entry in notes] == [entry[:-1] for entry in expected]
        assert [entry[-1] for entry in notes] == pytest.approx([entry[-1] for entry in expected])
        assert "training_step" not in vars(trainer.strategy)
        assert not {"training_step", "forward"} & vars(module).keys()


class Fetching(Classifier):
    def training_step(self, dataloader_iter):
        raise ZeroDivisionError


class Broken(Classifier):
    def training_step(self, batch, batch_idx):
        raise ZeroDivisionError("in the step")


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (Broken, ZeroDivisionError, "in the step"),
        (Fetching, MisconfigurationException, r"takes `dataloader_iter`, .* Scale"),
    ],
)
def test_nothing_is_left_after_an_exception(tmp_path, module, error, message):
    trainer = make_trainer(tmp_path, Scale(0.5, []), Scale(0.1, []))
    with pytest.raises(error, match=message):
        trainer.fit(module(), train_loader())
    assert "training_step" not in vars(trainer.strategy)


def test_sharded_parameters_are_refused():
    trainer = SimpleNamespace(strategy=FSDPStrategy.__new__(FSDPStrategy))
    with pytest.raises(MisconfigurationException, match=r"Scale .*FSDPStrategy shards"):
        Scale(0.5, []).setup(trainer, Classifier(), "fit")


def test_nothing_is_checked_outside_of_training(tmp_path):
    make_trainer(tmp_path, Scale(0.5, [])).validate(Fetching(), train_loader(), verbose=False)


@pytest.mark.parametrize(
    "callback", [AdversarialTraining(eps=0.1), AdversarialWeightPerturbation(0.03), AttackFreeRegularization()]
)
def test_pickle(callback):
    copied = pickle.loads(pickle.dumps(callback))
    assert repr(vars(copied).keys()) == repr(vars(callback).keys())
    assert copied.access == callback.access


class FeaturesFirst(Classifier):
    def features(self, x):
        return self.net[:9](x)

    def forward(self, x):
        return self.features(x), self.net[9](self.features(x))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


TRAINING = {
    "adversarial": lambda **options: AdversarialTraining(eps=0.1, steps=2, **options),
    "trades": lambda **options: AdversarialTraining(eps=0.1, steps=2, loss="trades", **options),
    "perturbed weights": AdversarialWeightPerturbation,
    "attack-free": lambda **options: AttackFreeRegularization(boundary_weight=0.1, **options),
}


def weights_after(path, callback, module):
    L.seed_everything(1, verbose=False)
    module = module()
    make_trainer(path, callback, limit_train_batches=3).fit(module, train_loader())
    return dict(module.state_dict())


@pytest.mark.parametrize("make", TRAINING.values(), ids=TRAINING)
def test_the_logits_are_found_in_a_tuple(tmp_path, make):
    expected = weights_after(tmp_path, make(forward_fn=lambda module, x: module(x)[1]), FeaturesFirst)
    assert_identical(weights_after(tmp_path, make(), FeaturesFirst), expected)
    with pytest.raises(AssertionError):
        assert_identical(weights_after(tmp_path, make(forward_fn=FeaturesFirst.features), FeaturesFirst), expected)


@pytest.mark.parametrize("make", TRAINING.values(), ids=TRAINING)
def test_outputs_that_are_no_logits_of_the_labels_are_refused(tmp_path, make):
    class Sigmoid(Classifier):
        def forward(self, x):
            return self.net(x)[:, :1].sigmoid()

    with pytest.raises(ValueError, match=r"the sigmoid of one.*module\(x\)\.logit\(eps=1e-6\)"):
        weights_after(tmp_path, make(), Sigmoid)
    with pytest.raises(ValueError, match=r"from 0 to 3, for 4 classes, but got values from 0 to 9.*`forward_fn=`"):
        weights_after(tmp_path, make(forward_fn=lambda module, x: module(x)[:, :4]), Classifier)
    with pytest.warns(UserWarning, match=r"look like probabilities.*`forward_fn=`"):
        weights_after(tmp_path, make(forward_fn=lambda module, x: module(x).softmax(dim=1)), Classifier)


@pytest.mark.parametrize("make", [AdversarialTraining, AttackFreeRegularization])
def test_another_callback_with_the_same_prefix_is_refused_before_training(tmp_path, make):
    monitor = RobustnessMonitor(["pgd"], prefix="val/robustness", attack_samples=8, fim_samples=8, log_figures=False)
    with pytest.raises(MisconfigurationException, match=r"under 'val/robustness'.* val/robustness/acc, .*`prefix`"):
        make_trainer(tmp_path, make(prefix="val/robustness"), monitor).fit(Classifier(), train_loader(), val_loader())
    trainer = make_trainer(tmp_path, make(prefix="val"), monitor, limit_train_batches=1)
    trainer.fit(Classifier(), train_loader(), val_loader())
    assert {key for key in trainer.callback_metrics if key.startswith("val/robustness/")}


def test_loss_of_what_a_step_returns():
    loss = torch.tensor(1.0)
    assert find_loss(loss) is loss
    assert find_loss({"loss": loss, "logits": None}) is loss
    assert find_loss(None) is None
    assert find_loss({}) is None


EPS, STEPS = 0.1, 3


class Plain(L.LightningModule):
    """A network without anything random, whose own loss is of no use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
        self.seen = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0])
        return 0 * self(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class InDictionary(Plain):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "extra": 1}


class Manual(ByHand, Plain):
    """A network of this kind."""


class Twice(Manual):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        super().training_step(batch, batch_idx)


class Raw(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self(batch[0]).sum().backward()
        optimizer.step()


def loader():
    return DataLoader(digits_data(0, 96), batch_size=32)


def loss_by_hand(name, weight, z, z_adv, y):
    """Both losses from probabilities, sample by sample, as the papers write them."""
    p, q, rows = z.softmax(dim=1), z_adv.softmax(dim=1), torch.arange(len(y))
    divergence = (p * (p / q).log()).sum(dim=1)
    if name == "trades":
        return (-p[rows, y].log() + weight * divergence).mean()
    others = q.clone()
    others[rows, y] = 0
    boosted = -q[rows, y].log() - (1 - others.max(dim=1).values).log()
    return (boosted + weight * divergence * (1 - p[rows, y])).mean()


def by_hand(name, weight, epochs):
    module, index, losses = Plain().double(), 0, []
    attack = PGD(
        eps=EPS, steps=STEPS, start="gaussian", loss="kl" if name == "trades" else "cross_entropy", all_steps=True
    )
    optimizer = module.configure_optimizers()
    for _ in range(epochs):
        losses.append([])
        for x, y in loader():
            x = x.double()
            x_adv = attack(module, x, y, index=index)
            loss = loss_by_hand(name, weight, module(x), module(x_adv), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
            index += 1
    return module, sum(losses[-1]) / len(losses[-1])


@pytest.mark.parametrize("kind", [Plain, InDictionary, Manual])
@pytest.mark.parametrize(
    ("name", "weight", "default"), [("trades", None, 6.0), ("mart", None, 5.0), ("trades", 1.5, 0)]
)
def test_weights_of_a_loop_by_hand(tmp_path, kind, name, weight, default):
    module = kind()
    callback = AdversarialTraining(eps=EPS, steps=STEPS, loss=name, loss_weight=weight)
    # In double precision: a gradient near zero has the same sign in both
    trainer = make_trainer(tmp_path, callback, max_epochs=2, precision="64-true")
    trainer.fit(module, loader())
    expected, loss = by_hand(name, weight or default, 2)
    torch.testing.assert_close(dict(module.state_dict()), dict(expected.state_dict()), rtol=1e-9, atol=1e-9)
    assert trainer.callback_metrics["adversarial_training/loss"].item() == pytest.approx(loss, rel=1e-4)
    assert torch.equal(module.seen[0].float(), next(iter(loader()))[0]), "the step runs on the clean batch"
    assert "manual_backward" not in vars(module)


def test_mixed_precision_holds_for_the_new_loss(tmp_path):
    class Seen(Plain):
        def forward(self, x):
            z = super().forward(x)
            if self.training and z.requires_grad:
                dtypes.append(z.dtype)
            return z

    dtypes = []
    trainer = make_trainer(tmp_path, AdversarialTraining(eps=EPS, steps=1, loss="trades"), precision="bf16-mixed")
    trainer.fit(Seen(), loader())
    assert set(dtypes) == {torch.bfloat16}
    assert len(dtypes) == 9


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, partial(nn.InstanceNorm2d, track_running_stats=True)])
def test_running_statistics_are_those_of_the_new_loss(tmp_path, kind):
    class Normalised(Classifier):
        def __init__(self, num_passes):
            super().__init__()
            self.net[1], self.num_passes = kind(8), num_passes

        def training_step(self, batch, batch_idx):
            outputs = [self(batch[0]) for _ in range(self.num_passes)]
            return nn.functional.cross_entropy(outputs[-1], batch[1]) if outputs else self.net[0].weight.sum()

    statistics = []
    for num_passes in (0, 1, 3):
        torch.manual_seed(0)
        module = Normalised(num_passes)
        callback = AdversarialTraining(eps=EPS, steps=1, loss="trades")
        make_trainer(tmp_path, callback, limit_train_batches=1).fit(module, loader())
        statistics.append(dict(module.net[1].named_buffers()))
    assert statistics[0]["running_mean"].any()
    for other in statistics[1:]:
        assert_identical(statistics[0], other)


def test_a_batch_that_the_module_leaves_out(tmp_path):
    class Skips(Plain):
        def training_step(self, batch, batch_idx):
            return None

    module = Skips()
    before = copy.deepcopy(module.state_dict())
    make_trainer(tmp_path, AdversarialTraining(eps=EPS, steps=1, loss="trades")).fit(module, loader())
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "number"), [(Twice, 2), (Raw, 0)])
def test_manual_optimization_of_another_form(tmp_path, kind, number):
    trainer = make_trainer(tmp_path, AdversarialTraining(eps=EPS, steps=1, loss="mart"))
    with pytest.raises(MisconfigurationException, match=rf"manual_backward` .*{number} times.*trades_loss"):
        trainer.fit(kind(), loader())


def test_the_attacks_of_the_papers():
    assert AdversarialTraining().attack == PGD(all_steps=True)
    assert AdversarialTraining(loss="trades").attack == PGD(steps=10, start="gaussian", loss="kl", all_steps=True)
    assert published_attack("mart") == PGD(steps=10, start="gaussian", loss="cross_entropy")
    assert AdversarialTraining(loss="mart", attack=PGD(steps=2)).attack == PGD(steps=2, all_steps=True)
