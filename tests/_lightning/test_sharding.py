"""Runs whose parameters are spread over two processes; FSDPStrategy itself refuses to run without a GPU."""

import warnings
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_robustness import RobustEarlyStopping, RobustModelCheckpoint, RobustnessMonitor
from lightning_robustness._lightning.faults import warn_of_sharding
from tests._model.heads import count_hooks
from tests.callbacks.distributed_fit import NUM_SAMPLES, as_torchrun_would, trained
from tests.callbacks.modules import Classifier, make_trainer, train_loader, val_loader

FEATURES = ["rdi", "rdi_intra", "rdi_inter", "rdi_embedding", "roby", "fsa", "fsd", "acc", "samples", "skipped"]


class Sharded(Classifier):
    """Its parameters are sharded layer by layer, the rest together."""

    def __init__(self):
        super().__init__()
        self.num_passes = 0

    def configure_model(self):
        if self.trainer.world_size == 1 or hasattr(self, "is_sharded"):
            return
        self.is_sharded, mesh = True, self.device_mesh["data_parallel"]
        for layer in self.net:
            if isinstance(layer, (nn.Linear, nn.Conv2d)):
                fully_shard(layer, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def forward(self, x):
        self.num_passes += 1
        return super().forward(x)


class Divided(Classifier):
    """Both processes see all samples, and each has half of the weights of two layers."""

    def __init__(self):
        super().__init__()
        self.net[7] = nn.Identity()  # BatchNorm would have the statistics of all features

    def configure_model(self):
        if self.trainer.world_size > 1:
            plan = {"6": ColwiseParallel(), "9": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)


def run(rank, path, module, *callbacks, fn="validate", **kwargs):
    """Run a module on two processes, or on one if there is no rank; return the Trainer and our warnings."""
    if rank is not None:
        as_torchrun_would(rank)
        sizes = (1, 2) if isinstance(module, Divided) else (2, 1)
        strategy = ModelParallelStrategy(*sizes, save_distributed_checkpoint=False)
        kwargs |= {"strategy": strategy, "devices": 2}
    trainer = make_trainer(path, *callbacks, **kwargs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if fn == "validate":
            trainer.validate(module, val_loader(16, NUM_SAMPLES), verbose=False)
        else:
            trainer.fit(module, train_loader(), val_loader(16, NUM_SAMPLES))
    messages = [str(warning.message) for warning in caught]
    return trainer, [text for text in messages if "RobustnessMonitor" in text or "last layer" in text]


def validate(rank, path, kind):
    trainer, messages = run(rank, path, trained(kind), RobustnessMonitor(fim_samples=8, attack_samples=8))
    metrics = trainer.callback_metrics.items()
    logged = {
        key.removeprefix("robustness/").removeprefix("robustness_details/"): value.item() for key, value in metrics
    }
    return {key: value for key, value in logged.items() if "seconds" not in key and key != "val_acc"}, messages


def test_values_are_those_of_a_single_process(tmp_path, two_processes):
    expected, _ = validate(None, tmp_path, Sharded)
    (first, messages), (second, _) = two_processes(validate, tmp_path, Sharded)
    assert first == second
    assert sorted(first) == sorted(FEATURES)
    for key in FEATURES:
        assert first[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-6), key
    assert first["samples"] == NUM_SAMPLES
    assert len(messages) == 1
    assert messages[0].startswith("RobustnessMonitor: ModelParallelStrategy shards the parameters")


def test_processes_that_see_the_same_samples_count_once(tmp_path, two_processes):
    expected, _ = validate(None, tmp_path, Divided)
    (first, messages), (second, _) = two_processes(validate, tmp_path, Divided)
    assert first == second
    assert sorted(first) == ["acc", "rdi", "rdi_inter", "rdi_intra", "samples", "skipped"]
    for key, value in first.items():
        assert value == pytest.approx(expected[key], rel=1e-5, abs=1e-6), key
    assert "has no last layer to take embeddings from: layers are divided among processes" in messages[1]


def fit(rank, path, is_watched):
    monitor = RobustnessMonitor(log_figures=False)
    checkpoint = RobustModelCheckpoint("robustness/rdi", dirpath=path / "checkpoints")
    callbacks = [RobustEarlyStopping("robustness/rdi"), monitor, checkpoint] if is_watched else []
    L.seed_everything(3, verbose=False)
    module = Sharded()
    run(rank, path, module, *callbacks, enable_checkpointing=is_watched, max_epochs=2, fn="fit")
    weights = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    values = [(entry["epoch"], entry["rdi"]) for entry in monitor.history]
    return (
        {name: value.clone() for name, value in weights.items()},
        module.num_passes,
        values,
        checkpoint.best_model_path,
    )


def test_training_is_not_changed_and_no_pass_is_added(tmp_path, two_processes):
    (expected, num_passes, *_), _ = two_processes(fit, tmp_path, False)
    (weights, number, values, path), (_, *others) = two_processes(fit, tmp_path, True)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    assert number == num_passes
    assert [epoch for epoch, _ in values] == [0, 1]
    assert others == [number, values, path]
    assert torch.load(path, weights_only=True)["state_dict"].keys() == expected.keys()


def as_if_sharded(path, *callbacks, **kwargs):
    """A Trainer with one process, for which the parameters count as sharded."""
    trainer = make_trainer(path, *callbacks, **kwargs)
    trainer.strategy.__class__ = type("FSDPStrategy", (type(trainer.strategy),), {})
    return trainer


def warning_of(**kwargs):
    trainer = SimpleNamespace(strategy=FSDPStrategy.__new__(FSDPStrategy))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_sharding(trainer, RobustnessMonitor(**kwargs).settings)
    return [str(warning.message) for warning in caught]


def test_one_warning_says_what_is_left_out():
    for options in ({}, {"attacks": ()}, {"attacks": (), "fim_samples": 0, "forward_fn": lambda module, x: module(x)}):
        (message,) = warning_of(**options)
        for part in ("`final_attack`", "Fisher information", "`forward_fn`", "strategy='ddp'"):
            assert part in message
    assert warning_of(attacks=(), fim_samples=0) == []


@pytest.mark.filterwarnings("ignore:RobustnessMonitor. FSDPStrategy shards")
def test_nothing_waits_for_what_is_left_out(tmp_path):
    monitor = RobustnessMonitor(final_attack="cascade", log_figures=False)
    trainer = as_if_sharded(tmp_path, monitor, max_epochs=2)
    trainer.fit(trained(), train_loader(), val_loader())
    assert set(monitor.history[-1]) - {"epoch", "step", "seconds/features", "seconds/figures"} == set(FEATURES)
    assert monitor.late_keys == set()
    assert "robustness/adv_acc/worst" in monitor.keys
    assert "robustness/adv_acc/worst" not in monitor.keys_under(trainer)
    for waiting in (RobustEarlyStopping, RobustModelCheckpoint):
        callbacks = waiting("robustness/adv_acc/worst"), RobustnessMonitor()
        with pytest.raises(MisconfigurationException, match="FSDPStrategy shards"):
            as_if_sharded(tmp_path, *callbacks, enable_checkpointing=True).fit(
                Classifier(), train_loader(), val_loader()
            )


class Prepares(Classifier):
    """Its step runs the network on other inputs than those of the batch."""

    def validation_step(self, batch, batch_idx):
        self((batch[0] - 0.5) / 0.25)


class GoesOn(Classifier):
    """Its forward returns an embedding."""

    def __init__(self):
        super().__init__(num_classes=16)
        self.last = nn.Linear(16, 10)

    def validation_step(self, batch, batch_idx):
        self.last(self(batch[0]))


class Compiled(Classifier):
    """Its network is compiled."""

    def __init__(self):
        super().__init__()
        self.net = torch.compile(self.net, backend="eager")


@pytest.mark.filterwarnings("ignore:RobustnessMonitor. FSDPStrategy shards")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Prepares, "Expected `validation_step` to run the network on the unchanged inputs of its batch but it did"),
        (GoesOn, "also runs 'last', a layer that `forward` does not run, which takes 16 features"),
        (Compiled, "Expected a network that is not compiled but got one with `torch.compile`"),
        (lambda: Classifier(num_classes=5), "5 classes"),
    ],
)
def test_what_hooks_cannot_see_is_refused(tmp_path, kind, message):
    module = kind()
    with pytest.raises(MisconfigurationException, match=message):
        as_if_sharded(tmp_path, RobustnessMonitor()).fit(module, train_loader(), val_loader())
    assert count_hooks(module) == 0


@pytest.mark.filterwarnings("ignore:RobustnessMonitor. FSDPStrategy shards")
def test_a_later_batch_that_hooks_do_not_see_is_left_out(tmp_path):
    class Moody(Classifier):
        def validation_step(self, batch, batch_idx):
            self(batch[0] if self.trainer.sanity_checking else 1 - batch[0])

    monitor = RobustnessMonitor(log_figures=False)
    with pytest.warns(UserWarning, match=r"epoch 0 .*`validation_step` to run"):
        as_if_sharded(tmp_path, monitor).fit(Moody(), train_loader(), val_loader())
    assert monitor.history == []
