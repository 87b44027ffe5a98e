"""What a fault in each part of the monitor does: before and after training began, in one process and in two.

Also pinned elsewhere: masks and embeddings in two processes (tests/callbacks/test_distributed.py).
"""

import json
import signal

import pytest

from tests.faults.left import leave_all
from tests.faults.monitor_runs import CASES, IN_TWO, fit, fit_all, run_all, watch_all
from tests.processes import run_in_a_process

FIM = {"fim", "fim_inverse", "fim_geometric", "lipschitz", "boundary", "samples_fim", "seconds/fim"}
FIM |= {f"boundary_acc{end}" for end in ("", "_low", "_high", "_plain")}


def accuracies_of(attack):
    return {f"adv_acc{end}/{attack}" for end in ("", "_low", "_high", "_plain")}


WORST = {"asr/worst", "masking", *accuracies_of("worst")}


def keys_of(attack):
    return {f"asr/{attack}", f"seconds/{attack}", *accuracies_of(attack)} | WORST


# Keys that an epoch lacks in which the part failed; None if the epoch is left out
MISSING = {
    "batch hook": None,
    "features": None,
    "not a number": None,
    "fim": FIM,
    "first attack": keys_of("first"),
    "last attack": keys_of("last"),
    "second batch": keys_of("last"),
    "pgd": keys_of("pgd") | {"samples_attacks"},
    "cw": keys_of("cw") | {"samples_attacks", "l2_budget"},
    "square": keys_of("square") | {"samples_attacks"},
    "board": set(),
}
# What the one warning says
REASONS = {
    "batch hook": ("left epoch {} out", "ValueError: no batch"),
    "features": ("left epoch {} out", "ValueError: no features"),
    "not a number": ("left epoch {} out", "NaN or infinite"),
    "fim": ("Fisher information failed and is left out of epoch {}", "ValueError: no gradient"),
    "first attack": ("the attack first failed and is left out of epoch {}", "ValueError: no first"),
    "last attack": ("the attack last failed and is left out of epoch {}", "ValueError: no last"),
    "second batch": ("the attack last failed and is left out of epoch {}", "ValueError: no second batch"),
    "pgd": ("the attack pgd failed and is left out of epoch {}", "ValueError: no gradient"),
    "cw": ("the attack cw failed and is left out of epoch {}", "ValueError: no gradient"),
    "square": ("the attack square failed and is left out of epoch {}", "ValueError: no sample"),
    "board": ("picture of the run could not be logged", "ValueError: no board"),
}
# Not tried before training: divergence may pass, attacks get one batch, and boards may fail
LATE = {"not a number", "second batch", "board"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    path = tmp_path_factory.mktemp("alone")
    return {"before": fit_all(path, is_early=True), "after": fit_all(path, is_early=False)}


@pytest.fixture(scope="module")
def together(tmp_path_factory, two_processes):
    return two_processes(run_all, tmp_path_factory.mktemp("together"))


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """What one process measures."""
    return watch_all(0, tmp_path_factory.mktemp("watched"))


def check_epochs(result, name, epochs):
    """The epochs lack the part that failed, the others nothing; training went on and no hook is left."""
    assert (result["error"], result["status"], result["hooks"]) == (None, "finished", 0)
    whole = next((keys for epoch, keys in result["keys"].items() if epoch not in epochs), None)
    for epoch in range(3):
        keys = result["keys"].get(epoch)
        if epoch not in epochs:
            assert keys == whole
        elif MISSING[name] is None:
            assert keys is None
        elif whole is not None:
            assert sorted(keys) == sorted(set(whole) - MISSING[name])
        else:
            assert not MISSING[name] & set(keys)


def check_warning(result, name, epoch):
    (_,) = [text for text in result["warnings"] if says_why(text, name, epoch)]
    # Other pictures of a board, and its summary, have warnings of their own
    assert len(result["warnings"]) == (3 if name == "board" and epoch == 0 else 1)


def says_why(text, name, epoch):
    return all(part.format(epoch) in text for part in REASONS[name])


def check_raised(result):
    kind, text = result["error"].split(": ", maxsplit=1)
    assert kind == "MisconfigurationException"
    assert text.startswith("RobustnessMonitor: ")
    assert "no " in text
    assert (result["status"], result["steps"], result["keys"]) == ("interrupted", 0, {})
    assert (result["hooks"], result["warnings"]) == (0, [])


@pytest.mark.parametrize("name", CASES)
def test_before_training(alone, name):
    result = alone["before"][name]
    if name not in LATE:
        check_raised(result)
        return
    check_epochs(result, name, {0, 1, 2})
    check_warning(result, name, 0)
    assert result["steps"] == 12


@pytest.mark.parametrize("name", CASES)
def test_after_training_began(alone, name):
    result = alone["after"][name]
    check_epochs(result, name, {1})
    check_warning(result, name, 1)
    assert result["steps"] == 12


@pytest.mark.parametrize("name", IN_TWO)
def test_before_training_in_two_processes(together, name):
    results = [run["before"][name] for run in together]
    if name not in LATE:
        check_raised(results[0])
        check_raised(results[1])
        return
    warned = [result for result in results if result["warnings"]]
    assert warned  # the board is that of the first process, and one of them may have no second batch
    # One that learns of the other's error before its own has nothing to say until the next epoch
    assert any(says_why(text, name, 0) for result in warned for text in result["warnings"])
    for result in results:
        check_epochs(result, name, {0, 1, 2})
        assert result["steps"] == 6


@pytest.mark.parametrize("name", IN_TWO)
def test_one_of_two_processes_after_training_began(together, name):
    first, second = (run["after"][name] for run in together)
    faulty, other = (first, second) if name == "board" else (second, first)
    check_warning(faulty, name, 1)
    assert other["warnings"] == []
    for result in (first, second):
        check_epochs(result, name, {1})
        assert result["steps"] == 6
    assert first["keys"] == second["keys"]
    assert first["logged"] == second["logged"]


def test_a_process_that_ends_takes_the_other_with_it(tmp_path):
    """Before training an error is raised in the process that has it; an interrupt is, at any time."""
    assert run_in_a_process(leave_all, tmp_path) == 0
    for case, error in {"before": "MisconfigurationException: RobustnessMonitor: no batch", "interrupt": ""}.items():
        first, second = (json.loads((tmp_path / f"{case}.{rank}.json").read_text()) for rank in range(2))
        assert second["error"].startswith(error or ("SystemExit", "KeyboardInterrupt"))
        assert first["error"] is not None  # it does not wait
        assert first["status"] == second["status"] == "interrupted"
        assert first["keys"].keys() == second["keys"].keys() == ({"0"} if case == "interrupt" else set())


@pytest.mark.parametrize("part", ["batch", "gradient", "first"])
def test_an_interrupt_ends_training(tmp_path, part):
    before = signal.getsignal(signal.SIGINT)
    try:
        result = fit(tmp_path, part, error=KeyboardInterrupt)
    finally:
        signal.signal(signal.SIGINT, before)  # Lightning ignores further ones
    assert result["error"].startswith(("SystemExit", "KeyboardInterrupt"))
    assert (result["status"], result["hooks"]) == ("interrupted", 0)
    assert list(result["keys"]) == [0]
    assert result["steps"] == 8
    assert not any("failed" in text for text in result["warnings"])


def check_features(values, expected):
    """Keys are those of one process, and so are values of all samples; the sample is another one of the same size."""
    assert list(values) == list(expected)
    names = ("rdi", "roby", "acc", "rdi_intra", "fsa")
    for name in [name for name in names if name in expected]:
        assert values[name] == pytest.approx(expected[name], rel=1e-6), name
    assert values["samples_fim"] == 8
    assert expected["rdi"] > -1


def test_processes_that_see_the_same_samples(watched, together):
    """No process knows what the others see: they are taken for different samples, and the sample is one of them all."""
    for name in ("everything", "stream of everything"):
        (expected, _), (first, own), (second, others) = watched[name], *(run["watched"][name] for run in together)
        assert first == second
        check_features(first, expected)
        assert first["samples_attacks"] == 8
        assert own
        assert others
        assert 0 < expected["acc"] < 1


@pytest.mark.parametrize("name", ["labels", "labels, blackbox", "no labels", "no labels, blackbox"])
def test_a_process_without_samples(watched, together, name):
    expected, _ = watched[name]
    (first, own), (second, others) = (run["watched"][name] for run in together)
    assert first == second
    check_features(first, expected)
    assert bool(own) == ("no labels" not in name)
    assert others == []
    assert ("boundary" in first) == ("blackbox" not in name)
    assert ("acc" in first) == ("no labels" not in name)
