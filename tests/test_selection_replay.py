import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def table(*arguments):
    """Rows of the table that the script prints."""
    command = [sys.executable, "benchmarks/selection_replay.py", *map(str, arguments)]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [line for line in output.splitlines() if line.startswith("|")][2:]


def test_the_table_in_the_docs_is_that_of_the_results():
    rows = table("--table")
    assert len(rows) == 7
    docs = (ROOT / "docs" / "stopping.md").read_text()
    assert [row for row in rows if row not in docs] == []


def test_a_run_that_overfits_is_replayed(tmp_path):
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
