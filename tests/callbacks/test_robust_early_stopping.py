import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_robustness import RobustEarlyStopping, RobustnessMonitor
from tests.callbacks.distributed_fit import as_torchrun_would
from tests.callbacks.modules import Classifier, Scripted, make_trainer, train_loader, val_loader


def epochs_trained(tmp_path, stopping, score, max_epochs=20, ckpt_path=None, callbacks=(), **kwargs):
    """Train while a score, and a clean accuracy where one is given, are logged."""
    logged = {"robustness/acc" if "/" in stopping.monitor else "acc": kwargs.pop("acc")} if "acc" in kwargs else {}
    callbacks = [Scripted(**{stopping.monitor: score}, **logged), stopping, *callbacks]
    trainer = make_trainer(tmp_path, *callbacks, max_epochs=max_epochs, **kwargs)
    trainer.fit(Classifier(), train_loader(size=32), val_loader(size=16), ckpt_path=ckpt_path)
    return trainer.current_epoch


def unguarded(**kwargs):
    return RobustEarlyStopping("score", guard=None, **{"mode": "max", "start_from_epoch": 0, **kwargs})


def guarded(**kwargs):
    return RobustEarlyStopping("score", mode="max", guard="acc", **{"start_from_epoch": 0, **kwargs})


def test_counts_evaluations_where_lightning_counts_epochs(tmp_path):
    improving = {epoch: float(epoch) for epoch in range(0, 20, 5)}
    assert epochs_trained(tmp_path, EarlyStopping("score", mode="max", patience=3), improving) == 4
    assert epochs_trained(tmp_path, unguarded(patience=3), improving) == 20


def test_stops_after_patience_evaluations_without_improvement(tmp_path):
    values = {0: 1.0, 2: 3.0, 4: 2.0, 6: 2.5, 8: 9.0}
    stopping = unguarded(patience=2)
    assert epochs_trained(tmp_path, stopping, values) == 7  # the second evaluation that is not better is in epoch 6
    assert (stopping.stopped_epoch, stopping.best_score) == (6, 3.0)
    falling = {epoch: -float(epoch) for epoch in range(20)}
    assert epochs_trained(tmp_path, unguarded(patience=2), falling, check_val_every_n_epoch=3) == 9  # epochs 2, 5 and 8


def test_values_that_are_not_finite_neither_stop_nor_count(tmp_path):
    nan, inf = float("nan"), float("inf")
    values = {0: 1.0, 1: nan, 2: inf, 3: 2.0, 4: nan, 5: 1.0, 6: nan, 7: 1.0}
    assert epochs_trained(tmp_path, EarlyStopping("score", mode="max"), values) == 2
    stopping = unguarded(patience=2)
    assert epochs_trained(tmp_path, stopping, values) == 8
    assert stopping.best_score == 2.0


def test_thresholds(tmp_path):
    values = {0: 0.9, 3: 0.5, 6: 0.1}
    assert epochs_trained(tmp_path, unguarded(mode="min", stopping_threshold=0.6), values) == 4
    assert epochs_trained(tmp_path, unguarded(divergence_threshold=0.2), values) == 7


# RDI in the quickstart: best before the network has learnt anything
FALLING = [0.9, 0.5, 0.4, 0.42, 0.41, 0.4, 0.4, 0.4, 0.4, 0.4]
LEARNING = [0.3, 0.7, 0.9, 0.91, 0.91, 0.91, 0.91, 0.91, 0.91, 0.91]


@pytest.mark.parametrize(("mode", "acc"), [("max", LEARNING), ("min", [1 - value for value in LEARNING])])
def test_untrained_epochs_do_not_set_the_score_to_beat(tmp_path, mode, acc):
    assert epochs_trained(tmp_path, unguarded(patience=3), FALLING, acc=acc) == 4
    stopping = guarded(patience=3, guard_mode=mode)
    assert epochs_trained(tmp_path, stopping, FALLING, acc=acc) == 7  # epoch 3 is the best candidate
    assert stopping.best_score.item() == pytest.approx(0.42)
    assert stopping.wait_count == 3


@pytest.mark.parametrize(
    ("patience", "score", "acc", "expected"),
    [
        (3, [0.5] + [0.4] * 9, [0.900, 0.901, 0.902, 0.903, *[0.904] * 6], 8),
        (0, [0.5] + [0.4] * 9, [0.900, 0.901, 0.902, 0.903, *[0.904] * 6], 6),
        (1, {0: 0.5, 3: 0.4, 6: 0.4, 9: 0.4}, [0.90, 0.90, 0.91, *[0.90] * 7], 7),  # it improves between evaluations
    ],
)
def test_patience_starts_again_when_the_guard_improves(tmp_path, patience, score, acc, expected):
    assert epochs_trained(tmp_path, guarded(patience=patience), score, acc=acc) == expected


