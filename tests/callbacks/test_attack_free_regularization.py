import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader

from lightning_robustness import (
    AdversarialTraining,
    AdversarialWeightPerturbation,
    AttackFreeRegularization,
    InputSpace,
)
from lightning_robustness.attacks import PGD, run_attack
from lightning_robustness.functional import boundary_distance, fisher_spectral_norm
from lightning_robustness.losses import boundary_penalty, fisher_penalty, rdi_loss, trades_loss
from tests.callbacks.distributed_fit import as_torchrun_would
from tests.callbacks.modules import digits_data, make_trainer
from tests.callbacks.test_adversarial_training import (
    Bytes,
    Deterministic,
    InDictionary,
    Manual,
    Robust,
    assert_same_weights,
    bytes_loader,
    floats_loader,
    loader,
    shard_of_two,
)

OPTIONS = {"rdi_weight": 0.5, "fisher_weight": 0.1}
WEIGHTS = [
    *({}, {"rdi_weight": 0.0}, {"fisher_weight": 0.0}, {"num_products": None}, {"boundary_weight": 0.5}),
    {"rdi_weight": 0.0, "fisher_weight": 0.0, "boundary_weight": 2.0, "boundary_margin": 0.2, "boundary_rivals": 3},
]


def fit(path, *callbacks, module=Deterministic, data=None, **kwargs):
    L.seed_everything(3, verbose=False)
    module = module()
    trainer = make_trainer(path, *callbacks, **{"max_epochs": 2} | kwargs)
    trainer.fit(module, loader() if data is None else data)
    return module, trainer


def test_pixels_in_bytes_are_differentiated_as_floats(tmp_path):
    def trained(data):
        penalty = AttackFreeRegularization(**OPTIONS, boundary_weight=0.5, input_space=InputSpace(high=255))
        return fit(tmp_path, penalty, module=Bytes, data=data)[0]

    assert_same_weights(trained(bytes_loader()), trained(floats_loader()))


@pytest.mark.parametrize("options", [{}, {"fisher_weight": 0.0}])
def test_a_module_without_a_usable_forward_gets_the_diagnosis_of_the_monitor(tmp_path, options):
    class Missing(Deterministic):
        def forward(self, x):
            raise NotImplementedError

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    class Batch(Missing):
        def forward(self, batch):
            x, _ = batch
            return self.net(x)

    for kind in (Missing, Batch):
        with pytest.raises(ValueError, match=r"`forward_fn=`.*module\.net\(x\)"):
            fit(tmp_path, AttackFreeRegularization(**OPTIONS | options), module=kind)


def by_hand(
    rdi_weight=0.5, fisher_weight=0.1, num_products=1, boundary_weight=0.0, boundary_margin=8 / 255, boundary_rivals=1
):
    """The same sum in the training step itself."""

    class InStep(Deterministic):
        def training_step(self, batch, batch_idx):
            x, y = batch
            logits = self(x)
            loss = nn.functional.cross_entropy(logits, y)
            loss = loss + rdi_weight * rdi_loss(logits, y) if rdi_weight else loss
            penalty = fisher_penalty(self, x, num_products=num_products)
            loss = loss + fisher_weight * penalty if fisher_weight else loss
            distance = boundary_penalty(self, x, y, margin=boundary_margin, num_rivals=boundary_rivals)
            return loss + boundary_weight * distance if boundary_weight else loss

    return InStep


def assert_close(first, second):
    torch.testing.assert_close(dict(first.state_dict()), dict(second.state_dict()), atol=2e-5, rtol=1e-3)


class InDictionaryDeterministic(InDictionary, Deterministic):
    """Returns a dictionary."""


@pytest.mark.parametrize("module", [Deterministic, InDictionaryDeterministic])
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_weights_of_a_training_step_with_the_sum(tmp_path, module, weights):
    ours, _ = fit(tmp_path, AttackFreeRegularization(**OPTIONS | weights), module=module, limit_train_batches=2)
    expected, _ = fit(tmp_path, module=by_hand(**weights), limit_train_batches=2)
    assert_close(ours, expected)
    plain, _ = fit(tmp_path, limit_train_batches=2)
    with pytest.raises(AssertionError, match="not close"):
        assert_close(ours, plain)


