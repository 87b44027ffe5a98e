from collections import UserDict

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_robustness import AdversarialTraining, InputSpace, RobustnessMonitor
from lightning_robustness._lightning.inner_attack import CatastrophicOverfitting
from lightning_robustness.attacks import PGD, run_attack
from lightning_robustness.functional import fisher_spectral_norm, robustness_difference_index
from tests.callbacks.distributed_fit import as_torchrun_would
from tests.callbacks.modules import Classifier, digits_data, from_yaml, make_trainer
from tests.callbacks.test_watching_changes_nothing import assert_identical
from tests.callbacks.test_watching_changes_nothing import run as run_watched

SETTINGS = {"attack": "pgd", "eps": 0.15, "alpha": 0.05, "steps": 3}
ATTACK = PGD(eps=0.15, alpha=0.05, steps=3, all_steps=True)


def loader(size=160, batch_size=32, **kwargs):
    # Not shuffled, and with a generator of its own, so that a loop by hand sees the same data and random numbers
    return DataLoader(digits_data(0, size), batch_size=batch_size, generator=torch.Generator(), **kwargs)


class Recorder(Classifier):
    """Keeps the batches that its training step gets, and the losses that it returns."""

    def __init__(self):
        super().__init__()
        self.batches, self.losses = [], []

    def on_train_batch_start(self, batch, batch_idx):
        self.net[7].eval()

    def training_step(self, batch, batch_idx):
        self.batches.append(batch)
        loss = nn.functional.cross_entropy(self(inputs(batch)), labels(batch))
        self.losses.append(loss.item())
        return loss


def inputs(batch):
    return batch[0] if isinstance(batch, (tuple, list)) else batch["image"]


def labels(batch):
    return batch[1] if isinstance(batch, (tuple, list)) else batch["label"]


def fit(path, callback, module=Recorder, data=None, **kwargs):
    L.seed_everything(3, verbose=False)
    module = module()
    trainer = make_trainer(path, callback, **kwargs)
    trainer.fit(module, loader() if data is None else data)
    return module, trainer


def by_hand(epochs, attack, seed=0, accumulate=1, clip=None, rank=0, world_size=1, data=None):
    """What the Trainer does, in a loop of its own."""
    L.seed_everything(3, verbose=False)
    module, index = Classifier(), 0
    (optimizer,), (schedule,) = module.configure_optimizers()
    if world_size > 1:
        L.seed_everything(3, verbose=False)  # as Lightning does where it sets up processes
    module.train()
    data = loader() if data is None else data
    for _ in range(epochs):
        for number, (x, y) in enumerate(data):
            module.net[7].eval()
            x = attack(module, x, y, seed=seed, index=index * world_size + rank)
            if world_size > 1:
                for buffer in module.buffers():
                    dist.broadcast(buffer, 0)  # as DistributedDataParallel does before each forward pass
            (nn.functional.cross_entropy(module(x), y) / accumulate).backward()
            index += 1
            if (number + 1) % accumulate == 0 or number + 1 == len(data):
                if world_size > 1:
                    for p in module.parameters():
                        dist.all_reduce(p.grad)
                        p.grad /= world_size
                if clip is not None:
                    nn.utils.clip_grad_norm_(module.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
    return module


def assert_same_weights(first, second):
    assert_identical(dict(first.state_dict()), dict(second.state_dict()))


@pytest.mark.parametrize(
    ("kwargs", "options"),
    [({}, {}), ({"accumulate_grad_batches": 2}, {"accumulate": 2}), ({"gradient_clip_val": 0.1}, {"clip": 0.1})],
    ids=["plain", "accumulation", "clipping"],
)
def test_weights_of_a_loop_by_hand(tmp_path, kwargs, options):
    module, _ = fit(tmp_path, AdversarialTraining(**SETTINGS), max_epochs=2, **kwargs)
    assert_same_weights(module, by_hand(2, ATTACK, **options))
    with pytest.raises(AssertionError, match=r"net\.0\.weight"):
        assert_same_weights(module, by_hand(2, ATTACK, seed=1, **options))


def fit_as_one_of_two(rank, path):
    as_torchrun_would(rank)
    callback = AdversarialTraining(**SETTINGS, measure_every_n_batches=1)
    options = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}  # which would shuffle
    module, trainer = fit(path, callback, data=shard_of_two(rank), max_epochs=2, **options)
    return dict(module.state_dict()), logged(trainer), inputs(module.batches[0])


