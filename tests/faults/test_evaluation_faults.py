"""Interrupts, faults and kills in each part of ``evaluate``, in one process and in two.

Also pinned elsewhere: the interrupt of ``sweep`` and of a loader (tests/evaluation/test_sweep.py, test_evaluate.py),
reports of two processes, shares of loaders, samplers and streams, and faults of loaders (test_several_processes.py
there), masks in one process against a loop over samples (tests/test_any_batch.py).
"""

import json
import signal

import pytest

from tests.faults.evaluation_runs import PARTS, describe, evaluate_masked, evaluate_part, run_all
from tests.faults.killed import evaluate_all_and_die
from tests.golden.runs import differences
from tests.processes import run_in_a_process

LABELS = {
    "features": "the features",
    "fim": "the Fisher information",
    "clever": "CLEVER",
    "attack": "the attack pgd",
    "sweep": "the sweep",
    "decision space": "the decision space",
}
# The process with the marked sample
RANKS = {"features": 1, "clever": 1}


@pytest.fixture(scope="module")
def whole():
    return {part: evaluate_part(part) for part in PARTS}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Folders of evaluations that were killed, and how their processes ended."""
    folder = tmp_path_factory.mktemp("killed")
    assert run_in_a_process(evaluate_all_and_die, folder) == 0
    return folder, json.loads((folder / "codes.json").read_text())


@pytest.fixture(scope="module")
def together(two_processes, killed):
    """Results of two processes, which also go on with what was killed in one."""
    folder = killed[0] / "alone"
    written = {path: path.stat().st_mtime_ns for path in folder.rglob("*.*") if path.suffix != ".unfinished"}
    results = two_processes(run_all, folder)
    assert all(path.stat().st_mtime_ns == time for path, time in written.items())  # nothing was measured twice
    return results


def assert_same(actual, expected):
    """Batches have other sizes in other numbers of processes, and sums another order."""
    assert differences(actual, expected, tolerance=1e-9) == []


def check_interrupted(report, whole, part, finished):
    """The report has what was finished, and of attacks nothing; an empty number is not known beforehand."""
    assert report["interrupted"] == LABELS[part]
    metrics, expected = report["metrics"], whole["metrics"]
    if part == "features":
        assert metrics.get("samples", 0) < expected["samples"]  # none where the first batch was interrupted
        return
    features = dict(list(expected.items())[:9])
    assert_same(dict(list(metrics.items())[:9]), features)
    if part == "fim":
        columns, all_columns = report["per_sample"], whole["per_sample"]
        assert list(columns) == list(all_columns)
        assert columns["fim_index"] == finished if finished else set(columns["fim_index"]) < set(range(24))
        assert metrics["samples_fim"] == len(columns["fim"])
        assert metrics["fim"] == pytest.approx(sum(columns["fim"]) / len(columns["fim"]))
        for name in ("fim", "boundary"):
            kept = [all_columns[name][index] for index in columns[f"{name}_index"]]
            assert columns[name] == pytest.approx(kept)
    elif part == "clever":
        assert 0 < metrics["samples_clever"] < 6
    else:
        assert list(metrics) == list(features)
    assert report["rates"] == {}
    assert report["threat_model"]["attacks"] == {}
    assert report["decision_space"] is None
    if part == "sweep":
        found, expected = report["sweep"], whole["sweep"]
        assert found["interrupted"]
        assert found["index"] == finished if finished else set(found["index"]) < set(range(24))
        assert found["samples"] == len(found["index"])
        for name, budgets in found["breaking_eps"].items():
            assert budgets == [expected["breaking_eps"][name][index] for index in found["index"]]
    else:
        assert report["sweep"] is None


@pytest.mark.parametrize("part", PARTS)
def test_interrupt(whole, part):
    check_interrupted(evaluate_part(part, KeyboardInterrupt), whole[part], part, list(range(8)))


@pytest.mark.parametrize("part", PARTS)
def test_interrupt_of_one_of_two_processes(whole, together, part):
    first, second = (run["interrupted"][part] for run in together)
    assert first == second
    check_interrupted(first, whole[part], part, None)


@pytest.mark.parametrize("part", PARTS)
def test_fault(together, part):
    assert describe(part, ValueError) == "ValueError: enough"
    rank = RANKS.get(part, 0)
    assert together[rank]["failed"][part] == "ValueError: enough"
    other = together[1 - rank]["failed"][part]
    assert f"Process {rank} of 2 failed. ValueError: enough" in other


@pytest.mark.parametrize("part", PARTS)
def test_killed_alone_and_resumed_by_two(whole, killed, together, part):
    assert killed[1][part][0] == -signal.SIGKILL
    assert together[0]["resumed"][part] == together[1]["resumed"][part]
    assert_same(together[0]["resumed"][part], whole[part])


@pytest.mark.parametrize("part", PARTS)
def test_one_of_two_killed_and_resumed_alone(whole, killed, part):
    folder, codes = killed
    rank = RANKS.get(part, 0)
    assert codes[part][1 + rank] == -signal.SIGKILL
    assert codes[part][2 - rank] == 3  # it did not wait for the other
    assert "lost the connection" in (folder / "together" / f"{part}.error").read_text()
    resumed = folder / "together" / part
    written = {path: path.stat().st_mtime_ns for path in resumed.iterdir() if path.suffix != ".unfinished"}
    assert (len(written) > 3) == (part != "features")  # something was finished
    assert_same(evaluate_part(part, resume=resumed), whole[part])
    assert all(path.stat().st_mtime_ns == time for path, time in written.items())  # nothing was measured twice
    assert not list(resumed.glob("*.unfinished"))


def test_masks_in_two_processes(together):
    assert together[0]["masked"] == together[1]["masked"]
    assert_same(together[0]["masked"], evaluate_masked())
    assert together[0]["masked"]["evaluate"]["per_sample"]["index"] == list(range(24))
    assert 0 < together[0]["masked"]["evaluate"]["rates"]["pgd"]["asr"] < 1
