"""Which evaluations count towards patience, for the learning rate schedules people use."""

import lightning as L
import pytest
import torch
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from lightning_robustness import RobustEarlyStopping
from tests.callbacks.modules import make_trainer

NUM_BATCHES = 4


class Flat(L.LightningModule):
    """Logs the same value in each epoch, so that patience alone decides."""

    def __init__(self, make=None, values=None, manual=False, rates=(1.0,)):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1)) for _ in rates])
        self.make, self.values, self.rates = make, values or {}, rates
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        loss = sum(weight.sum() for weight in self.weights)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        self.optimizers().step()
        if batch_idx == NUM_BATCHES - 1:
            self.lr_schedulers().step()
        return None

    def validation_step(self, batch, batch_idx):
        self.log("robustness/adv_acc/pgd", self.values.get(self.current_epoch, 0.5))

    def configure_optimizers(self):
        groups = [{"params": [weight], "lr": rate} for weight, rate in zip(self.weights, self.rates, strict=True)]
        optimizer = SGD(groups, lr=1.0)
        return optimizer if self.make is None else self.make(optimizer)


def scheduled(make, **options):
    return lambda optimizer: {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **options}}


def last_epoch(tmp_path, module, max_epochs=40, ckpt_path=None, callbacks=(), **options):
    stopping = RobustEarlyStopping("robustness/adv_acc/pgd", patience=3, **options)
    loader = DataLoader(TensorDataset(torch.zeros(NUM_BATCHES, 1)))
    settings = {"max_epochs": max_epochs, "enable_checkpointing": bool(callbacks), "num_sanity_val_steps": 0}
    trainer = make_trainer(tmp_path, stopping, *callbacks, **settings)
    trainer.fit(module, loader, loader, ckpt_path=ckpt_path)
    return trainer.current_epoch - 1, stopping


# By name: the schedule, and the epoch in which a flat run with patience 3 stops. The first evaluation that counts, and
# each that restarts the count, is one of the three
CASES = {
    "none": (None, 3),
    "step": (scheduled(lambda o: lr_scheduler.StepLR(o, 10, gamma=0.1)), 12),
    "multi-step": (scheduled(lambda o: lr_scheduler.MultiStepLR(o, [5, 7], gamma=0.1)), 9),
    "cosine": (scheduled(lambda o: lr_scheduler.CosineAnnealingLR(o, 40)), 22),
    "exponential .95": (scheduled(lambda o: lr_scheduler.ExponentialLR(o, 0.95)), 16),
    "exponential .9": (scheduled(lambda o: lr_scheduler.ExponentialLR(o, 0.9)), 9),
    "warm-up, then constant": (scheduled(lambda o: lr_scheduler.LinearLR(o, 0.01, total_iters=5)), 32),
    "rises for ever": (scheduled(lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1.0 + epoch)), 32),
}


@pytest.mark.parametrize("name", CASES)
def test_flat_runs_stop_once_the_rate_has_come_down(tmp_path, name):
    make, expected = CASES[name]
    assert last_epoch(tmp_path, Flat(make))[0] == expected


def test_one_cycle_by_step_counts_after_its_peak(tmp_path):
    total = 40 * NUM_BATCHES
    make = scheduled(lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=total, pct_start=0.25), interval="step")
    stopped, _ = last_epoch(tmp_path, Flat(make))
    # after the peak in epoch 10 the rate is a cosine from 1 to 0 over 30 epochs, at a half in epoch 25; it starts at
    # 1/25 of the peak, but no peak so far is higher there
    assert 25 <= stopped <= 28


@pytest.mark.parametrize("period", [4, 10])
def test_cycles_neither_disable_the_stop_nor_trigger_it_at_once(tmp_path, period):
    make = scheduled(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, period))
    stopped, _ = last_epoch(tmp_path, Flat(make))
    assert period // 2 < stopped < 30


def test_the_slowest_of_two_groups_decides_by_its_own_peak(tmp_path):
    make = scheduled(
        lambda o: lr_scheduler.LambdaLR(o, [lambda e: 1.0 if e < 2 else 0.1, lambda e: 1.0 if e < 9 else 0.1])
    )
    assert last_epoch(tmp_path, Flat(make, rates=(1.0, 1e-3)))[0] == 11
    make = scheduled(lambda o: lr_scheduler.LambdaLR(o, [lambda e: 1.0 if e < 2 else 0.1, lambda e: 1.0]))
    assert last_epoch(tmp_path, Flat(make, rates=(1.0, 0.0)))[0] == 4  # a frozen group has no say


