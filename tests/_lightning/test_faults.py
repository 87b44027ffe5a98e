import logging
import warnings
from types import SimpleNamespace

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_robustness._lightning.faults import Faults


def make_faults(num_batches=1, world_size=1, others_agree=True, **state):
    """Faults of a Trainer that has trained on some batches, beside a process that agrees or has an error."""

    def reduce(decision, **kwargs):
        return decision and others_agree

    progress = SimpleNamespace(total=SimpleNamespace(ready=num_batches))
    trainer = SimpleNamespace(
        state=SimpleNamespace(fn="fit"),
        sanity_checking=False,
        fast_dev_run=False,
        world_size=world_size,
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
        strategy=SimpleNamespace(reduce_boolean_decision=reduce),
    )
    vars(trainer).update(state)
    return Faults(trainer, "Owner")


def fail():
    raise KeyError("label")


@pytest.mark.parametrize("state", [{"num_batches": 0}, {"sanity_checking": True}, {"fast_dev_run": True}])
def test_errors_are_raised_before_training_has_begun(state):
    faults = make_faults(**state)
    with pytest.raises(MisconfigurationException, match="Owner: 'label'"), faults.guard():
        fail()
    with pytest.raises(MisconfigurationException, match="Owner: wrong"):
        faults.refuse("wrong", "It is left out.")
    with pytest.raises(KeyError):
        faults.tolerate("nothing", fail)


def test_errors_become_warnings_once_per_text():
    faults = make_faults()
    with faults.guard():
        fail()
    assert faults.error == "KeyError: 'label'"
    with pytest.warns(UserWarning, match="Owner: left epoch 3 out: KeyError: 'label'"):
        assert not faults.agree("left epoch 3 out")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not faults.agree("left epoch 4 out")
    with pytest.warns(UserWarning, match=r"Owner: wrong It is left out\."):
        faults.refuse("wrong", "It is left out.")


def test_divergence_is_an_error_of_the_epoch_at_any_time():
    faults = make_faults(num_batches=0)
    with faults.guard():
        raise FloatingPointError("NaN")
    assert faults.error == "NaN"


def test_a_part_that_fails_is_left_out():
    faults = make_faults()
    assert faults.attempt("left out", list)
    with pytest.warns(UserWarning, match="left out: KeyError"):
        assert not faults.attempt("left out", fail)
    assert faults.error is None
    assert faults.compute("left out", lambda: 3) == 3
    assert faults.compute("left out", fail) is None


def test_processes_agree():
    faults = make_faults(world_size=2, others_agree=False)
    assert not faults.attempt("left out", list)
    assert not faults.agree("left out")
    with pytest.raises(KeyError):  # the others would wait for this one
        faults.compute("left out", fail)


def test_warnings_that_are_errors_go_to_the_log_once_training_has_begun(caplog):
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        make_faults().warn("something", key="something")
        make_faults().report("left out", "no luck")
        with pytest.raises(UserWarning, match="Owner: something"):
            make_faults(num_batches=0).warn("something", key="something")
    assert [record.message for record in caplog.records] == ["Owner: something", "Owner: left out: no luck"]
