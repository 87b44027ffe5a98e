"""The monitor with any Trainer and module: precision, compiled networks, resumed runs, hooks, copies."""

import copy
import gc
import pickle
from contextlib import nullcontext

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from sklearn.metrics import accuracy_score
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader

from lightning_robustness import InputSpace, RobustEarlyStopping
from lightning_robustness.attacks import PGD, run_attack
from lightning_robustness.functional import (
    fisher_spectral_norm,
    robustness_difference_index,
)
from tests.callbacks.modules import Classifier, digits_data, train_loader, val_loader
from tests.callbacks.monitors import (
    ALWAYS,
    FEATURES,
    FISHER,
    attack_keys,
    count_hooks,
    fit,
    fit_without_noise,
    logged,
    small_monitor,
    validated,
)


class Mapped(Classifier):
    """Runs its layers on one sample at a time, within a transform whose tensors must not leave it."""

    def forward(self, x):
        return (
            torch.func.vmap(lambda image: self.net(image.unsqueeze(0)).squeeze(0))(x)
            if not self.training
            else (super().forward(x))
        )


@pytest.mark.filterwarnings("ignore:Mapped has no last layer")
def test_layers_within_a_transform_of_torch(tmp_path):
    torch.manual_seed(0)
    module, mapped = Classifier(), Mapped()
    mapped.load_state_dict(module.state_dict())
    expected = validated(tmp_path, module, small_monitor())
    for options in ({}, {"forward_fn": lambda module, x: module(x)}):
        values = validated(tmp_path, mapped, small_monitor(**options))
        assert values.keys() == expected.keys() - {"rdi_embedding", "roby", "fsa", "fsd"}
        for name in ("acc", "rdi", "fim", "adv_acc/fgsm"):
            assert values[name] == pytest.approx(expected[name], rel=1e-4)


@pytest.mark.parametrize(
    ("kwargs", "samples"),
    [
        ({"limit_val_batches": 2}, 64),
        ({"fast_dev_run": True}, 32),
        ({"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}, 101),
        ({"precision": "bf16-mixed"}, 101),
        ({"precision": "64-true"}, 101),
        ({"precision": "bf16-true"}, 101),
        ({"overfit_batches": 2}, 64),
        ({"inference_mode": False}, 101),
    ],
)
def test_settings_of_the_trainer(tmp_path, kwargs, samples):
    trainer = fit(tmp_path, monitor := small_monitor(), **kwargs)
    values = logged(trainer)
    keys = FEATURES | FISHER | ALWAYS | attack_keys("fgsm")
    # After few steps a network may be right nowhere, or predict two classes only
    rare = {f"{rate}/{name}" for rate in ("asr", "distortion") for name in ("fgsm", "worst")} | {"roby", "fsa", "fsd"}
    assert keys - rare <= values.keys() <= keys
    assert values["samples"] == samples
    assert all(np.isfinite(value) for value in values.values())
    assert len(monitor.history) == 1


def test_precision_of_the_network_does_not_matter_for_a_double_one(tmp_path):
    module = Classifier()
    values = [
        validated(tmp_path, module, small_monitor(attacks=()), precision=precision)
        for precision in ("32-true", "64-true")
    ]
    for key in (FEATURES | FISHER) - {"seconds/features", "seconds/fim"}:
        assert values[0][key] == pytest.approx(values[1][key], rel=1e-4), key


def compiled_network(module):
    module.net = torch.compile(module.net, backend="eager")
    return module


def compiled_in_place(module):
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize("compiled", [compiled_network, compiled_in_place, lambda m: torch.compile(m, backend="eager")])
def test_compiled_networks(tmp_path, compiled):
    module = Classifier()
    plain = validated(tmp_path, module, small_monitor())
    values = validated(tmp_path, compiled(module), small_monitor())
    for key, value in plain.items():
        assert "seconds" in key or values[key] == pytest.approx(value, rel=1e-5), key
    torch._dynamo.reset()


def test_modules_and_trainers_of_the_other_package(tmp_path):
    import pytorch_lightning
    from pytorch_lightning.loggers import TensorBoardLogger as OtherLogger

    class Other(pytorch_lightning.LightningModule):
        forward, validation_step = Classifier.forward, Classifier.validation_step
        training_step, configure_optimizers = Classifier.training_step, Classifier.configure_optimizers

        def __init__(self):
            super().__init__()
            self.net = Classifier().net

    monitor, logger = small_monitor(log_figures=True), OtherLogger(tmp_path)
    stopping = RobustEarlyStopping("robustness/rdi", mode="max", stopping_threshold=-2.0)
    trainer = pytorch_lightning.Trainer(
        callbacks=[monitor, stopping],
        logger=logger,
        max_epochs=3,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module := Other(), train_loader(), val_loader())
    assert len(monitor.history) == 1
    x, y = val_loader().dataset.tensors
    assert monitor.history[0]["acc"] == pytest.approx(accuracy_score(y, module.eval()(x).argmax(dim=1)))
    events = EventAccumulator(logger.log_dir).Reload()
    assert {"robustness/rdi", "robustness/asr/fgsm"} <= set(events.Tags()["scalars"])
    assert events.Tags()["histograms"], "its TensorBoard logger gets more than scalars too"


class Unusual(Classifier):
    """Runs the network on noise, on the batch and on noise again, and returns a mapping."""

    def forward(self, x):
        return {"logits": self.net(2 * x - 1)}

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0])["logits"], batch[1])

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        for x in (torch.rand_like(batch[0]), batch[0], 1 - batch[0]):
            self(x)


