import math
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_robustness import RobustEarlyStopping, RobustnessMonitor
from lightning_robustness._lightning.guard import (
    Guard,
    check_awaited,
    check_default_guard,
    describe_missing,
    mode_of,
    split_key,
)
from lightning_robustness._measurement.keys import tag


def trainer(batches, **logged):
    """A Trainer at the end of a validation epoch, with what was logged in it and something old."""
    metrics = {key: torch.tensor(value) for key, value in logged.items()}
    progress = SimpleNamespace(total=SimpleNamespace(ready=batches))
    return SimpleNamespace(
        callback_metrics={"old": torch.tensor(0.5), **metrics},
        _logger_connector=SimpleNamespace(metrics={"callback": metrics}),
        strategy=SimpleNamespace(reduce=lambda value, reduce_op: value, root_device=torch.device("cpu")),
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
    )


def guard_after(*values, key="acc", tolerance=0.02, mode="max"):
    guard = Guard("score", key, tolerance, mode, "Owner")
    for batches, value in enumerate(values):
        guard.observe(trainer(batches, acc=value))
    return guard


@pytest.mark.parametrize(
    ("values", "mode", "best", "admitted", "refused"),
    [
        ((0.5, 0.9, 0.7), "max", 0.9, (0.95, 0.9, 0.88), (0.87, 0.5, math.nan)),
        ((0.5, 0.9, 0.7), "min", 0.5, (0.4, 0.5, 0.52), (0.53, 0.9, math.nan)),
        ((math.nan, 0.9, math.inf), "max", 0.9, (0.88,), (0.879,)),
    ],
)
def test_epochs_close_to_the_best_are_admitted(values, mode, best, admitted, refused):
    guard = guard_after(*values, mode=mode)
    assert guard.best == pytest.approx(best)
    assert all(guard.admits(value) for value in admitted)
    assert not any(guard.admits(value) for value in refused)


def test_the_limit_itself_is_admitted_in_float32():
    for percent in range(2, 101):
        guard = guard_after(percent / 100)
        assert guard.admits(torch.tensor(percent / 100 - 0.02).item())
        assert not guard.admits(torch.tensor(percent / 100 - 0.021).item())


def test_old_values_do_not_count():
    guard = Guard("score", "old", None, "max", "Owner")
    guard.observe(trainer(1))
    assert math.isnan(guard.best)


def test_the_value_is_that_of_the_same_weights():
    guard = guard_after(0.5, 0.4)
    assert guard.value(trainer(1)) == pytest.approx(0.4)
    assert math.isnan(guard.value(trainer(2)))


@pytest.mark.parametrize(
    ("monitor", "guard", "tolerance", "key", "has_veto"),
    [
        ("robustness/adv_acc/worst", "auto", None, "robustness/acc", False),
        ("r/b/boundary_acc", "auto", None, "r/b/acc", False),
        ("r/adv_acc/pgd", "auto", 0.02, "r/acc", True),
        ("r/adv_acc/pgd", "val_acc", None, "val_acc", True),
        ("r/rdi", "auto", None, "r/acc", True),
        ("r/boundary", "auto", None, "r/acc", True),
        ("r/asr/pgd", "auto", None, "r/acc", True),
        ("r/distortion/cw", "auto", None, "r/acc", True),
        ("r/fim_inverse", "auto", None, "r/acc", True),
        ("r/rdi", None, None, "r/acc", False),
        ("r/rdi", None, 0.02, "r/acc", False),
        ("val_loss", "auto", None, "robustness/acc", False),
        ("val/loss", "auto", 0.1, "robustness/acc", True),
        ("val_loss", "val_acc", None, "val_acc", True),
    ],
)
def test_what_is_guarded(monitor, guard, tolerance, key, has_veto):
    guard = Guard(monitor, guard, tolerance, "max", "Owner")
    assert (guard.key, guard.has_veto, guard.tolerance) == (key, has_veto, 0.02 if tolerance is None else tolerance)


def test_without_a_veto_everything_is_admitted_and_nothing_improves():
    guard = Guard("x/adv_acc/pgd", "auto", None, "max", "Owner")
    guard.observe(trainer(1, **{"x/acc": 0.9}))
    assert guard.value(trainer(1)) == pytest.approx(0.9)
    assert math.isnan(guard.value(trainer(2)))  # without a warning
    assert guard.admits(0.0)
    assert guard.admits(math.nan)
    assert not guard.has_improved


@pytest.mark.parametrize(("mode", "expected"), [("max", [-math.inf, 0.2, 0.7]), ("min", [-math.inf, -0.7, -0.2])])
def test_quality_is_higher_for_better_values(mode, expected):
    guard = Guard("score", "acc", None, mode, "Owner")
    assert sorted(map(guard.quality, (0.7, math.nan, 0.2))) == expected


def test_a_key_that_does_not_come_gets_one_warning():
    guard = Guard("score", "accuracy", None, "max", "Owner")
    guard.observe(now := trainer(1, acc=0.5))
    with pytest.warns(UserWarning, match=r"Owner is guarded by 'accuracy', .* guard=None\. Logged were: old, acc\."):
        assert math.isnan(guard.value(now))
    assert math.isnan(guard.value(now))  # without another
    assert guard.admits(math.nan)


def test_state():
    guard, other, different = guard_after(0.5, 0.9), guard_after(), guard_after(key="accuracy")
    other.load_state_dict(guard.state_dict())
    assert (other.best, other.has_improved) == (guard.best, True)
    different.load_state_dict(guard.state_dict())
    assert math.isnan(different.best)
    without = Guard("x/rdi", None, None, "max", "Owner")
    without.load_state_dict({**guard.state_dict(), "key": without.key})
    assert without.admits(0.0)


