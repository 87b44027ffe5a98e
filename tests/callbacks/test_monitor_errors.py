"""What the monitor does about faults, and about mistakes in how it is used."""

import warnings

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_robustness import is_sandboxed
from lightning_robustness._lightning import record, run
from lightning_robustness._lightning import trainer as trainer_module
from lightning_robustness._lightning.trainer import takes_any_key
from tests.callbacks.modules import Classifier, digits_data, make_trainer, train_loader, val_loader
from tests.callbacks.monitors import count_hooks, fit, logged, small_monitor, validated


class Diverging(Classifier):
    def on_validation_start(self):
        if self.trainer.current_epoch == 1:
            self.kept = self.net[9].bias.detach().clone()
            self.net[9].bias.data.fill_(torch.nan)

    def on_validation_end(self):
        if self.trainer.current_epoch == 1:
            self.net[9].bias.data.copy_(self.kept)


def test_epochs_with_nan_are_marked_and_left_out(tmp_path):
    logger, monitor = CSVLogger(tmp_path), small_monitor(attack_every_n_epochs=1)
    with pytest.warns(UserWarning, match="left epoch 1 out: .* some samples are NaN"):
        fit(tmp_path, monitor, max_epochs=3, logger=logger, module=Diverging())
    assert [entry["epoch"] for entry in monitor.history] == [0, 2]
    rows = np.genfromtxt(f"{logger.log_dir}/metrics.csv", delimiter=",", names=True, deletechars="")
    skipped = rows["robustness_details/skipped"]
    assert skipped[np.isfinite(skipped)].tolist() == [0, 1, 0]
    assert np.isfinite(rows["robustness/rdi"]).sum() == 2


class Fails:
    """A part of the monitor that goes well a few times and then fails."""

    def __init__(self, function, number):
        self.function, self.number = function, number

    def __call__(self, *args, **kwargs):
        self.number -= 1
        if self.number < 0:
            raise ZeroDivisionError("ours")
        return self.function(*args, **kwargs)


# Where a part is used, how often it goes well, and what is left out when it no longer does
PARTS = {
    "conclusions": (run, "conclude", 1, "left epoch 1 out"),
    "conclusions at the end": (run, "conclude", 3, "left epoch 2 out"),
    "classes": (run, "warn_of_classes", 1, "left epoch 1 out"),
    "trust": (record, "measure_trust", 1, "trust and the picture of the run are left out"),
    "kept epoch": (record, "kept_epoch", 1, "trust and the picture of the run are left out"),
    "summary": (record, "find_notes", 0, "the summary of the run is left out"),
    "attacks at the end": (run.Run, "attack_at_the_end", 0, "attacks at the end of training are left out"),
}


@pytest.mark.filterwarnings("ignore:.*the summary of the run is left out")
@pytest.mark.parametrize("name", PARTS)
def test_no_error_of_the_monitor_ends_training(tmp_path, monkeypatch, name):
    owner, function, number, consequence = PARTS[name]
    broken = Fails(getattr(owner, function), number)
    monkeypatch.setattr(owner, function, broken)
    monitor = small_monitor(attack_every_n_epochs=2, final_attack="fgsm")
    with pytest.warns(UserWarning, match=f"{consequence}: ZeroDivisionError: ours"):
        trainer = fit(tmp_path, monitor, max_epochs=3)
    assert broken.number < 0
    assert trainer.global_step == 30
    assert torch.isfinite(trainer.callback_metrics["val_acc"])


class Averaged(L.Callback):
    """Other weights during validation, as a user's own averaging has them."""

    def on_validation_epoch_start(self, trainer, pl_module):
        self.scale = 1.0 if trainer.sanity_checking else 0.5
        pl_module.net[-1].weight.data.mul_(self.scale)

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.net[-1].weight.data.div_(self.scale)


class NormalizesInPlace(Classifier):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self(batch[0].sub_(0.3).div_(0.2))


class Smoothed(Classifier):
    def forward(self, x):
        return self.net(x + 0.3 * torch.rand_like(x))


