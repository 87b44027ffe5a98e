from types import SimpleNamespace

import pytest
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_robustness import RobustEarlyStopping, RobustnessMonitor
from lightning_robustness._lightning.guard import (
    check_awaited,
    check_default_guard,
    describe_missing,
    mode_of,
    split_key,
)
from lightning_robustness._measurement.keys import tag

OWNER = RobustEarlyStopping("robustness/rdi")


def trainer(*prefixes, strategy=None):
    return SimpleNamespace(callbacks=[RobustnessMonitor(prefix=prefix) for prefix in prefixes], strategy=strategy)


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


def test_values_of_a_monitor_that_is_not_there():
    for key in ("robustness/adv_acc/pgd", "r/rdi"):
        with pytest.warns(UserWarning, match=f"waits for '{key}'.* Add RobustnessMonitor to the callbacks"):
            check_awaited(trainer(), OWNER, key)


@pytest.mark.parametrize("metrics", [{}, {"val_acc": 0.5, "loss": 1.0}])
def test_a_key_that_never_came(metrics):
    message = describe_missing(SimpleNamespace(callback_metrics=metrics), OWNER, "robustness/rdi")
    assert message.endswith("Logged were: val_acc, loss." if metrics else "Nothing was logged.")


@pytest.mark.parametrize("key", ["robustness/asr/pdg", "robustnes/rdi", "robustness/rdy", "robustness/rdi_intra"])
def test_keys_that_will_not_be_logged(key):
    with pytest.raises(MisconfigurationException, match=f"'{key}'.* robustness/rdi, "):
        check_awaited(trainer("robustness"), OWNER, key)


def test_keys_that_need_gradients_of_sharded_parameters():
    sharded = trainer("robustness", strategy=FSDPStrategy.__new__(FSDPStrategy))
    check_awaited(sharded, OWNER, "robustness/rdi")
    check_default_guard(sharded, OWNER, "robustness/acc")
    for key in ("robustness/adv_acc/worst", "robustness/fim"):
        check_awaited(trainer("robustness"), OWNER, key)
        message = f"waits for '{key}', which will not be logged, since FSDPStrategy shards the parameters"
        with pytest.raises(MisconfigurationException, match=message):
            check_awaited(sharded, OWNER, key)


def test_keys_of_the_module_and_of_nested_prefixes_are_let_through():
    for key in ("val_acc", "val/acc", "r/b/rdi", "r_trust/rdi"):
        check_awaited(trainer("r", "r/b"), OWNER, key)


def test_the_default_guard_takes_a_monitor_of_this_prefix():
    check_default_guard(trainer("robustness"), OWNER, "robustness/acc")
    with pytest.raises(MisconfigurationException, match=r"'robustness/acc'.*guard='r/acc'"):
        check_default_guard(trainer("r"), OWNER, "robustness/acc")
    with pytest.raises(MisconfigurationException, match=r"Pass .*guard=None, or add RobustnessMonitor"):
        check_default_guard(trainer(), OWNER, "robustness/acc")


def test_a_guard_that_is_named_may_be_logged_by_the_module():
    named = RobustEarlyStopping("robustness/rdi", guard="robustness/acc", confirm="val_adv_acc")
    for stopping in (named, RobustEarlyStopping("robustness/adv_acc/pgd")):
        with pytest.warns(UserWarning, match="Add RobustnessMonitor"):
            stopping.setup(trainer(), None, "fit")
    for key in ("robustness/accuracy", "r/rdi"):
        with pytest.raises(MisconfigurationException, match=f"waits for '{key}'"):
            RobustEarlyStopping("score", mode="max", guard=key).setup(trainer("robustness"), None, "fit")
    with pytest.raises(MisconfigurationException, match="guarded by 'robustness/acc'"):
        RobustEarlyStopping("robustness/adv_acc/pgd", guard_tolerance=0.1).setup(trainer(), None, "fit")