OWNER = RobustEarlyStopping("robustness/rdi")


def trainer_with(*prefixes, strategy=None):
    callbacks = [RobustnessMonitor(prefix=prefix) for prefix in prefixes]
    return SimpleNamespace(callbacks=callbacks, strategy=strategy, current_epoch=0)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("robustness/adv_acc/worst", "max"),
        ("robustness/asr/pgd", "min"),
        ("r/b/rdi", "max"),
        ("robustness/fim", "min"),
        ("robustness/roby", "min"),
        ("robustness_details/lipschitz", "min"),
    ],
)
def test_mode_by_the_table_of_keys(key, expected):
    assert mode_of(key, None) == expected
    assert mode_of(key, "min") == "min"


@pytest.mark.parametrize("key", ["val_loss", "val/loss", "robustness/acc", "robustness_trust/rdi"])
def test_mode_has_to_be_given_for_keys_without_direction(key):
    with pytest.raises(ValueError, match=f"`mode`.*'{key}'"):
        mode_of(key, None)
    assert mode_of(key, "max") == "max"


@pytest.mark.parametrize("name", ["rdi_embedding", "trust/rdi", "asr/pgd"])
def test_a_key_without_a_prefix_gets_the_key_that_is_logged(name):
    with pytest.raises(ValueError, match=f"Pass '{tag('robustness', name)}'"):
        mode_of(name, None)
    assert split_key(tag("robustness", name))[1].name == name


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("robustness/lipschitz", "robustness_details/lipschitz"),
        ("r/b/rdi_embedding", "r/b_details/rdi_embedding"),
        ("robustness_details/rdi", "robustness/rdi"),
        ("robustness_details/asr/pgd", "robustness/asr/pgd"),
    ],
)
def test_a_key_of_another_group_gets_the_key_that_is_logged(key, expected):
    with pytest.raises(ValueError, match=f"`monitor` .*'{expected}', but got '{key}'.* `mode`"):
        RobustEarlyStopping(key)
    assert RobustEarlyStopping(expected).mode == mode_of(expected, None)
    assert mode_of(key, "min") == "min"


def test_values_of_a_monitor_that_is_not_there():
    for key in ("robustness/adv_acc/pgd", "r/rdi"):
        with pytest.warns(UserWarning, match=f"waits for '{key}'.* Add RobustnessMonitor to the callbacks"):
            check_awaited(trainer_with(), OWNER, key)


@pytest.mark.parametrize("metrics", [{}, {"val_acc": 0.5, "loss": 1.0}])
def test_a_key_that_never_came(metrics):
    message = describe_missing(SimpleNamespace(callback_metrics=metrics), OWNER, "robustness/rdi")
    assert message.endswith("Logged were: val_acc, loss." if metrics else "Nothing was logged.")


@pytest.mark.parametrize("key", ["robustness/asr/pdg", "robustnes/rdi", "robustness/rdy", "robustness/rdi_intra"])
def test_keys_that_will_not_be_logged(key):
    with pytest.raises(MisconfigurationException, match=f"'{key}'.* robustness/rdi, "):
        check_awaited(trainer_with("robustness"), OWNER, key)


def test_keys_that_need_gradients_of_sharded_parameters():
    sharded = trainer_with("robustness", strategy=FSDPStrategy.__new__(FSDPStrategy))
    check_awaited(sharded, OWNER, "robustness/rdi")
    check_default_guard(sharded, OWNER, "robustness/acc")
    for key in ("robustness/adv_acc/worst", "robustness/fim"):
        check_awaited(trainer_with("robustness"), OWNER, key)
        message = f"waits for '{key}', which will not be logged, since FSDPStrategy shards the parameters"
        with pytest.raises(MisconfigurationException, match=message):
            check_awaited(sharded, OWNER, key)


def test_keys_of_the_module_and_of_nested_prefixes_are_let_through():
    for key in ("val_acc", "val/acc", "r/b/rdi", "r_trust/rdi"):
        check_awaited(trainer_with("r", "r/b"), OWNER, key)


def test_the_default_guard_takes_a_monitor_of_this_prefix():
    check_default_guard(trainer_with("robustness"), OWNER, "robustness/acc")
    with pytest.raises(MisconfigurationException, match=r"'robustness/acc'.*guard='r/acc'"):
        check_default_guard(trainer_with("r"), OWNER, "robustness/acc")
    with pytest.raises(MisconfigurationException, match=r"there is none\. Add RobustnessMonitor .* `guard=`"):
        check_default_guard(trainer_with(), OWNER, "robustness/acc")


def test_a_guard_that_is_named_may_be_logged_by_the_module():
    named = RobustEarlyStopping("robustness/rdi", guard="robustness/acc", confirm="val_adv_acc")
    for stopping in (named, RobustEarlyStopping("robustness/adv_acc/pgd")):
        with pytest.warns(UserWarning, match="Add RobustnessMonitor"):
            stopping.setup(trainer_with(), None, "fit")
    for key in ("robustness/accuracy", "r/rdi"):
        with pytest.raises(MisconfigurationException, match=f"waits for '{key}'"):
            RobustEarlyStopping("score", mode="max", guard=key).setup(trainer_with("robustness"), None, "fit")
    with pytest.raises(MisconfigurationException, match="guarded by 'robustness/acc'"):
        RobustEarlyStopping("robustness/adv_acc/pgd", guard_tolerance=0.1).setup(trainer_with(), None, "fit")
