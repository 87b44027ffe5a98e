from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_table_in_the_docs_is_that_of_the_results(run_script):
    _, output = run_script("benchmarks/within_run.py", "--table")
    rows = [line for line in output.splitlines() if line.startswith("| `")]
    assert len(rows) > 5
    docs = (ROOT / "docs" / "stopping.md").read_text()
    assert [row for row in rows if row not in docs] == []