def test_without_weights_it_changes_nothing(tmp_path):
    ours, trainer = fit(tmp_path, AttackFreeRegularization(rdi_weight=0.0, fisher_weight=0.0))
    plain, _ = fit(tmp_path)
    torch.testing.assert_close(dict(ours.state_dict()), dict(plain.state_dict()), atol=0, rtol=0)
    assert not [name for name in trainer.callback_metrics if name.startswith("attack_free")]


class NoHead(Deterministic):
    """Its logits leave no linear layer but the module itself."""

    def forward(self, x):
        return 2 * self.net(x)


class OnPairs(Deterministic):
    """Runs two halves of a batch by themselves."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(torch.cat([self(half) for half in x.chunk(2)]), y)


@pytest.mark.parametrize("module", [Deterministic, NoHead, OnPairs])
def test_logits_come_from_a_hook_or_one_more_pass(tmp_path, module):
    passes = []

    class Counting(module):
        def __init__(self):
            super().__init__()
            self.net[0].register_forward_hook(lambda layer, args, output: passes.append(len(output)))

    callback = AttackFreeRegularization(rdi_weight=0.5, fisher_weight=0.0)
    trained, trainer = fit(tmp_path, callback, module=Counting, max_epochs=1)
    assert passes.count(32) == 5  # steps on pairs run the network on halves
    assert not any(m._forward_hooks for m in trained.net if m is not trained.net[0])
    assert 0 < trainer.callback_metrics["attack_free/rdi_loss"] < 2


class Trades(Deterministic):
    def training_step(self, batch, batch_idx):
        return trades_loss(self, *batch, eps=0.1, alpha=0.05, steps=2, seed=0)


def test_an_attack_in_the_training_step_is_not_mistaken_for_training(tmp_path):
    class InStep(Trades):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            # In train mode, so that statistics move once more than with the hook
            return loss + 0.5 * rdi_loss(self(batch[0]), batch[1])

    options = {"limit_train_batches": 1, "max_epochs": 1}
    ours, _ = fit(tmp_path, AttackFreeRegularization(rdi_weight=0.5, fisher_weight=0.0), module=Trades, **options)
    expected, _ = fit(tmp_path, module=InStep, **options)
    for layer in (0, 6, 9):
        torch.testing.assert_close(ours.net[layer].weight, expected.net[layer].weight, atol=2e-5, rtol=1e-3)


def test_values(tmp_path):
    class Still(Deterministic):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

        def on_train_start(self):
            self.train(False)

    space = InputSpace(high=2.0, std=2.0)
    options = {"boundary_weight": 1e-3, "boundary_margin": 0.5}
    callback = AttackFreeRegularization(fisher_weight=1e-3, num_products=None, input_space=space, **options)
    module, trainer = fit(tmp_path, callback, module=Still, data=loader(144), max_epochs=1)
    expected = {"rdi_loss": 0.0, "fisher": 0.0, "boundary": 0.0}
    for x, y in loader(144):
        expected["rdi_loss"] += len(x) / 144 * rdi_loss(module(x), y).item()
        expected["fisher"] += len(x) / 144 * fisher_spectral_norm(module, x).mean().item() / 4
        penalty = boundary_penalty(module, x, y, margin=0.5, input_space=space)
        expected["boundary"] += len(x) / 144 * penalty.item()
    for name, value in expected.items():
        assert trainer.callback_metrics[f"attack_free/{name}"].item() == pytest.approx(value, rel=1e-4)


def test_with_adversarial_training_it_sees_the_adversarial_batch(tmp_path):
    callbacks = AdversarialTraining("fast", eps=0.1), AttackFreeRegularization(**OPTIONS)
    ours, _ = fit(tmp_path, *callbacks)
    expected, _ = fit(tmp_path, AdversarialTraining("fast", eps=0.1), module=by_hand())
    assert_close(ours, expected)


def test_with_perturbed_weights(tmp_path):
    callback = AttackFreeRegularization(**OPTIONS)
    ours, _ = fit(tmp_path, callback, AdversarialWeightPerturbation(0.05), limit_train_batches=2)
    expected, _ = fit(tmp_path, AdversarialWeightPerturbation(0.05), module=by_hand(), limit_train_batches=2)
    assert_close(ours, expected)
    plain, _ = fit(tmp_path, callback, limit_train_batches=2)
    with pytest.raises(AssertionError, match="not close"):
        assert_close(ours, plain)


def fit_as_one_of_two(rank, path, by_callback):
    as_torchrun_would(rank)
    options = {"data": shard_of_two(rank), "strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    if by_callback:
        module, _ = fit(path, AttackFreeRegularization(**OPTIONS), **options)
    else:
        module, _ = fit(path, module=by_hand(), **options)
    return dict(module.named_parameters())


def test_two_processes(tmp_path, two_processes):
    ours, expected = (two_processes(fit_as_one_of_two, tmp_path, by_callback) for by_callback in (True, False))
    torch.testing.assert_close(ours[0], ours[1], atol=0, rtol=0)
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-3)


def test_mixed_precision_and_accumulation(tmp_path):
    callback = AttackFreeRegularization(**OPTIONS)
    _, trainer = fit(tmp_path, callback, precision="bf16-mixed", accumulate_grad_batches=2, gradient_clip_val=1.0)
    assert all(value.isfinite() for value in trainer.callback_metrics.values())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Networks trained with each term alone, and one without any; accurate all of them."""
    weights = {
        "plain": {},
        "spectral": {"fisher_weight": 0.2},
        "trace": {"fisher_weight": 0.2, "fisher_kind": "trace"},
        "boundary": {"boundary_weight": 1.0, "boundary_margin": 0.2},
    }
    networks, data = {}, digits_data(1200, 1400)
    for name, options in weights.items():
        callback = AttackFreeRegularization(**{"rdi_weight": 0.0, "fisher_weight": 0.0, **options})
        L.seed_everything(0, verbose=False)
        networks[name] = Robust()
        trainer = make_trainer(tmp_path_factory.mktemp(name), *[callback] * bool(options), max_epochs=6)
        trainer.fit(networks[name], DataLoader(digits_data(0, 800), 64, shuffle=True))
        assert (networks[name].eval()(data[:][0]).argmax(dim=1) == data[:][1]).float().mean() > 0.8
    return networks


