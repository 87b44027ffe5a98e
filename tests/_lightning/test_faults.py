import logging
import warnings
from types import SimpleNamespace

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_robustness._lightning.faults import Faults
from lightning_robustness._processes import OtherProcessError, ProcessesLostError


def make_faults(num_batches=1, **state):
    """Faults of a Trainer that has trained on some batches."""
    progress = SimpleNamespace(total=SimpleNamespace(ready=num_batches))
    trainer = SimpleNamespace(
        state=SimpleNamespace(fn="fit"),
        sanity_checking=False,
        fast_dev_run=False,
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
    )
    vars(trainer).update(state)
    return Faults(trainer)


def fail():
    raise KeyError("label")


@pytest.mark.parametrize("state", [{"num_batches": 0}, {"sanity_checking": True}, {"fast_dev_run": True}])
def test_errors_are_raised_before_training_has_begun(state):
    faults = make_faults(**state)
    with pytest.raises(MisconfigurationException, match="RobustnessMonitor: 'label'"), faults.guard():
        fail()
    with pytest.raises(MisconfigurationException, match="RobustnessMonitor: wrong"):
        faults.refuse("wrong", "It is left out.")
    with pytest.raises(KeyError), faults.skipping("nothing", is_raised_early=True):
        fail()
    with pytest.warns(UserWarning, match="left out: KeyError: 'label'"), faults.skipping("left out"):
        fail()


def test_errors_become_warnings_once_per_text():
    faults = make_faults()
    with faults.guard():
        fail()
    assert isinstance(faults.error, KeyError)
    message = "RobustnessMonitor: left epoch 3 out: KeyError: 'label'"
    with pytest.warns(UserWarning, match=message), faults.skipping("left epoch 3 out", True):
        raise faults.error
    with pytest.warns(UserWarning, match=r"RobustnessMonitor: wrong It is left out\."):
        faults.refuse("wrong", "It is left out.")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with faults.skipping("left epoch 4 out"):
            raise faults.error
        faults.refuse("wrong", "It is left out.")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ProcessesLostError])
def test_what_ends_the_run_is_not_left_out(error):
    with pytest.raises(error), make_faults().skipping("left out"):
        raise error


def test_an_error_of_another_process_is_reported_there():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with make_faults().skipping("left out"):
            raise OtherProcessError("Process 1 of 2 failed.", "KeyError: 'label'")


def test_warnings_that_are_errors_go_to_the_log_once_training_has_begun(caplog):
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        make_faults().warn("something", key="something")
        make_faults().report("left out", "no luck")
        with pytest.raises(UserWarning, match="something"):
            make_faults(num_batches=0).warn("something", key="something")
    assert [record.message.partition(": ")[2] for record in caplog.records] == ["something", "left out: no luck"]
