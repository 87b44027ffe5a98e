from types import SimpleNamespace

import pytest

from lightning_robustness.callbacks.attack_schedule import AttackSchedule


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
            schedule.record(now, epoch)
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
    schedule.record(trainer(0), 0)
    assert schedule.due(trainer(1, fn="validate")) == ["pgd"]
    schedule.record(trainer(4, fn="validate"), 4)
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
    schedule.record(trainer(0), 0)
    assert schedule.missing(trainer(0)) == []
    assert schedule.missing(trainer(1)) == ["pgd"]


def test_arguments():
    with pytest.raises(ValueError, match="`attack_every_n_epochs` to be an integer of at least 1 but got 0"):
        AttackSchedule(["pgd"], 0)