def test_the_penalty_lowers_fisher_information(trained, digits):
    plain, *values = (
        fisher_spectral_norm(trained[name], digits[0][1200:1400]).mean() for name in ("plain", "spectral", "trace")
    )
    assert max(values) < 0.7 * plain


def test_the_distance_to_the_boundary_gains_robust_accuracy(trained, digits):
    x, y = digits[0][1200:1400], digits[1][1200:1400]
    networks = trained["plain"], trained["boundary"]
    robust = [(run_attack(net, PGD(eps=0.1, steps=10), x, y).adv_preds == y).float().mean() for net in networks]
    distances = [boundary_distance(net, x, y).median() for net in networks]
    assert robust[1] > robust[0] + 0.1
    assert distances[1] > 1.1 * distances[0]


def test_manual_optimization_is_refused(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"automatic optimization .*`losses\.rdi_loss`, .*_penalty"):
        fit(tmp_path, AttackFreeRegularization(), module=Manual)


def test_bad_head(tmp_path):
    with pytest.raises(ValueError, match="Expected `head` to be part of Deterministic but got 'nowhere'"):
        fit(tmp_path, AttackFreeRegularization(head="nowhere"))


def test_no_labels(tmp_path):
    class Unsupervised(Deterministic):
        def training_step(self, batch, batch_idx):
            return self(batch).square().mean()

    data = DataLoader([digits_data(0, 32).tensors[0]], batch_size=None)
    with pytest.raises(ValueError, match=r"batches with labels, for the RDI loss, but got none.*or `rdi_weight=0`"):
        fit(tmp_path, AttackFreeRegularization(), module=Unsupervised, data=data)
    with pytest.raises(ValueError, match=r"labels, for the distance to the boundary, .*or `boundary_weight=0`"):
        fit(tmp_path, AttackFreeRegularization(rdi_weight=0.0, boundary_weight=1.0), module=Unsupervised, data=data)
    _, trainer = fit(tmp_path, AttackFreeRegularization(rdi_weight=0.0), module=Unsupervised, data=data)
    assert trainer.callback_metrics["attack_free/fisher"] > 0