def shard_of_two(rank):
    return DataLoader(Subset(digits_data(0, 160), range(rank, 160, 2)), batch_size=32, generator=torch.Generator())


def by_hand_as_one_of_two(rank):
    return dict(by_hand(2, ATTACK, rank=rank, world_size=2, data=shard_of_two(rank)).state_dict())


def test_two_processes(tmp_path, two_processes):
    trained = two_processes(fit_as_one_of_two, tmp_path)
    expected = two_processes(by_hand_as_one_of_two)
    assert_identical([state for state, _, _ in trained], expected)
    assert_identical(trained[0][1], trained[1][1])
    clean = [next(iter(shard_of_two(rank)))[0] for rank in range(2)]
    directions = [(x - x_clean).sign() for (_, _, x), x_clean in zip(trained, clean, strict=True)]
    assert (directions[0] == directions[1]).float().mean() < 0.8


def logged(trainer):
    values = trainer.callback_metrics.items()
    return {name.split("/")[1]: value.item() for name, value in values if name.startswith("adversarial_training/")}


COLLATE = {"tuple": lambda x, y: (x, y), "mapping": lambda x, y: UserDict(image=x, label=y, path=["here"] * len(x))}


class Witness(L.Callback):
    """What another callback sees."""

    def __init__(self):
        self.inputs = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.inputs.append(inputs(batch).clone())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        assert torch.equal(inputs(batch), self.inputs[-1])


@pytest.mark.parametrize("collate", COLLATE.values(), ids=COLLATE.keys())
def test_batches_of_any_type_and_nothing_is_written_into_them(tmp_path, collate):
    images, targets = digits_data(0, 64).tensors
    batches = [collate(images[:32], targets[:32]), collate(images[32:], targets[32:])]
    before, witness = images.clone(), Witness()
    L.seed_everything(3, verbose=False)
    module = Recorder()
    trainer = make_trainer(tmp_path, witness, AdversarialTraining(**SETTINGS))
    trainer.fit(module, DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch))
    assert torch.equal(images, before)
    assert torch.equal(torch.cat(witness.inputs), before)
    assert [type(batch) for batch in module.batches] == [type(batch) for batch in batches]
    for batch, clean in zip(module.batches, batches, strict=True):
        assert torch.equal(labels(batch), labels(clean))
        assert 0.14 < (inputs(batch) - inputs(clean)).abs().max() <= 0.15 + 1e-6
        assert not inputs(batch).requires_grad


def test_inputs_labels_and_logits_from_functions(tmp_path):
    class Hidden(Recorder):
        def forward(self, x):
            raise NotImplementedError

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.net(batch["views"][0]), batch["soft"])

    data = [{"views": [x, x.clone()], "soft": torch.eye(10)[y]} for x, y in loader()]
    functions = {
        "forward_fn": lambda module, x: {"logits": module.net(x)},
        "batch_fn": lambda batch: (batch["views"][0], batch["soft"].argmax(dim=1)),
    }
    callback = AdversarialTraining(**SETTINGS, **functions)
    module, _ = fit(tmp_path, callback, Hidden, DataLoader(data, batch_size=None, generator=torch.Generator()))
    torch.testing.assert_close(dict(module.state_dict()), dict(by_hand(1, ATTACK).state_dict()))