def test_epochs_far_below_the_best_accuracy_use_up_patience_but_are_no_candidates(tmp_path):
    score, acc = [0.5, 0.9, 0.9, 0.9], [0.9, 0.8, 0.8, 0.8]
    stopping = guarded(patience=3, stopping_threshold=0.8)
    assert epochs_trained(tmp_path, stopping, score, acc=acc) == 4
    assert stopping.best_score == 0.5
    assert epochs_trained(tmp_path, guarded(guard_tolerance=0.2, stopping_threshold=0.8), score, acc=acc) == 2


def test_an_epoch_that_is_no_candidate_may_diverge(tmp_path):
    stopping = guarded(patience=5, divergence_threshold=0.1)
    assert epochs_trained(tmp_path, stopping, [0.5, 0.01, 0.01], acc=[0.9, 0.1, 0.1]) == 2


def test_robust_overfitting_is_stopped_although_clean_accuracy_rises(tmp_path):
    robust, acc = [0.3, 0.4, 0.5] + [0.4] * 9, [0.8 + 0.01 * epoch for epoch in range(12)]
    stopping = RobustEarlyStopping("robustness/adv_acc/pgd", patience=3)
    assert epochs_trained(tmp_path, stopping, robust, max_epochs=12, acc=acc) == 6
    assert stopping.best_score == 0.5
    for guard in ({"guard": "robustness/acc"}, {"guard": "robustness/acc", "guard_tolerance": 0.1}):
        restarted = RobustEarlyStopping("robustness/adv_acc/pgd", patience=3, **guard)
        assert epochs_trained(tmp_path, restarted, robust, max_epochs=12, acc=acc) == 12


@pytest.mark.parametrize("resumed_after", [1, 2, 4])
def test_a_resumed_run_stops_where_it_would_have(tmp_path, resumed_after):
    def save():
        return ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")

    whole, checkpointed = guarded(patience=3), {"enable_checkpointing": True}
    assert epochs_trained(tmp_path, whole, FALLING, acc=LEARNING, callbacks=[save()], **checkpointed) == 7
    path, other = tmp_path / f"epoch={resumed_after}.ckpt", guarded(patience=3)
    assert epochs_trained(tmp_path, other, FALLING, acc=LEARNING, ckpt_path=path, **checkpointed) == 7
    assert other.state_key == whole.state_key
    assert other.state_dict() == whole.state_dict()


def test_another_run_of_the_same_callback_begins_anew(tmp_path):
    stopping = guarded(patience=3)
    for acc in (LEARNING, [value - 0.2 for value in LEARNING]):
        assert epochs_trained(tmp_path, stopping, FALLING, acc=acc) == 7
        assert stopping.best_score.item() == pytest.approx(0.42)
    assert len(stopping.state_dict()["evaluations"]["score"]) == 7


def test_a_resumed_run_goes_by_its_own_patience(tmp_path):
    save = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    score = [1.0] + [0.5] * 9
    assert epochs_trained(tmp_path, unguarded(patience=2), score, callbacks=[save], enable_checkpointing=True) == 3
    assert epochs_trained(tmp_path, unguarded(patience=4), score, ckpt_path=tmp_path / "epoch=1.ckpt") == 5


def test_values_of_another_guard_do_not_decide_after_a_resume(tmp_path):
    save = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    score = [0.9, 0.9, 0.5, 0.6, 0.5, 0.5]
    epochs_trained(tmp_path, guarded(), score, acc=[0.9] * 6, max_epochs=2, callbacks=[save], enable_checkpointing=True)
    other = RobustEarlyStopping("score", "max", patience=9, guard="other")
    callbacks = [Scripted(other=[0.4] * 6)]
    path = tmp_path / "epoch=1.ckpt"
    epochs_trained(tmp_path, other, score, acc=[0.9] * 6, max_epochs=6, callbacks=callbacks, ckpt_path=path)
    assert other.best_score.item() == pytest.approx(0.6)


def test_validate_and_test_change_nothing(tmp_path):
    stopping = guarded()
    trainer = make_trainer(tmp_path, Scripted(score=[1.0], acc=[0.5]), stopping)
    trainer.validate(Classifier(), val_loader(size=16), verbose=False)
    trainer.test(Classifier(), val_loader(size=16), verbose=False)
    assert stopping.state_dict() == guarded().state_dict()


