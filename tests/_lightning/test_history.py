import pickle

import torch

from lightning_robustness._lightning.record import History
from lightning_robustness._measurement.assisted import Assisted


def test_values_of_the_same_weights_join_the_last_evaluation():
    history = History()
    history.add(10, 0, 9, {"rdi": 0.5, "seconds/pgd": 1.0})
    history.add(10, 0, 9, {"asr/pgd": 0.25, "seconds/pgd": 2.0})
    history.add(20, 1, 19, {"rdi": 0.75})
    assert history.entries == [
        {"epoch": 0, "step": 9, "rdi": 0.5, "asr/pgd": 0.25, "seconds/pgd": 3.0},
        {"epoch": 1, "step": 19, "rdi": 0.75},
    ]


def test_outcomes_come_back_as_they_were():
    outcome = Assisted(
        torch.tensor([3, 7]).int(), torch.tensor([1.0, 0.0]), torch.tensor([True, False]), torch.rand(2), None, 0.75, 9
    )
    history, other = History(), History()
    history.add(10, 0, 9, {"rdi": 0.5}, {"pgd": outcome})
    other.load_state_dict(history.state_dict())
    for saved in (history, other):
        found = saved.state_dict()["outcomes"][9]["pgd"]
        torch.testing.assert_close(found, outcome._asdict(), rtol=0, atol=0)


def test_entries_of_a_copy_in_another_process_come_back_once():
    history = History()
    copy = pickle.loads(pickle.dumps(history))
    copy.add(10, 0, 9, {"rdi": 0.5})
    copy.send()
    assert history.entries == copy.entries == [{"epoch": 0, "step": 9, "rdi": 0.5}]
    history.entries = []
    assert history.entries == []