def changed_rows(module, data):
    """Which inputs of each batch are not those of the loader."""
    return [(x != clean).flatten(1).any(dim=1) for (x, _), (clean, _) in zip(module.batches, data, strict=True)]


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0])
def test_mix(tmp_path, ratio):
    module, _ = fit(tmp_path, AdversarialTraining(**SETTINGS, combine="mix", ratio=ratio))
    changed = changed_rows(module, loader())
    assert [int(rows.sum()) for rows in changed] == [round(ratio * 32)] * 5
    assert ratio == 1.0 or not torch.equal(changed[0], changed[1])


def test_mix_in_train_mode_attacks_two_at_least(tmp_path):
    class Normalised(Recorder):
        def on_train_batch_start(self, batch, batch_idx):
            pass  # all of BatchNorm is in train mode, where it refuses a single row

    callback = AdversarialTraining(**SETTINGS, combine="mix", eval_mode=False)
    module, _ = fit(tmp_path, callback, Normalised, loader(34))
    assert [int(rows.sum()) for rows in changed_rows(module, loader(34))] == [16, 2]


def test_concat(tmp_path):
    module, trainer = fit(tmp_path, AdversarialTraining(**SETTINGS, combine="concat"))
    for (x, y), (clean, targets) in zip(module.batches, loader(), strict=True):
        assert torch.equal(x[:32], clean)
        assert torch.equal(y, torch.cat([targets, targets]))
    L.seed_everything(3, verbose=False)
    assert torch.equal(module.batches[0][0][32:], ATTACK(Recorder().eval(), *next(iter(loader()))))
    assert logged(trainer)["loss"] == pytest.approx(sum(module.losses) / 5, rel=1e-5)


@pytest.mark.parametrize("mode", ["replace", "mix", "concat"])
def test_normalised_inputs(tmp_path, mode):
    space = InputSpace(mean=0.25, std=0.5)
    images, targets = digits_data(0, 64).tensors
    callback = AdversarialTraining(**SETTINGS, input_space=space, combine=mode)
    data = DataLoader([(space.normalize(images), targets)], batch_size=None)
    module, _ = fit(tmp_path, callback, data=data)
    pixels = space.unnormalize(inputs(module.batches[0]))[-64:]
    assert -1e-6 < pixels.min() < 0.01
    assert 0.99 < pixels.max() < 1 + 1e-6
    assert (pixels - images).abs().max() == pytest.approx(0.15, abs=1e-5)


def test_warm_up_and_schedule(tmp_path):
    class Largest(L.Callback):
        def __init__(self):
            self.seen = []

        def on_train_epoch_end(self, trainer, pl_module):
            number = len(pl_module.batches) // (trainer.current_epoch + 1)
            pairs = zip(pl_module.batches[-number:], loader(), strict=True)
            largest = max((inputs(batch) - clean).abs().max().item() for batch, (clean, _) in pairs)
            self.seen.append((round(largest, 3), logged(trainer).get("eps")))

    L.seed_everything(3, verbose=False)
    module, budgets = Recorder(), Largest()
    callback = AdversarialTraining("pgd", budgets=[0.0, 0.1, 0.2], steps=2, warmup_epochs=2)
    make_trainer(tmp_path, callback, budgets, max_epochs=6).fit(module, loader())
    assert [largest for largest, _ in budgets.seen] == [0.0, 0.0, 0.0, 0.1, 0.2, 0.2]
    assert [eps for _, eps in budgets.seen[:2]] == [None, None]
    assert [eps for _, eps in budgets.seen[2:]] == pytest.approx([0.0, 0.1, 0.2, 0.2])


def noise(model, x, y):
    return (x + 0.1 * torch.randn_like(x)).clamp(0, 1)