def stop_as_one_of_two(rank, path):
    """Both processes stop together although their accuracies, and the finiteness of their scores, differ."""
    as_torchrun_would(rank)
    acc = [value + (0.05 if rank else -0.05) for value in LEARNING]
    score = [FALLING[0], float("nan") if rank else 5.0, *FALLING[2:]]
    stopping = guarded(patience=3)
    epochs = epochs_trained(path, stopping, score, acc=acc, strategy="ddp", devices=2)
    # Logged in one of them alone, as with `rank_zero_only=True`
    alone = guarded(patience=3)
    score, acc = ({}, LEARNING) if rank else (FALLING, {})
    kinds = {"strategy": "ddp", "devices": 2}
    others = epochs_trained(path, alone, score, acc=acc, **kinds)
    nan = epochs_trained(path, unguarded(check_finite=True), {} if rank else [0.5, float("nan"), 0.5], **kinds)
    best = [round(one.best_score.item(), 4) for one in (stopping, alone)]
    return epochs, others, nan, best, len(stopping.state_dict()["evaluations"]["score"])


def test_two_processes(tmp_path, two_processes):
    alone = guarded(patience=3)
    epochs = epochs_trained(tmp_path, alone, FALLING, acc=LEARNING)
    first, second = two_processes(stop_as_one_of_two, tmp_path)
    assert first == second == (7, epochs, 2, [0.42, pytest.approx(alone.best_score.item())], 6)


def test_the_state_of_the_plain_class(tmp_path):
    plain, robust = EarlyStopping("score", mode="max", patience=7), unguarded(patience=2)
    epochs_trained(tmp_path, plain, [0.9, 0.5], max_epochs=2)
    robust.load_state_dict(plain.state_dict())
    assert robust.state_dict() == {**robust._new, **plain.state_dict(), "patience": 2}
    assert epochs_trained(tmp_path, robust, [0.3, 0.5, 0.4, 0.4]) == 4


def test_keys_that_never_come_get_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="RobustEarlyStopping never saw 'score'. Logged were: val_acc"):
        assert epochs_trained(tmp_path, unguarded(), {}, max_epochs=2) == 2
    with pytest.warns(UserWarning, match=r"never saw a finite 'score': it was NaN .* monitor another key"):
        assert epochs_trained(tmp_path, unguarded(), [float("nan")] * 2, max_epochs=2) == 2
    with pytest.warns(UserWarning, match=r"never saw 'val_robust'. Logged were: .*robustness/rdi"):
        assert confirmed(tmp_path, DESCENDING, RISING_UNTIL_5, confirm="val_robust") == 11


@pytest.mark.parametrize(
    ("max_epochs", "start", "note"),
    [(8, 0, ["RobustEarlyStopping ended the run in epoch 2"]), (3, 0, []), (4, 2, ["patience waited until epoch 2"])],
)
def test_the_summary_tells_why_a_run_ended_or_waited(tmp_path, max_epochs, start, note):
    monitor = RobustnessMonitor([], fim_samples=0)
    stopping = unguarded(patience=2, start_from_epoch=start)
    epochs = epochs_trained(tmp_path, stopping, [0.5] * 8, max_epochs=max_epochs, callbacks=[monitor])
    assert epochs == min(max_epochs, 3 + start)
    assert monitor.summary().notes == tuple(note)


class Attacking(RobustnessMonitor):
    """Promises the keys of a monitor with attacks, and measures nothing."""

    def setup(self, trainer, pl_module, stage):
        pass


def confirmed(tmp_path, rdi, robust, *callbacks, ckpt_path=None, **options):
    stopping = RobustEarlyStopping("robustness/rdi", patience=2, guard=None, start_from_epoch=0, **options)
    scripted = Scripted(**{"robustness/rdi": rdi, "robustness/adv_acc/pgd": robust})
    trainer = make_trainer(tmp_path, scripted, *callbacks, stopping, max_epochs=12, enable_checkpointing=True)
    trainer.fit(Classifier(), train_loader(size=32), val_loader(size=16), ckpt_path=ckpt_path)
    return trainer.current_epoch - 1


DESCENDING = {epoch: -float(epoch) for epoch in range(12)}
RISING_UNTIL_5 = {epoch: float(min(epoch, 5)) for epoch in range(12)}


