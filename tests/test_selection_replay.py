from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def table(run_script):
    """Callable that returns the rows of the table that the script prints."""

    def run(*arguments):
        _, output = run_script("benchmarks/selection_replay.py", *arguments)
        return [line for line in output.splitlines() if line.startswith("|")][2:]

    return run


def test_the_table_in_the_docs_is_that_of_the_results(table):
    rows = table("--table")
    assert len(rows) == 7
    docs = (ROOT / "docs" / "stopping.md").read_text()
    assert [row for row in rows if row not in docs] == []


LOG = """\
[2020/02/01 11:04:19] - Namespace(attack='pgd', epochs=7, fname='experiments/cifar10_standard/net')
[2020/02/01 11:04:30] - Epoch \t Train Time \t Test Time \t LR \t \t Train Acc \t Test Acc \t Test Robust Acc
"""


def test_the_logs_of_a_clone_are_replayed_as_files_are(tmp_path, table):
    series = [(0.60, 0.30), (0.70, 0.40), (0.80, 0.530), (0.81, 0.527)]
    rows = [f"{epoch},0.1,{clean},{robust}" for epoch, (clean, robust) in enumerate(series)]
    (tmp_path / "cifar10_standard__net.csv").write_text("\n".join(["epoch,lr,clean_accuracy,robust_accuracy", *rows]))
    line = "[2020/02/01 11:09:48] - {} \t 267.4 \t \t 51.0 \t \t 0.1000 \t 0.05 \t {} \t \t {}\n"
    clone = tmp_path / "clone"
    path = clone / "experiments" / "cifar10_standard" / "net" / "output.log"
    path.parent.mkdir(parents=True)
    first = "".join(line.format(epoch, *values) for epoch, values in enumerate([*series[:2], (0.1, 0.9)]))
    resumed = "".join(line.format(epoch, *values) for epoch, values in enumerate(series) if epoch >= 2)
    resumed = resumed.replace("\t", "     ")  # as some of the authors' logs have it
    notes = "[2020/02/01 12:00:00] - Resuming at epoch 2\n[2020/02/01 12:00:00] - validation 1.6 \t 0.4 \t 1.8 \t 0.3\n"
    path.write_text(LOG + first + notes + LOG + resumed)
    assert table(clone, "--output", tmp_path / "a.json") == table(tmp_path, "--output", tmp_path / "b.json")
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()


def test_a_run_that_overfits_is_replayed(tmp_path, table):
    """The peak is in epoch 2; 3 is tied with it; a guard refuses both in favour of 4."""
    series = [(0.60, 0.30), (0.70, 0.40), (0.80, 0.530), (0.81, 0.527), (0.83, 0.50), (0.85, 0.48), (0.84, 0.45)]
    rows = [f"{epoch},0.1,{clean},{robust}" for epoch, (clean, robust) in enumerate(series)]
    (tmp_path / "run.csv").write_text("\n".join(["epoch,lr,clean_accuracy,robust_accuracy", *rows]))
    cells = [row.split("|")[2:6] for row in table(tmp_path, "--output", tmp_path / "out.json")]
    lost, worst, above, clean = zip(*cells[:4], strict=True)
    assert [*map(float, lost)] == [8.0, 3.0, 0.0, 0.3]
    assert [value.split()[0] for value in worst] == ["8.0", "3.0", "0.0", "0.3"]
    assert [*map(int, above)] == [1, 1, 0, 0]
    assert [*map(float, clean)] == [4.0, 3.0, 0.0, 1.0]
