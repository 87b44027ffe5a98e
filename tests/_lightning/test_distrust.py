import warnings
from types import SimpleNamespace

import pytest
import pytorch_lightning
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_robustness import RobustEarlyStopping, RobustModelCheckpoint, RobustnessMonitor
from lightning_robustness._lightning.record import warn_of_distrust
from lightning_robustness._measurement.statistics import Trust
from tests._lightning.test_faults import make_faults


def warn(callback, *, times=1, prefix="robustness", **trust):
    run = SimpleNamespace(prefix=prefix, faults=make_faults())
    for _ in range(times):
        warn_of_distrust(SimpleNamespace(callbacks=[RobustnessMonitor(), callback]), run, trust)


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
    message = (
        rf"{type(callback).__name__} goes by 'robustness/rdi', .* tau with 'robustness/adv_acc/pgd' is -0\.43 over 6 "
        r"evaluations\. Use RobustModelCheckpoint and RobustEarlyStopping with 'robustness/adv_acc/pgd' instead"
    )
    with pytest.warns(UserWarning, match=message) as record:
        warn(callback, times=3, rdi=Trust(-0.43, 6, "adv_acc/pgd"), fim=Trust(-1.0, 6, "adv_acc/pgd"))
    assert len(record) == 1


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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn(callback, rdi=trust, prefix=prefix)