@pytest.mark.parametrize("attack", ["fast", "cw", "torchattacks:FGSM", noise])
def test_any_attack(tmp_path, attack):
    module, trainer = fit(tmp_path, AdversarialTraining(attack, measure_every_n_batches=1))
    changes = [(inputs(batch) - clean).abs().max() for batch, (clean, _) in zip(module.batches, loader(), strict=True)]
    assert max(changes) > 0.01
    assert 0 <= logged(trainer)["asr"] <= 1


@pytest.mark.parametrize("eval_mode", [True, False])
def test_mode_of_the_attack_and_statistics(tmp_path, eval_mode):
    modes = []

    def spy(model, x, y):
        modes.append([module.training for module in model.model.net])
        model(x)  # moves statistics, in train mode
        return x

    module, _ = fit(tmp_path, AdversarialTraining(spy, eval_mode=eval_mode), max_epochs=2)
    assert modes == [[not eval_mode and number != 7 for number in range(10)]] * 10  # 7 is frozen
    assert_same_weights(module, by_hand(2, lambda model, x, y, seed, index: x))


class Deterministic(Recorder):
    """Without dropout, whose random state is not part of a checkpoint."""

    def __init__(self):
        super().__init__()
        self.net[5] = nn.Identity()


class Budgets(L.Callback):
    """The budgets that are logged at the ends of epochs."""

    def __init__(self):
        self.logged = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.logged.append(round(logged(trainer)["eps"], 6))


@pytest.mark.parametrize(
    ("when", "step", "num_ends"),
    [
        ({"every_n_epochs": 1, "save_on_train_epoch_end": True}, 5, 2),
        ({"every_n_epochs": 1, "save_on_train_epoch_end": False}, 10, 2),
        ({"every_n_train_steps": 5}, 10, 1),
        ({"every_n_train_steps": 3}, 6, 2),
    ],
    ids=["after an epoch", "after validation", "after the last batch of an epoch", "within an epoch"],
)
def test_a_resumed_run_ends_like_the_one_that_was_not_stopped(tmp_path, when, step, num_ends):
    # All batches are the same: where an epoch goes on, a loader without a state begins anew
    batches = DataLoader([digits_data(0, 32).tensors] * 5, batch_size=None)

    def train(module, *callbacks, path=None, **options):
        callback, budgets = AdversarialTraining("fast", budgets=[0.02, 0.1, 0.2]), Budgets()
        trainer = make_trainer(tmp_path, callback, budgets, *callbacks, max_epochs=3, **options)
        trainer.fit(module, batches, batches, ckpt_path=path)
        return callback.state_dict(), budgets.logged

    L.seed_everything(3, verbose=False)
    module, resumed = Deterministic(), Deterministic()
    checkpoint = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, **when)
    state, budgets = train(module, checkpoint, enable_checkpointing=True)
    resumed_state, resumed_budgets = train(resumed, path=tmp_path / f"step={step}.ckpt")
    assert len(resumed.batches) == 15 - step
    assert budgets == [0.02, 0.1, 0.2]
    assert resumed_budgets == budgets[-num_ends:]
    assert resumed_state == state
    assert_same_weights(module, resumed)


class Bytes(Deterministic):
    """Scales pixels in bytes by itself, as well as floats."""

    def forward(self, x):
        return super().forward(x.float() / 255)


def bytes_loader():
    x, y = digits_data(0, 160).tensors
    return DataLoader(TensorDataset((255 * x).to(torch.uint8), y), batch_size=32)


def floats_loader():
    x, y = bytes_loader().dataset.tensors
    return DataLoader(TensorDataset(x.float(), y), batch_size=32)


@pytest.mark.parametrize("options", [{}, {"combine": "concat"}, {"combine": "mix"}, {"loss": "trades"}])
def test_pixels_in_bytes_are_attacked_as_floats(tmp_path, options):
    def trained(data):
        callback = AdversarialTraining("pgd", 20.0, steps=2, input_space=InputSpace(high=255), **options)
        return fit(tmp_path, callback, Bytes, data)[0]

    assert_same_weights(trained(bytes_loader()), trained(floats_loader()))