def test_an_attack_free_value_stops_only_with_robust_accuracy(tmp_path, caplog):
    monitor = Attacking(attacks=["pgd", "square"])
    assert confirmed(tmp_path, DESCENDING, RISING_UNTIL_5, monitor) == 7
    assert "until robustness/adv_acc/pgd has too" in caplog.text
    assert confirmed(tmp_path, RISING_UNTIL_5, DESCENDING, monitor) == 7
    assert "until robustness/rdi has too" in caplog.text


def test_robust_accuracy_counts_at_its_own_evaluations(tmp_path):
    rare = dict.fromkeys(range(0, 12, 3), 0.5)  # not better at 3 and 6
    assert confirmed(tmp_path, DESCENDING, rare, Attacking(attacks=["pgd", "square"])) == 6


def test_a_resumed_run_remembers_robust_accuracy(tmp_path):
    callbacks = Attacking(attacks=["pgd", "square"]), ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    assert confirmed(tmp_path, DESCENDING, RISING_UNTIL_5, *callbacks) == 7
    path = tmp_path / "epoch=6.ckpt"
    assert confirmed(tmp_path, DESCENDING, RISING_UNTIL_5, callbacks[0], ckpt_path=path) == 7


@pytest.mark.parametrize(("monitor", "options"), [([], {}), ([Attacking()], {"confirm": None}), ([Attacking([])], {})])
def test_a_value_without_confirmation_gets_a_warning(tmp_path, monitor, options):
    with pytest.warns(UserWarning, match=r"goes by 'robustness/rdi' alone"):
        assert confirmed(tmp_path, DESCENDING, RISING_UNTIL_5, *monitor, **options) == 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"attacks": ["pgd", "square"]}, "pgd"),
        ({"attacks": ["square", "cw"]}, "worst"),
        ({"attack_every_n_epochs": 1}, "worst"),
        ({"attacks": ["square"]}, "worst"),
        ({"attacks": ["square", "pgd"], "attack_every_n_epochs": {"square": 1, "pgd": 3}}, "square"),
    ],
)
def test_the_attack_that_runs_most_often_confirms(tmp_path, options, expected):
    monitor = RobustnessMonitor(**options)
    assert monitor.reference_under(make_trainer(tmp_path)) == f"robustness/adv_acc/{expected}"


def test_options_of_lightning(tmp_path, caplog):
    epochs_trained(tmp_path, unguarded(verbose=True), [0.5, 0.4, 0.7], max_epochs=3)
    assert [record.message for record in caplog.records if "improved" in record.message] == [
        *("score improved to 0.5.", "score improved to 0.7.")
    ]
    values = {0: 1.0, 1: float("nan")}
    assert epochs_trained(tmp_path, unguarded(check_finite=True), values) == 2
    with pytest.raises(RuntimeError, match="never saw 'score'"):
        epochs_trained(tmp_path, unguarded(strict=True), {}, max_epochs=2)


def test_a_value_of_training_is_named_as_such(tmp_path):
    stopping = RobustEarlyStopping("train_loss", mode="min")
    trainer = make_trainer(tmp_path, stopping, max_epochs=1)

    class Logs(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss)
            return loss

    with pytest.warns(UserWarning, match="logged in training"):
        trainer.fit(Logs(), train_loader(size=32), val_loader(size=16))


@pytest.mark.parametrize(
    ("monitor", "options", "message"),
    [
        ("robustness/asr/pdg", {}, r"will be: robustness/rdi, .*robustness/asr/pgd, .*asr/worst"),
        ("robustnes/rdi", {}, "waits for 'robustnes/rdi', which will not be logged"),
        ("score", {"mode": "max", "guard_tolerance": 0.1, "prefix": "r"}, "'robustness/acc', .* Pass guard='r/acc'"),
        ("robustness/rdi", {"confirm": "robustness/adv_acc/pdg"}, "waits for 'robustness/adv_acc/pdg'"),
        ("robustness/rdi", {"confirm": "robustnes/adv_acc/pgd"}, "waits for 'robustnes/adv_acc/pgd'"),
    ],
)
def test_keys_that_will_not_come_are_found_in_setup(tmp_path, monitor, options, message):
    prefix = options.pop("prefix", "robustness")
    callbacks = RobustnessMonitor(attacks=["pgd"], prefix=prefix), RobustEarlyStopping(monitor, **options)
    with pytest.raises(MisconfigurationException, match=message):
        make_trainer(tmp_path, *callbacks).fit(Classifier(), train_loader(), val_loader())