def count_sample_warnings(path, *callbacks, **options):
    """Train, and count the warnings of a sample that has other outputs than in validation."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        fit(path, *callbacks, **options)
    return sum("outputs that validation computed" in str(warning.message) for warning in record)


def test_weights_that_are_swapped_out_before_the_monitor_measures(tmp_path):
    assert count_sample_warnings(tmp_path, Averaged(), small_monitor(), max_epochs=2) == 1
    assert count_sample_warnings(tmp_path, small_monitor(), Averaged(), max_epochs=2) == 0


def test_inputs_that_validation_changes_in_place_are_refused_or_prepared_alike(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"in place.*forward_fn=") as caught:
        fit(tmp_path, small_monitor(), module=NormalizesInPlace())
    assert "Likely causes" not in str(caught.value)
    monitor = small_monitor(forward_fn=lambda module, x: module((x - 0.3) / 0.2))
    assert count_sample_warnings(tmp_path, monitor, module=NormalizesInPlace()) == 0


class MaskedInPlace(NormalizesInPlace):
    """Has a class that is not available."""

    def forward(self, x):
        return super().forward(x).masked_fill(torch.arange(10) == 9, -1e4)


def test_a_masked_class_does_not_hide_other_inputs(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"in place.*forward_fn="):
        fit(tmp_path, small_monitor(), module=MaskedInPlace())


def test_a_random_network_cannot_be_compared(tmp_path):
    assert count_sample_warnings(tmp_path, small_monitor(), module=Smoothed()) == 0


class Autocast(Classifier):
    """Computes in lower precision, by itself or with other weights, while the Trainer's is single."""

    scale = 1.0

    def validation_step(self, *args):
        self.net[-1].weight.data.mul_(self.scale)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            super().validation_step(*args)
        self.net[-1].weight.data.div_(self.scale)


def test_the_precision_of_validation_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_module, "_EXACT", 1e-6)  # which bf16 does not reach
    assert count_sample_warnings(tmp_path, small_monitor(), module=Autocast(), max_epochs=1) == 0
    module = Autocast()
    module.scale = 0.5
    with pytest.raises(MisconfigurationException, match=r"`precision`.*hidden state"):
        fit(tmp_path, small_monitor(), module=module)


@pytest.mark.filterwarnings("ignore:Zeros has no last layer")
@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_networks_that_make_tensors_have_them_in_the_precision_of_the_run(tmp_path, precision):
    class Zeros(Classifier):
        def forward(self, x):
            return super().forward(x) + torch.zeros(len(x), 32) @ self.net[9].weight.T

    trainer = fit(tmp_path, small_monitor(), precision=precision, module=Zeros())
    assert {"rdi", "fim", "asr/fgsm"} <= logged(trainer).keys()


class PickyLogger(CSVLogger):
    """Rejects one of our keys from the second evaluation on."""

    def log_metrics(self, metrics, step=None):
        if "robustness/rdi" in metrics and step > 10:
            raise ValueError("no such key")
        super().log_metrics(metrics, step)


def test_a_logger_that_rejects_a_key_in_mid_run_does_not_end_it(tmp_path):
    monitor, logger = small_monitor(), PickyLogger(tmp_path)
    with pytest.warns(UserWarning, match="values could not be logged by PickyLogger: ValueError: no such key"):
        trainer = fit(tmp_path, monitor, max_epochs=3, logger=logger)
    assert trainer.global_step == 30
    assert len(monitor.history) == 3
    rows = np.genfromtxt(f"{logger.log_dir}/metrics.csv", delimiter=",", names=True, deletechars="")
    assert np.isfinite(rows["robustness/rdi"]).sum() == 1
    assert np.isfinite(rows["val_acc"]).sum() == 3


class StrictLogger(CSVLogger):
    """Rejects two of our keys, one at a time, and says which."""

    def log_metrics(self, metrics, step=None):
        for key in ("robustness/rdi", "robustness/roby"):
            if key in metrics:
                raise ValueError(f"no such key: {key}")
        super().log_metrics(metrics, step)