@pytest.mark.parametrize("loss", [None, "trades"])
def test_bytes_without_their_space_are_refused_with_the_space_to_pass(tmp_path, loss):
    with pytest.raises(TypeError, match=r"torch\.uint8.*`input_space=InputSpace\(high=255\)`.*grey levels.*`embed_fn="):
        fit(tmp_path, AdversarialTraining("pgd", steps=1, loss=loss), Bytes, bytes_loader())
    space = InputSpace(high=255)
    fit(tmp_path, AdversarialTraining("pgd", 8.0, steps=1, loss=loss, input_space=space), Bytes, bytes_loader())


@pytest.mark.parametrize("budget", [{"eps": 0}, {"eps": 1e-30}, {"budgets": [0, 0]}, {"budgets": [0, 1e-30]}])
def test_a_budget_that_changes_nothing(budget):
    with pytest.raises(ValueError, match=r"`eps`.*can change an input.* Pass a positive number such as 8/255\.$"):
        AdversarialTraining(**budget)


def test_a_network_that_treats_bytes_and_floats_differently_is_refused(tmp_path):
    class Differs(Bytes):
        def forward(self, x):
            return super().forward(x if x.dtype == torch.uint8 else 255 * x)

    class Asserts(Bytes):
        def forward(self, x):
            assert x.dtype == torch.uint8
            return super().forward(x)

    callback = AdversarialTraining("pgd", 20.0, input_space=InputSpace(high=255))
    for kind, reason in ((Differs, "they differ"), (Asserts, "AssertionError")):
        with pytest.raises(ValueError, match=rf"(?s)pixels in bytes .*{reason}.*`x\.float\(\) / 255`"):
            fit(tmp_path, callback, kind, bytes_loader())