class Absent(Unusual):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.net(batch[0].flip(0))


@pytest.mark.filterwarnings("ignore:.*runs the network several times per batch")
def test_the_call_on_the_batch_itself_counts(tmp_path):
    module = Unusual()
    values = [validated(tmp_path, module, small_monitor())]
    module.__class__ = Absent
    with pytest.raises(MisconfigurationException, match=r"runs it on other inputs and gets other logits.*module\(x\)"):
        validated(tmp_path, module, small_monitor())
    assert count_hooks(module) == 0
    with pytest.warns(UserWarning, match="RDI and ROBY take another forward pass"):
        values.append(validated(tmp_path, module, small_monitor(forward_fn=lambda module, x: module(x))))
    x, y = val_loader().dataset.tensors
    with torch.no_grad():
        logits = module.eval()(x)["logits"]
    for value in values:
        assert value["rdi"] == pytest.approx(robustness_difference_index(logits, logits.argmax(dim=1)).item(), rel=1e-5)
        assert value["acc"] == pytest.approx(accuracy_score(y, logits.argmax(dim=1)))


def test_forward_fn_batch_fn_head_and_input_space(tmp_path):
    space = InputSpace(mean=0.5, std=0.25)
    x, y = digits_data(1200, 1260).tensors
    data = [{"pixels": space.normalize(x[i]), "class": y[i]} for i in range(len(x))]

    class Dictionary(Classifier):
        forward = None

        def on_train_batch_start(self, batch, batch_idx):
            pass

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.net(batch["pixels"]), batch["class"])

        validation_step = training_step

    module = Dictionary()
    monitor = small_monitor(
        forward_fn=lambda module, x: module.net(x),
        batch_fn=lambda batch: (batch["pixels"], batch["class"]),
        head=module.net[9],
        input_space=space,
        num_classes=10,
        fim_samples=60,
        attack_samples=60,
    )
    loaders = {"data": DataLoader(data, batch_size=20), "loader": DataLoader(data, batch_size=25)}
    values = logged(fit(tmp_path, monitor, module=module, **loaders))
    raw = nn.Sequential(Normalize(space), module.net).eval()
    assert values["fim"] == pytest.approx(fisher_spectral_norm(raw, x).mean().item(), rel=1e-4)
    result = run_attack(raw, PGD(eps=0.1, steps=1, start="clean"), x, y)
    assert values["asr/fgsm"] == pytest.approx(result.success_rate, abs=0.02)


class Normalize(nn.Module):
    def __init__(self, space):
        super().__init__()
        self.space = space

    def forward(self, x):
        return self.space.normalize(x)


