from types import SimpleNamespace

import pytest
import pytorch_lightning
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_robustness import RobustEarlyStopping, RobustModelCheckpoint, RobustnessMonitor
from lightning_robustness._lightning.record import find_distrust
from lightning_robustness._measurement.statistics import Trust


def found(callback, prefix="robustness", **trust):
    trainer = SimpleNamespace(callbacks=[RobustnessMonitor(), callback])
    return list(find_distrust(trainer, prefix, trust))


@pytest.mark.parametrize(
    "callback",
    [
        EarlyStopping("robustness/rdi"),
        ModelCheckpoint(monitor="robustness/rdi"),
        RobustEarlyStopping("robustness/rdi"),
        RobustModelCheckpoint("robustness/rdi"),
        pytorch_lightning.callbacks.EarlyStopping("robustness/rdi"),
        pytorch_lightning.callbacks.ModelCheckpoint(monitor="robustness/rdi"),
    ],
    ids=lambda callback: f"{type(callback).__module__.split('.')[0]} {type(callback).__name__}",
)
def test_a_value_that_contradicts_the_attacks_gets_one_warning(callback):
    trust = {"rdi": Trust(-0.43, 6, "adv_acc/pgd"), "fim": Trust(-1.0, 6, "adv_acc/pgd")}
    ((key, message),) = found(callback, **trust)
    assert "robustness/rdi" in key
    assert message.startswith(f"{type(callback).__name__} monitors 'robustness/rdi'")
    for part in (
        "'robustness/adv_acc/pgd' is -0.43 over 6 evaluations",
        "RobustModelCheckpoint",
        "RobustEarlyStopping",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("callback", "trust", "prefix"),
    [
        (EarlyStopping("robustness/rdi"), Trust(-0.43, 5, "adv_acc/pgd"), "robustness"),
        (EarlyStopping("robustness/rdi"), Trust(0.0, 9, "adv_acc/pgd"), "robustness"),
        (EarlyStopping("robustness/rdi"), Trust(-0.43, 9, "adv_acc/pgd"), "other"),
        (EarlyStopping("robustness/roby"), Trust(-0.43, 9, "adv_acc/pgd"), "robustness"),
        (ModelCheckpoint(), Trust(-0.43, 9, "adv_acc/pgd"), "robustness"),
    ],
)
def test_nothing_to_warn_of(callback, trust, prefix):
    assert found(callback, prefix, rdi=trust) == []