class ByHand:
    """Optimizes by itself."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Manual(ByHand, Recorder):
    def on_train_epoch_end(self):
        self.lr_schedulers().step()


def test_manual_optimization(tmp_path):
    module, trainer = fit(tmp_path, AdversarialTraining(**SETTINGS), Manual, max_epochs=2)
    assert_same_weights(module, by_hand(2, ATTACK))
    assert "loss" not in logged(trainer)  # the step returns none


ALWAYS = {"adv_acc", "asr", "loss", "eps", "clipped", "nonfinite_gradients"}


class InDictionary(Recorder):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx)}


@pytest.mark.parametrize("module", [Recorder, InDictionary])
def test_values(tmp_path, module):
    class Still(module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
            images, targets = digits_data(0, 144).tensors
            means = torch.stack([images[targets == k].flatten(1).mean(dim=0) for k in range(10)])
            self.net[1].weight.data, self.net[1].bias.data = means, -means.square().sum(dim=1) / 2  # the closest mean

        def on_train_batch_start(self, batch, batch_idx):
            pass

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    callback = AdversarialTraining(**SETTINGS, measure_every_n_batches=2)
    module, trainer = fit(tmp_path, callback, Still, loader(144))  # the last batch has half the size
    measured = [(x, x_adv, y) for (x_adv, _), (x, y) in zip(module.batches, loader(144), strict=True)][::2]
    x, x_adv, y = (torch.cat(tensors) for tensors in zip(*measured, strict=True))
    right, adv_right = module(x).argmax(dim=1) == y, module(x_adv).argmax(dim=1) == y
    values = logged(trainer)
    assert 0 < (right & ~adv_right).sum() < right.sum()
    assert values["adv_acc"] == pytest.approx(adv_right.sum().item() / 80)
    assert values["asr"] == pytest.approx((right & ~adv_right).sum().item() / right.sum().item())
    assert values["loss"] == pytest.approx((32 * sum(module.losses[:4]) + 16 * module.losses[4]) / 144, rel=1e-5)
    assert values["eps"] == pytest.approx(0.15)
    assert values["clipped"] == 0
    assert set(values) == ALWAYS


@pytest.mark.parametrize(
    ("precision", "dtype", "dtype_in_training"),
    [
        ("bf16-mixed", torch.float32, torch.bfloat16),
        ("64-true", torch.float64, torch.float64),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
    ],
)
def test_precision(tmp_path, precision, dtype, dtype_in_training):
    seen, passes = [], []

    class Watched(Recorder):
        def __init__(self):
            super().__init__()
            self.net[9].register_forward_hook(lambda layer, args, output: passes.append(output.dtype))

    def spy(model, x, y):
        seen.append((model(x).dtype, passes[-1]))
        return PGD(eps=0.1, steps=2)(model, x, y)

    module, trainer = fit(tmp_path, AdversarialTraining(spy, measure_every_n_batches=1), Watched, precision=precision)
    assert {inputs(batch).dtype for batch in module.batches} == {dtype}
    # Attacks see logits of single precision at least, from a network without autocast
    assert set(seen) == {(torch.promote_types(dtype, torch.float32), dtype)}
    assert passes[-1] == dtype_in_training
    assert 0 < logged(trainer)["adv_acc"] < 1


@pytest.mark.parametrize("whole", [False, True])
def test_compiled(tmp_path, whole):
    class Compiled(Recorder):
        def __init__(self):
            super().__init__()
            if not whole:
                self.net = torch.compile(self.net, backend="eager")

        def on_train_batch_start(self, batch, batch_idx):
            pass

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def module():
        return torch.compile(Compiled(), backend="eager") if whole else Compiled()

    module, trainer = fit(tmp_path, AdversarialTraining(**SETTINGS, measure_every_n_batches=1), module)
    assert logged(trainer)["asr"] > 0


@pytest.mark.filterwarnings("ignore:RobustnessMonitor. expected the outputs that validation computed")
def test_watching_changes_nothing(tmp_path):
    def trained(*monitors):
        return run_watched(tmp_path, [AdversarialTraining("fast", eps=0.1), *monitors])

    monitor = RobustnessMonitor(("pgd",), eps=0.1, attack_every_n_epochs=1, fim_samples=16, attack_samples=16)
    assert_identical(trained(), trained(monitor))
    assert len(monitor.history) == 3


class Robust(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(256, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def test_networks_become_robust(tmp_path, digits):
    x, y = digits[0][1200:], digits[1][1200:]
    values = {}
    for name, callbacks in {"natural": [], "robust": [AdversarialTraining("pgd", eps=0.15, steps=4)]}.items():
        L.seed_everything(0, verbose=False)
        module = Robust()
        make_trainer(tmp_path, *callbacks, max_epochs=8).fit(module, DataLoader(digits_data(0, 1200), 64, shuffle=True))
        logits = module.eval()(x).detach()
        values[name] = {
            "accuracy": (logits.argmax(dim=1) == y).float().mean().item(),
            "asr": run_attack(module, PGD(eps=0.15, steps=20), x, y).success_rate,
            "fim": fisher_spectral_norm(module, x[:200]).mean().item(),
            "rdi": robustness_difference_index(logits, logits.argmax(dim=1)).item(),
        }
    natural, robust = values["natural"], values["robust"]
    assert min(natural["accuracy"], robust["accuracy"]) > 0.85
    assert robust["asr"] < natural["asr"] - 0.2
    assert robust["fim"] < natural["fim"]
    assert robust["rdi"] > natural["rdi"]


def overfit(path, monkeypatch, accuracies, **options):
    """Train with given accuracies under one and under many steps at the end of each epoch."""
    rates, saved = iter(accuracies), []

    class Result:
        def __init__(self, accuracy, y):
            self.adv_preds = torch.where(torch.arange(len(y)) < round(accuracy * len(y)), y, -1)

    def fake_run(model, attack, x, y, **options):
        return Result(next(rates), y)

    monkeypatch.setattr("lightning_robustness.callbacks.adversarial_training.run_attack", fake_run)
    L.seed_everything(3, verbose=False)
    defaults = {"overfitting_samples": 50} | ({} if "budgets" in options else {"eps": 0.1})
    callback, values = AdversarialTraining("fast", **defaults | options), []

    class Epochs(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            values.append((logged(trainer)["adv_acc_pgd"], logged(trainer)["overfitting"]))
            saved.append({name: tensor.clone() for name, tensor in pl_module.state_dict().items()})

    make_trainer(path, callback, Epochs(), max_epochs=len(accuracies) // 2).fit(Recorder(), loader())
    return callback, values, saved


COLLAPSE = [0.5, 0.4, 0.6, 0.5, 0.9, 0.1, 0.9, 0.1]


def test_catastrophic_overfitting(tmp_path, monkeypatch):
    path = str(tmp_path / "before.ckpt")
    with pytest.warns(UserWarning, match=r"epoch 2, .* 90%, .* 60% .* 10%, .* 50%") as w:
        callback, values, states = overfit(tmp_path, monkeypatch, COLLAPSE, overfitting_checkpoint=path)
    assert sum("Catastrophic overfitting" in str(warning.message) for warning in w) == 1
    assert values == [pytest.approx(pair) for pair in [(0.4, 0.0), (0.5, 0.0), (0.1, 1.0), (0.1, 1.0)]]
    assert_identical(dict(torch.load(path)["state_dict"]), states[1])
    resumed = AdversarialTraining("fast", eps=0.1)
    resumed.load_state_dict(callback.state_dict())
    assert resumed._overfitting == CatastrophicOverfitting(single=0.6, multi=0.5, eps=0.1, seen=True)


@pytest.mark.parametrize(
    ("accuracies", "options", "signs", "kept"),
    [
        ([0.96, 0.96, 0.7, 0.6, 0.9, 0.06, 0.94, 0.0], {"budgets": [0.02, 0.06, 0.1, 0.14]}, [0, 0, 1, 1], 1),
        ([0.62, 0.56, 0.6, 0.06, 0.6, 0.0, 0.9, 0.0], {"eps": 0.1}, [0, 0, 0, 1], 0),
    ],
    ids=["schedule", "late sign"],
)
def test_the_checkpoint_is_not_of_a_collapsed_network(tmp_path, monkeypatch, accuracies, options, signs, kept):
    path = str(tmp_path / "before.ckpt")
    with pytest.warns(UserWarning, match="Catastrophic overfitting"):
        _, values, states = overfit(tmp_path, monkeypatch, accuracies, **options, overfitting_checkpoint=path)
    assert [sign for _, sign in values] == signs
    assert_identical(dict(torch.load(path)["state_dict"]), states[kept])


def test_many_steps_are_measured_for_one_step_only(tmp_path):
    _, trainer = fit(tmp_path, AdversarialTraining("fast", eps=0.1, overfitting_samples=48), max_epochs=4)
    assert set(logged(trainer)) == {*ALWAYS, "adv_acc_pgd", "overfitting"}
    x, y = digits_data(0, 48).tensors
    result = run_attack(trainer.lightning_module, PGD(eps=0.1, steps=5, all_steps=True), x, y)
    assert logged(trainer)["adv_acc_pgd"] == pytest.approx((result.adv_preds == y).float().mean().item())
    for callback in (AdversarialTraining(**SETTINGS), AdversarialTraining("fast", eps=0.1, overfitting_samples=0)):
        _, trainer = fit(tmp_path, callback)
        assert set(logged(trainer)) == ALWAYS


def test_lightning_cli_knows_the_arguments():
    arguments = {"budgets": [0.05, 0.1], "combine": "mix", "input_space": {"mean": 0.0, "std": [1.0]}}
    pgd = {"class_path": "lightning_robustness.attacks.PGD", "init_args": {"norm": "l2", "steps": 2}}
    first, second = (from_yaml(AdversarialTraining, attack=attack, **arguments) for attack in ("fast", pgd))
    assert first.attack == PGD(eps=0.05, alpha=0.0625, steps=1, all_steps=True)
    assert second.attack == PGD(eps=0.05, norm="l2", steps=2, all_steps=True)
    assert first.access.input_space == InputSpace(mean=0.0, std=(1.0,))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"attack": "fast", "overfitting_samples": 0, "overfitting_checkpoint": "a.ckpt"}, "`overfitting_samples`"),
        ({"loss": "mart", "combine": "mix"}, "`combine`"),
        ({"eps": 0.1, "budgets": [0.1]}, "`eps` or `budgets`"),
    ],
)
def test_bad_combinations(options, match):
    with pytest.raises(ValueError, match=match):
        AdversarialTraining(**options)


def test_no_labels(tmp_path):
    data = DataLoader([digits_data(0, 32).tensors[0]], batch_size=None)
    with pytest.raises(ValueError, match=r"labels, for the attack.*`batch_fn=`"):
        fit(tmp_path, AdversarialTraining(), data=data)


@pytest.mark.parametrize("space", [InputSpace(), InputSpace(mean=0.5, std=0.25)])
def test_small_overshoots_do_not_end_a_run(tmp_path, space):
    """Two of 32 images of the second of two batches reach 1.05: they are attacked from 1."""
    images, targets = (tensor.clone() for tensor in digits_data(0, 64).tensors)
    over = images.clone()
    over[40, 0, 2, 3:5], over[50, 0, 4, 4] = 1.05, -0.05
    data = DataLoader(
        [(space.normalize(part), y) for part, y in zip(over.split(32), targets.split(32), strict=True)], batch_size=None
    )
    callback = AdversarialTraining(**SETTINGS, input_space=space)
    with pytest.warns(UserWarning, match=r"\[0\.0, 1\.0\].*`adversarial_training/clipped`"):
        module, trainer = fit(tmp_path, callback, data=data)
    assert logged(trainer)["clipped"] == pytest.approx(2 / 64)
    x_adv = space.unnormalize(module.batches[1][0])
    assert -1e-6 <= x_adv.min() <= x_adv.max() <= 1 + 1e-6
    assert (x_adv - over[32:].clamp(0, 1)).abs().max() <= 0.15 + 1e-5


@pytest.mark.parametrize(
    ("images", "space", "match"),
    [
        (lambda x: (x - 0.3) / 0.3, InputSpace(), r"\[-1, 2\.333\].*InputSpace\(mean"),
        (lambda x: x, InputSpace(mean=0.5, std=0.25), "from 0 to 1, .* already lie in"),
        (lambda x: 255 * x, InputSpace(), r"InputSpace\(high=255\)"),
    ],
)
def test_evident_mistakes_are_refused_on_the_first_batch(tmp_path, images, space, match):
    x, y = digits_data(0, 32).tensors
    with pytest.raises(ValueError, match=match):
        fit(tmp_path, AdversarialTraining(input_space=space), data=DataLoader([(images(x), y)], batch_size=None))


def test_soft_labels(tmp_path):
    """Mixed labels stay as they are for the step; the attack is on the most likely class."""
    x, y = digits_data(0, 32).tensors
    soft = 0.8 * nn.functional.one_hot(y, 10) + 0.2 * nn.functional.one_hot(y.flip(0), 10)
    module, _ = fit(tmp_path, AdversarialTraining(**SETTINGS), data=DataLoader([(x, soft)], batch_size=None))
    hard, _ = fit(tmp_path, AdversarialTraining(**SETTINGS), data=DataLoader([(x, y)], batch_size=None))
    assert torch.equal(module.batches[0][0], hard.batches[0][0])
    assert torch.equal(module.batches[0][1], soft)