def test_plateau_and_manual_optimization(tmp_path):
    def plateau(optimizer):
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "robustness/adv_acc/pgd"}}

    stopped, _ = last_epoch(tmp_path, Flat(plateau))
    assert 6 <= stopped <= 10
    manual = Flat(scheduled(lambda o: lr_scheduler.StepLR(o, 10, gamma=0.1)), manual=True)
    assert last_epoch(tmp_path, manual)[0] == 12


def test_without_a_limit_of_the_run_nothing_waits(tmp_path):
    make = scheduled(lambda o: lr_scheduler.StepLR(o, 10, gamma=0.1))
    assert last_epoch(tmp_path, Flat(make), max_epochs=-1)[0] == 3


def test_the_first_epoch_that_counts_can_be_given(tmp_path):
    make = scheduled(lambda o: lr_scheduler.StepLR(o, 10, gamma=0.1))
    assert last_epoch(tmp_path, Flat(make), start_from_epoch=0)[0] == 3
    assert last_epoch(tmp_path, Flat(make), start_from_epoch=20)[0] == 22
    with pytest.raises(ValueError, match="start_from_epoch"):
        RobustEarlyStopping("robustness/adv_acc/pgd", start_from_epoch=-1)


def test_an_evaluation_before_that_sets_the_score_but_no_count(tmp_path):
    make = scheduled(lambda o: lr_scheduler.StepLR(o, 10, gamma=0.1))
    stopped, stopping = last_epoch(tmp_path, Flat(make, values={5: 0.9, 11: 0.8}))
    assert stopped == 12
    assert stopping.best_score == pytest.approx(0.9)


def test_a_resumed_run_stops_where_it_would_have(tmp_path):
    make = scheduled(lambda o: lr_scheduler.MultiStepLR(o, [5, 7], gamma=0.1))
    saved = L.pytorch.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    whole, _ = last_epoch(tmp_path, Flat(make), callbacks=[saved])
    for epoch in (2, 6, 8):
        assert last_epoch(tmp_path, Flat(make), ckpt_path=tmp_path / f"epoch={epoch}.ckpt")[0] == whole


def test_waiting_is_seen(tmp_path, caplog):
    make = scheduled(lambda o: lr_scheduler.StepLR(o, 10, gamma=0.1))
    _, stopping = last_epoch(tmp_path, Flat(make))
    waiting = [record.message for record in caplog.records if "patience waits" in record.message]
    assert len(waiting) == 1
    assert "learning rate (1.0 of its peak)" in waiting[0]
    assert "75% of the run" in waiting[0]
    assert (stopping.waiting, stopping.waited) == ("", "patience waited for the learning rate until epoch 10")
    assert last_epoch(tmp_path, Flat())[1].waited == ""


class Bar(L.Callback):
    """Remembers what a progress bar would show during each epoch."""

    def __init__(self):
        self.shown = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.shown.append(trainer.progress_bar_metrics.get("patience waits for"))


@pytest.mark.parametrize(
    ("options", "first", "text"), [({}, 10, "learning rate"), ({"start_from_epoch": 4}, 4, "epoch 4")]
)
def test_waiting_is_on_the_progress_bar_while_it_lasts(tmp_path, options, first, text):
    make, bar = scheduled(lambda o: lr_scheduler.StepLR(o, 10, gamma=0.1)), Bar()
    last_epoch(tmp_path, Flat(make), callbacks=[bar], **options)
    assert bar.shown == [None, *[text] * first, *[None] * (len(bar.shown) - first - 1)]


class Both(Flat):
    """Logs an attack-free value in each epoch, and robust accuracy in every third."""

    def __init__(self, make, offset):
        super().__init__(make)
        self.offset = offset

    def validation_step(self, batch, batch_idx):
        self.log("robustness/rdi", 0.5)
        if self.current_epoch % 3 == self.offset:
            super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_a_fall_of_the_rate_restarts_the_count_of_a_value_that_comes_later(tmp_path, offset):
    make = scheduled(lambda o: lr_scheduler.MultiStepLR(o, [4, 12], gamma=0.1))
    stopping = RobustEarlyStopping("robustness/rdi", patience=4, guard=None, confirm="robustness/adv_acc/pgd")
    trainer = make_trainer(tmp_path, stopping, max_epochs=40, num_sanity_val_steps=0)
    loader = DataLoader(TensorDataset(torch.zeros(NUM_BATCHES, 1)))
    trainer.fit(Both(make, offset), loader, loader)
    assert trainer.current_epoch - 1 == 21 + offset  # the fourth evaluation of robust accuracy since epoch 12
