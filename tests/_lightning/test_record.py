import pickle
from types import SimpleNamespace

import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_robustness import RobustEarlyStopping, RobustModelCheckpoint, RobustnessMonitor
from lightning_robustness._lightning.record import RunRecord, find_distrust, intervals_of, is_at_the_end
from lightning_robustness._measurement.assisted import Assisted
from lightning_robustness._measurement.statistics import Trust
from lightning_robustness.attacks import PGD, Square, get_attack


def trainer(epoch, fn="fit", max_epochs=100, max_steps=-1, is_last_batch=True):
    """A Trainer in a validation epoch at the end of a training epoch of ten batches."""
    batches = SimpleNamespace(is_last_batch=is_last_batch, total=SimpleNamespace(ready=10 * (epoch + 1)))
    return SimpleNamespace(
        state=SimpleNamespace(fn=fn),
        current_epoch=epoch,
        max_epochs=max_epochs,
        max_steps=max_steps,
        global_step=10 * (epoch + 1),
        fit_loop=SimpleNamespace(
            epoch_loop=SimpleNamespace(batch_progress=batches, _batches_that_stepped=10 * epoch + 9)
        ),
    )


def attacks(*names):
    return {name: get_attack(name) for name in names}


def test_pgd_in_all_its_forms_runs_in_every_epoch_and_other_attacks_in_every_fifth():
    settings = {"mine": PGD(steps=2), "fast": get_attack("fgsm"), "pgd": Square(), "own": lambda model, x, y: x}
    assert intervals_of(settings) == {"mine": 1, "fast": 1, "pgd": 5, "own": 5}


def test_values_of_the_same_weights_join_the_last_evaluation():
    record = RunRecord(attacks("pgd"))
    record.add(trainer(0), 0, {"rdi": 0.5, "seconds/pgd": 1.0}, {}, [])
    record.add(trainer(0), 0, {"asr/pgd": 0.25, "seconds/pgd": 2.0}, {}, [])
    record.add(trainer(1), 1, {"rdi": 0.75}, {}, [])
    assert record.history == [
        {"epoch": 0, "step": 9, "rdi": 0.5, "asr/pgd": 0.25, "seconds/pgd": 3.0},
        {"epoch": 1, "step": 19, "rdi": 0.75},
    ]


def test_outcomes_come_back_as_they_were():
    outcome = Assisted(
        torch.tensor([3, 7]).int(), torch.tensor([1.0, 0.0]), torch.tensor([True, False]), torch.rand(2), None, 0.75, 9
    )
    record, other = RunRecord(attacks("pgd")), RunRecord(attacks("pgd"))
    record.add(trainer(0), 0, {"rdi": 0.5}, {"pgd": outcome}, ["pgd"])
    other.load_state_dict(record.state_dict())
    for saved in (record, other):
        found = saved.state_dict()["outcomes"][9]["pgd"]
        torch.testing.assert_close(found, outcome._asdict(), rtol=0, atol=0)


def test_the_history_of_a_copy_in_another_process_comes_back_once():
    record = RunRecord(attacks("pgd"))
    copy = pickle.loads(pickle.dumps(record))
    copy.add(trainer(0), 0, {"rdi": 0.5}, {}, ["pgd"])
    copy.send()
    assert record.history == copy.history == [{"epoch": 0, "step": 9, "rdi": 0.5}]
    record.begin(trainer(0))
    assert record.history == []


def epochs_with_attacks(every, names=("pgd",), begin=0, history=(), **state):
    """The epochs in which each attack runs, and the record of the run."""
    run = RunRecord(attacks(*names), every)
    run.load_state_dict({"history": history})
    for epoch in range(begin, 7):
        now = trainer(epoch, **state)
        values = {f"adv_acc/{name}": 0.5 for name in run.due(now)}
        run.add(now, epoch, values, {}, [])
    return {name: [e["epoch"] for e in run.history if f"adv_acc/{name}" in e] for name in names}, run


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (None, {"pgd": [0, 1, 2, 3, 4, 5, 6], "cw": [0, 5, 6], "square": [0, 5, 6]}),
        ({"cw": 3}, {"pgd": [0, 1, 2, 3, 4, 5, 6], "cw": [0, 3, 6], "square": [0, 5, 6]}),
        ({"pgd": 2, "cw": 4, "square": 1}, {"pgd": [0, 2, 4, 6], "cw": [0, 4, 6], "square": [0, 1, 2, 3, 4, 5, 6]}),
        (4, {"pgd": [0, 4, 6], "cw": [0, 4, 6], "square": [0, 4, 6]}),
    ],
)
def test_each_attack_has_its_own_number_also_in_a_resumed_run(every, expected):
    found, whole = epochs_with_attacks(every, ("pgd", "cw", "square"), max_epochs=7)
    assert found == expected
    history = whole.history[:3]
    assert epochs_with_attacks(every, ("pgd", "cw", "square"), 3, history, max_epochs=7)[0] == expected
    whole.begin(trainer(0))
    assert whole.due(trainer(0)) == ["pgd", "cw", "square"]


def test_attacks_are_always_due_outside_of_training_and_do_not_count_there():
    record = RunRecord(attacks("pgd"), 5)
    record.add(trainer(0), 0, {"adv_acc/pgd": 0.5}, {}, [])
    assert record.due(trainer(1, fn="validate")) == ["pgd"]
    record.add(trainer(4, fn="validate"), 4, {"adv_acc/pgd": 0.5}, {}, [])
    assert record.due(trainer(5)) == ["pgd"]


def test_an_attack_that_failed_waits_like_the_others():
    record = RunRecord(attacks("pgd", "cw"), 5)
    record.add(trainer(0), 0, {"adv_acc/pgd": 0.5}, {}, ["pgd", "cw"])
    assert record.due(trainer(4)) == []
    assert record.due(trainer(5)) == ["pgd", "cw"]


def test_all_attacks_run_again_at_the_end_if_one_has_not_seen_the_last_weights():
    record = RunRecord(attacks("pgd", "square"))
    assert record.missing(trainer(0)) == ["pgd", "square"]
    record.add(trainer(0), 0, {"adv_acc/pgd": 0.5}, {}, ["pgd", "square"])  # one failed
    assert record.missing(trainer(0)) == []
    assert record.missing(trainer(1)) == ["pgd", "square"]
    record.add(trainer(1), 1, {"adv_acc/pgd": 0.5}, {}, ["pgd"])
    assert record.missing(trainer(1)) == ["pgd", "square"]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"max_epochs": 7}, True),
        ({"max_epochs": 7, "is_last_batch": False}, False),
        ({"max_epochs": 8}, False),
        ({"max_steps": 70}, True),
        ({"max_steps": 71}, False),
    ],
)
def test_the_last_validation_epoch(state, expected):
    assert is_at_the_end(trainer(6, **state)) is expected


def test_arguments():
    with pytest.raises(ValueError, match=r"\['pgd'\] .*cw, square"):
        RunRecord(attacks("pgd"), {"pgd": 1, "cw": 2, "square": 3})


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
