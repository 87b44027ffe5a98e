import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RECORD = "from timing import record; record(hooks=1.5); record(validation=2.0, hooks=2.5, fit=1.75)"


@pytest.fixture
def run_all():
    spec = importlib.util.spec_from_file_location("run_all", ROOT / "benchmarks" / "run_all.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small_run(run_all, tmp_path, monkeypatch):
    """Run ``main`` on scripts that are given as text, beside copies of the results and the README."""
    monkeypatch.setattr(run_all, "DIRECTORY", tmp_path)
    monkeypatch.setattr(run_all, "README", tmp_path / "README.md")
    monkeypatch.setattr(run_all, "MONITOR", tmp_path / "monitor.md")
    monkeypatch.setattr(run_all, "RESULTS", tmp_path / "costs.json")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "benchmarks"))
    old = {"date": None, "torch": None, "values": {"hooks": 1.0, "validation": 1.0}}
    run_all.RESULTS.write_text(json.dumps({"monitor_overhead": old}))
    for page in (run_all.README, run_all.MONITOR):
        page.write_text(f"before\n\n{run_all.START}old\n{run_all.END}\n\nafter\n")

    def main(scripts, *arguments):
        monkeypatch.setattr(run_all, "SCRIPTS", {name: ["--part", "1"] for name in scripts})
        monkeypatch.setattr(sys, "argv", ["run_all.py", *arguments])
        for name, text in scripts.items():
            (tmp_path / f"{name}.py").write_text(text)
        code = run_all.main()
        return code, json.loads(run_all.RESULTS.read_text()), run_all.README.read_text()

    return main


def test_the_table_of_the_readme_is_that_of_the_results(run_all):
    table = run_all.markdown(json.loads(run_all.RESULTS.read_text()))
    assert f"{run_all.START}{table}{run_all.END}" in run_all.README.read_text()
    values = run_all.values_of(json.loads(run_all.RESULTS.read_text()))
    needed = [set(re.findall(r"{(\w+)", row[1] + row[2])) for row in run_all.ROWS]
    assert table.count("\n| ") == sum(names <= set(values) for names in needed)
    assert "not measured" not in table


def test_the_costs_of_whole_runs_in_the_docs_are_those_of_the_results(run_all):
    results = json.loads(run_all.RESULTS.read_text())
    said = run_all.sentence(results)
    assert f"{run_all.START}{said}{run_all.END}" in run_all.MONITOR.read_text()
    values = results["monitor_overhead"]["values"]
    assert re.findall(r"[\d.]+(?= times)", said) == [f"{values[name]:.2f}" for name in ("fit", "resnet18_fit")]


def test_a_script_is_measured_and_the_pages_follow(small_run, run_all):
    checked = f"import sys; assert sys.argv[1:] == ['--part', '1', '--data', 'here']; {RECORD}"
    code, results, readme = small_run({"monitor_overhead": checked}, "--data", "here", "--readme")
    assert code == 0
    assert results["monitor_overhead"]["values"] == {"hooks": 2.5, "validation": 2.0, "fit": 1.75}
    assert readme.startswith("before\n\n<!--")
    assert readme.endswith("-->\n\nafter\n")
    assert "| 2.00 times as long; the hooks alone 2.50 |" in readme
    assert "take 1.75 times as long" in run_all.MONITOR.read_text()
    assert f"on {results['monitor_overhead']['date']} with torch {results['monitor_overhead']['torch']}." in readme


def test_a_script_that_fails_keeps_its_figures_and_the_others_go_on(small_run, capsys):
    scripts = {"monitor_overhead": f"{RECORD}; raise SystemExit(3)", "sweep": RECORD.replace("hooks", "sweep_lowest")}
    code, results, _ = small_run(scripts)
    assert code == 1
    assert results["monitor_overhead"]["values"] == {"hooks": 1.0, "validation": 1.0}
    assert results["sweep"]["values"]["sweep_lowest"] == 2.5
    assert "Failed, with the old figures in the table: monitor_overhead" in capsys.readouterr().out


def test_one_script_is_enough_and_resuming_skips_what_is_done(small_run, capsys):
    scripts = {"monitor_overhead": RECORD, "sweep": "raise SystemExit(3)"}
    assert small_run(scripts, "--only", "monitor_overhead")[0] == 0
    scripts = {"monitor_overhead": "raise SystemExit(3)", "sweep": RECORD}
    assert small_run(scripts, "--resume")[0] == 0
    assert "1 of 1: sweep.py" in capsys.readouterr().out


def test_the_table_alone_runs_nothing(small_run, capsys):
    assert small_run({"monitor_overhead": "raise SystemExit(3)"}, "--table")[0] == 0
    assert "| 1.00 times as long; the hooks alone 1.00 |" in capsys.readouterr().out
