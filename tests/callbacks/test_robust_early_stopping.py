import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_robustness import RobustEarlyStopping, RobustnessMonitor
from tests.callbacks.modules import Classifier, make_trainer, train_loader, val_loader


class Scripted(L.Callback):
    """Logs a value in some epochs only."""

    def __init__(self, values):
        self.values = values

    def on_validation_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch in self.values:
            pl_module.log("score", self.values[trainer.current_epoch])


def epochs_trained(tmp_path, stopping, values, max_epochs=20, **kwargs):
    trainer = make_trainer(tmp_path, Scripted(values), stopping, max_epochs=max_epochs, **kwargs)
    trainer.fit(Classifier(), train_loader(size=32), val_loader(size=16))
    return trainer.current_epoch


def test_counts_evaluations_where_lightning_counts_epochs(tmp_path):
    improving = {epoch: float(epoch) for epoch in range(0, 20, 5)}
    assert epochs_trained(tmp_path, EarlyStopping("score", mode="max", patience=3), improving) == 4
    assert epochs_trained(tmp_path, RobustEarlyStopping("score", mode="max", patience=3), improving) == 20


def test_stops_after_patience_evaluations_without_improvement(tmp_path):
    values = {0: 1.0, 2: 3.0, 4: 2.0, 6: 2.5, 8: 9.0}
    stopping = RobustEarlyStopping("score", mode="max", patience=2)
    assert epochs_trained(tmp_path, stopping, values) == 7  # the second evaluation that is not better is in epoch 6
    assert stopping.stopped_epoch == 6
    assert stopping.best_score == 3.0


def test_validation_in_mid_epoch_and_rarely(tmp_path):
    stopping = RobustEarlyStopping("score", mode="max", patience=2)
    values = {epoch: -float(epoch) for epoch in range(20)}
    assert epochs_trained(tmp_path, stopping, values, check_val_every_n_epoch=3) == 9  # epochs 2, 5 and 8


def test_values_that_are_not_finite_neither_stop_nor_count(tmp_path):
    nan, inf = float("nan"), float("inf")
    values = {0: 1.0, 1: nan, 2: inf, 3: 2.0, 4: nan, 5: 1.0, 6: nan, 7: 1.0}
    assert epochs_trained(tmp_path, EarlyStopping("score", mode="max"), values) == 2
    stopping = RobustEarlyStopping("score", mode="max", patience=2)
    assert epochs_trained(tmp_path, stopping, values) == 8
    assert stopping.best_score == 2.0


def test_thresholds(tmp_path):
    values = {0: 0.9, 3: 0.5, 6: 0.1}
    assert epochs_trained(tmp_path, RobustEarlyStopping("score", stopping_threshold=0.6), values) == 4
    assert epochs_trained(tmp_path, RobustEarlyStopping("score", mode="max", divergence_threshold=0.2), values) == 7


def test_resumes(tmp_path):
    stopping = RobustEarlyStopping("score", mode="max", patience=3)
    epochs_trained(tmp_path, stopping, {0: 2.0, 1: 1.0}, max_epochs=3)
    other = RobustEarlyStopping("score", mode="max", patience=3)
    other.load_state_dict(stopping.state_dict())
    assert other.wait_count == 1
    assert other.best_score == 2.0
    assert other.state_key == stopping.state_key


def test_unknown_keys_are_found_in_setup(tmp_path):
    monitor = RobustnessMonitor(attacks=["pgd"])
    trainer = make_trainer(tmp_path, monitor, RobustEarlyStopping("robustness/asr/pdg"))
    with pytest.raises(MisconfigurationException, match=r"will be: robustness/rdi, .*robustness/asr/pgd, .*asr/worst"):
        trainer.fit(Classifier(), train_loader(), val_loader())


def test_a_prefix_that_no_monitor_has_is_found_in_setup(tmp_path):
    trainer = make_trainer(tmp_path, RobustnessMonitor(attacks=()), RobustEarlyStopping("robustnes/rdi"))
    with pytest.raises(MisconfigurationException, match="waits for 'robustnes/rdi', which will not be logged"):
        trainer.fit(Classifier(), train_loader(), val_loader())


def test_keys_of_the_module_and_of_nested_prefixes_are_let_through(tmp_path):
    monitors = [RobustnessMonitor(attacks=(), prefix=prefix) for prefix in ("r", "r/b")]
    for key in ("val_acc", "val/acc", "r/b/rdi"):
        stopping = RobustEarlyStopping(key)
        stopping.setup(make_trainer(tmp_path, *monitors, stopping), Classifier(), "fit")


def test_a_key_that_never_comes_gets_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="RobustEarlyStopping never saw 'score'. Logged were: val_acc"):
        assert epochs_trained(tmp_path, RobustEarlyStopping("score"), {}, max_epochs=2) == 2


def test_with_the_monitor(tmp_path):
    monitor = RobustnessMonitor(attacks=["fgsm"], attack_every_n_epochs=2, attack_samples=16, fim_samples=0)
    stopping = RobustEarlyStopping("robustness/asr/fgsm", stopping_threshold=2.0, patience=1)
    trainer = make_trainer(tmp_path, monitor, stopping, max_epochs=5)
    trainer.fit(Classifier(), train_loader(), val_loader())
    assert trainer.current_epoch == 1
    assert torch.isclose(trainer.callback_metrics["robustness/asr/fgsm"], torch.tensor(monitor.history[0]["asr/fgsm"]))