def test_a_logger_that_names_the_keys_that_it_rejects_gets_the_others(tmp_path):
    logger = StrictLogger(tmp_path)
    with pytest.warns(UserWarning, match="some values could not be logged by StrictLogger: .*: robustness/r"):
        trainer = fit(tmp_path, small_monitor(), max_epochs=2, logger=logger)
    rows = np.genfromtxt(f"{logger.log_dir}/metrics.csv", delimiter=",", names=True, deletechars="")
    for key in ("robustness/acc", "robustness/adv_acc/fgsm"):
        values = rows[key][np.isfinite(rows[key])]
        assert len(values) == 2
        assert values[-1] == pytest.approx(trainer.callback_metrics[key].item())
    assert not {"robustness/rdi", "robustness/roby"} & set(rows.dtype.names)


@pytest.mark.parametrize(("kind", "expected"), [(CSVLogger, True), (TensorBoardLogger, True), (PickyLogger, False)])
def test_loggers_of_lightning_itself_get_values_from_the_module(tmp_path, kind, expected):
    assert takes_any_key(make_trainer(tmp_path, logger=kind(tmp_path))) is expected


def test_test_time_augmentation_gets_one_warning(tmp_path):
    class Augmenting(Classifier):
        def validation_step(self, batch, batch_idx):
            x, y = batch
            both = self(x).softmax(1) + self(x.flip(-1)).softmax(1)
            self.log("val_acc", (both.argmax(dim=1) == y).float().mean())

    with pytest.warns(UserWarning, match="test-time augmentation") as record:
        fit(tmp_path, small_monitor(), max_epochs=2, module=Augmenting())
    assert sum("test-time augmentation" in str(warning.message) for warning in record) == 1


@pytest.mark.parametrize(("step", "run_step"), [("validation_step", "fit"), ("test_step", "test")])
def test_a_step_that_fetches_its_batches_is_refused(tmp_path, step, run_step):
    module = type("Fetching", (Classifier,), {step: lambda self, dataloader_iter: None})()
    trainer = make_trainer(tmp_path, small_monitor())
    loaders = (train_loader(), val_loader()) if run_step == "fit" else (val_loader(),)
    with pytest.raises(MisconfigurationException, match=f"`{step}` to take a batch .*`dataloader_iter`.* take `batch`"):
        getattr(trainer, run_step)(module, *loaders)


def test_sorted_data_of_which_a_limit_leaves_few_classes_gets_a_warning(tmp_path):
    x, y = digits_data(1200, 1400).tensors
    order = y.argsort()
    loader = DataLoader(TensorDataset(x[order], y[order]), batch_size=20)
    number = len(y[order][:40].unique())
    with pytest.warns(UserWarning, match=rf"samples of {number} of 10 classes.*`limit_val_batches`") as record:
        fit(tmp_path, small_monitor(attacks=(), fim_samples=0), loader=loader, max_epochs=2, limit_val_batches=2)
    assert sum("of 10 classes" in str(warning.message) for warning in record) == 1


def test_a_share_of_a_single_process_gets_a_warning(tmp_path):
    data = digits_data(1200, 1300)
    loader = DataLoader(data, batch_size=20, sampler=DistributedSampler(data, num_replicas=3, rank=2))
    with pytest.warns(UserWarning, match="among 3 processes but there is only one, so all values are of one share"):
        values = validated(tmp_path, Classifier(), small_monitor(attack_samples=30), loader)
    assert (values["samples"], values["samples_attacks"]) == (34, 30)


class LogsAccuracy(Classifier):
    def validation_step(self, batch, batch_idx):
        self(batch[0])
        self.log("val/acc", 0.5)


class LogsAccuracyAtTheEnd(Classifier):
    def on_validation_epoch_end(self):
        self.log("val/acc", 0.5)


@pytest.mark.parametrize("kind", [LogsAccuracy, LogsAccuracyAtTheEnd])
def test_keys_of_the_module_are_not_overwritten(tmp_path, kind):
    with pytest.raises(MisconfigurationException, match=r"alone in logging val/acc .* another `prefix` than 'val'"):
        trainer = fit(tmp_path, small_monitor(prefix="val"), module=kind())
    trainer = fit(tmp_path, small_monitor(prefix="val_robustness"), module=kind())
    assert trainer.callback_metrics["val/acc"] == 0.5


