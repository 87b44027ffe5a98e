from types import SimpleNamespace

import pytest

from lightning_robustness._lightning.record import AttackSchedule


def trainer(epoch, fn="fit", max_epochs=100, max_steps=-1, is_last_batch=True):
    """A Trainer in a validation epoch at the end of a training epoch of ten batches."""
    batches = SimpleNamespace(is_last_batch=is_last_batch, total=SimpleNamespace(ready=10 * (epoch + 1)))
    return SimpleNamespace(
        state=SimpleNamespace(fn=fn),
        current_epoch=epoch,
        max_epochs=max_epochs,
        max_steps=max_steps,
        global_step=10 * (epoch + 1),
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=batches)),
    )


def epochs_with_attacks(schedule, epochs, **state):
    attacked = []
    for epoch in epochs:
        now = trainer(epoch, **state)
        if schedule.due(now) == ["pgd"]:
            attacked.append(epoch)
            schedule.record(now, epoch, ["pgd"])
    return attacked


@pytest.mark.parametrize(
    ("every", "state", "expected"),
    [
        (1, {}, [0, 1, 2, 3, 4, 5, 6]),
        (3, {}, [0, 3, 6]),
        (5, {"max_epochs": 7}, [0, 5, 6]),
        (5, {"max_epochs": 7, "is_last_batch": False}, [0, 5]),
        (5, {"max_steps": 30}, [0, 2, 3, 4, 5, 6]),
    ],
)
def test_first_then_every_few_epochs_and_last(every, state, expected):
    assert epochs_with_attacks(AttackSchedule(["pgd"], every), range(7), **state) == expected


def test_attacks_are_always_due_outside_of_training_and_do_not_count_there():
    schedule = AttackSchedule(["pgd"], 5)
    schedule.record(trainer(0), 0, ["pgd"])
    assert schedule.due(trainer(1, fn="validate")) == ["pgd"]
    schedule.record(trainer(4, fn="validate"), 4, ["pgd"])
    assert schedule.due(trainer(5)) == ["pgd"]


def test_a_resumed_run_goes_on_where_it_was():
    schedule, other = AttackSchedule(["pgd"], 3), AttackSchedule(["pgd"], 3)
    assert epochs_with_attacks(schedule, range(2)) == [0]
    other.load_state_dict(schedule.state_dict())
    assert epochs_with_attacks(other, range(2, 7)) == [3, 6]
    other.reset()
    assert other.due(trainer(7)) == ["pgd"]


def test_attacks_that_have_not_seen_the_last_weights():
    schedule = AttackSchedule(["pgd"], 5)
    schedule.record(trainer(0), 0, ["pgd"])
    assert schedule.missing(trainer(0)) == []
    assert schedule.missing(trainer(1)) == ["pgd"]


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (None, {"pgd": [0, 1, 2, 3, 4, 5, 6], "cw": [0, 5, 6], "square": [0, 5, 6]}),
        ({"cw": 3}, {"pgd": [0, 1, 2, 3, 4, 5, 6], "cw": [0, 3, 6], "square": [0, 5, 6]}),
        ({"pgd": 2, "cw": 4, "square": 1}, {"pgd": [0, 2, 4, 6], "cw": [0, 4, 6], "square": [0, 1, 2, 3, 4, 5, 6]}),
        (4, {"pgd": [0, 4, 6], "cw": [0, 4, 6], "square": [0, 4, 6]}),
    ],
)
def test_each_attack_has_its_own_number(every, expected):
    schedule, attacked = AttackSchedule(["pgd", "cw", "square"], every), {"pgd": [], "cw": [], "square": []}
    for epoch in range(7):
        if epoch == 3:  # a resumed run
            state, schedule = schedule.state_dict(), AttackSchedule(["pgd", "cw", "square"], every)
            schedule.load_state_dict(state)
        due = schedule.due(now := trainer(epoch, max_epochs=7))
        schedule.record(now, epoch, due)
        for name in due:
            attacked[name].append(epoch)
    assert attacked == expected


def test_all_attacks_run_again_at_the_end_if_one_is_missing():
    schedule = AttackSchedule(["pgd", "square"])
    schedule.record(trainer(0), 0, ["pgd", "square"])
    schedule.record(trainer(1), 1, ["pgd"])
    assert schedule.missing(trainer(1)) == ["pgd", "square"]


def test_arguments():
    with pytest.raises(ValueError, match=r"`attack_every_n_epochs`.* 0"):
        AttackSchedule(["pgd"], 0)
    with pytest.raises(ValueError, match=r"`attack_every_n_epochs`.* 2\.5"):
        AttackSchedule(["pgd"], {"pgd": 2.5})
    with pytest.raises(ValueError, match=r"\['pgd'\] .*cw, square"):
        AttackSchedule(["pgd"], {"pgd": 1, "cw": 2, "square": 3})