class Kill(L.Callback):
    """Ends a run in the middle of an epoch."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 35:
            raise RuntimeError("killed")


def test_resumed_run_logs_the_same_curve(tmp_path):
    def history(path, *callbacks, ckpt_path=None):
        monitor = small_monitor(attack_every_n_epochs=2, attacks=["pgd"])
        callbacks = monitor, ModelCheckpoint(path, save_last=True), *callbacks
        with pytest.raises(RuntimeError, match="killed") if len(callbacks) > 2 else nullcontext():
            fit_without_noise(path, *callbacks, max_epochs=5, enable_checkpointing=True, ckpt_path=ckpt_path)
        return [{key: value for key, value in entry.items() if "seconds" not in key} for entry in monitor.history]

    whole = history(tmp_path / "whole")
    killed = history(tmp_path / "killed", Kill())
    resumed = history(tmp_path / "killed", ckpt_path=tmp_path / "killed" / "last.ckpt")
    assert [entry["epoch"] for entry in resumed] == [0, 1, 2, 3, 4]
    assert resumed[:3] == killed
    assert ["asr/pgd" in entry for entry in whole] == [True, False, True, False, True]
    assert resumed == whole


def test_epochs_of_a_run_resumed_after_the_last_step_of_one(tmp_path):
    def steps_of_epochs(ckpt_path=None):
        monitor = small_monitor()
        save = ModelCheckpoint(tmp_path, every_n_train_steps=10, save_top_k=-1, filename="{step}")
        fit(tmp_path, monitor, save, max_epochs=4, enable_checkpointing=True, ckpt_path=ckpt_path)
        return {entry["epoch"]: entry["step"] for entry in monitor.history}

    steps = steps_of_epochs()
    resumed = steps_of_epochs(tmp_path / "step=20.ckpt")
    assert steps.keys() == {0, 1, 2, 3}
    assert resumed.items() <= steps.items()
    assert {2, 3} <= resumed.keys()


def test_evaluating_a_checkpoint_leaves_the_history(tmp_path):
    monitor, save = small_monitor(), ModelCheckpoint(tmp_path, monitor="robustness/rdi", mode="min", filename="{epoch}")
    trainer = fit(tmp_path, monitor, save, max_epochs=3, enable_checkpointing=True)
    history = list(monitor.history)
    trainer.validate(dataloaders=val_loader(), ckpt_path="best", verbose=False)
    assert monitor.history == history
    assert len(history) == 3
    assert logged(trainer)["rdi"] == pytest.approx(min(entry["rdi"] for entry in history), rel=1e-6)


def test_hooks_are_there_during_validation_alone_also_if_it_fails(tmp_path):
    class Failing(Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            assert count_hooks(self) == 0

        def validation_step(self, batch, batch_idx):
            assert count_hooks(self) > 0
            if self.trainer.current_epoch == 1:
                raise RuntimeError("validation failed")
            super().validation_step(batch, batch_idx)

    module = Failing()
    with pytest.raises(RuntimeError, match="validation failed"):
        fit(tmp_path, small_monitor(), max_epochs=2, module=module)
    assert count_hooks(module) == 0


@pytest.mark.parametrize("logger", [None, TensorBoardLogger])
def test_memory_does_not_grow(tmp_path, logger):
    counts = []

    class Tensors(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch < 5:  # trust is logged from the fifth evaluation on
                return
            gc.collect()
            tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
            sizes = [tensor.numel() for tensor in tensors]
            counts.append((len(tensors), sum(size for size in sizes if isinstance(size, int))))

    options = {} if logger is None else {"logger": logger(tmp_path)}
    fit(tmp_path, small_monitor(attack_every_n_epochs=1), Tensors(), max_epochs=8, **options)
    assert len(counts) == 3
    assert counts == sorted(counts, reverse=True)  # what other tests have left may be freed


def test_monitor_can_be_copied_and_pickled(tmp_path):
    monitor = small_monitor()
    fit(tmp_path, monitor)
    for other in (pickle.loads(pickle.dumps(monitor)), copy.deepcopy(monitor)):
        assert other.history == monitor.history
        assert other.state_key == monitor.state_key
        assert other.keys == monitor.keys