def test_keys_of_the_module_are_left_to_it_where_there_was_no_sanity_check(tmp_path):
    with pytest.warns(UserWarning, match=r"alone in logging val/acc .* Ours is left out\."):
        trainer = fit(tmp_path, small_monitor(prefix="val"), num_sanity_val_steps=0, module=LogsAccuracy())
    assert trainer.callback_metrics["val/acc"] == 0.5
    assert "val/rdi" in trainer.callback_metrics


def test_masked_gradients_are_a_key_and_a_warning_once(tmp_path):
    class Quantised(Classifier):
        def forward(self, x):
            return self.net(x) if self.training else self.net((8 * x).round() / 8)

    monitor = small_monitor(attacks=("pgd", "square"), eps=0.2, attack_samples=101, attack_every_n_epochs=1)
    with pytest.warns(UserWarning, match="gradients seem to be masked") as record:
        fit(tmp_path, monitor, max_epochs=2, module=Quantised())
    assert [entry["masking"] for entry in monitor.history] == [1, 1]
    assert sum("masked" in str(warning.message) for warning in record) == 1


class Silent(Classifier):
    forward = L.LightningModule.forward

    def validation_step(self, batch, batch_idx):
        self.net(batch[0])


def unlabelled():
    return DataLoader(TensorDataset(digits_data(1200, 1260).tensors[0]), batch_size=20)


def normalized():
    x, y = digits_data(1200, 1260).tensors
    return DataLoader(TensorDataset((x - 0.5) / 0.25, y), batch_size=20)


class Undifferentiable(Classifier):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "loader", "kwargs", "message"),
    [
        (Silent, val_loader, {}, r"`Silent\(x\)` to return logits .*\(3, 1, 8, 8\) but it failed.*forward_fn"),
        (Silent, unlabelled, {}, "Expected batches with labels, for attacks, but got none.*`attacks=\\(\\)`"),
        (Classifier, normalized, {}, r"range \[0.0, 1.0\] but observed \[-2, 2\].*InputSpace\(mean"),
        (Classifier, val_loader, {"num_classes": 7}, "Expected 7 classes, as `num_classes`.*the model has 10"),
        (Classifier, val_loader, {"dataloader_idx": 3}, "`dataloader_idx` to be below 1, .* but got 3"),
        (Classifier, val_loader, {"head": "net.6"}, "'net.6' is not, because the logits come from 'net.9'"),
        (Classifier, val_loader, {"attacks": [lambda x: x]}, "takes 1 positional argument but 3 were given"),
        (Undifferentiable, val_loader, {}, "Fisher information cannot be computed.*`fim_samples=0`.*blackbox"),
    ],
)
def test_misconfiguration_is_found_on_the_sanity_check(tmp_path, kind, loader, kwargs, message):
    class Untrained(L.Callback):
        def on_train_batch_start(self, *args):
            pytest.fail("training began")

    module = kind()
    with pytest.raises(MisconfigurationException, match=f"(?s)RobustnessMonitor: .*{message}"):
        fit(tmp_path, Untrained(), small_monitor(**kwargs), module=module, loader=loader())
    assert count_hooks(module) == 0


def test_no_validation_loop(tmp_path):
    with pytest.raises(MisconfigurationException, match="watches validation, but there is none"):
        make_trainer(tmp_path, small_monitor()).fit(Classifier(), train_loader())
    with (
        pytest.warns(UserWarning, match="nothing to watch, since `limit_val_batches` is 0"),
        pytest.warns(UserWarning, match="there was no validation epoch to watch"),
    ):
        fit(tmp_path, small_monitor(), limit_val_batches=0)


class Counts(Classifier):
    number = 0

    def forward(self, x):
        Counts.number += 1
        return super().forward(x)


class CountsItsOwn(Counts):
    def forward(self, x):
        if is_sandboxed():
            return self.net(x)
        return super().forward(x)


@pytest.mark.parametrize("steps", [0, 2])
def test_passes_that_change_what_cannot_be_put_back(tmp_path, steps):
    with pytest.warns(UserWarning, match=r"passes change .*number.*changes training.*is_sandboxed\(\)"):
        fit(tmp_path, small_monitor(), module=Counts(), num_sanity_val_steps=steps)
    fit(tmp_path, small_monitor(), module=CountsItsOwn(), num_sanity_val_steps=steps)
