import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = "benchmarks/within_run.py"


def test_the_tables_in_the_docs_are_those_of_the_results(run_script):
    names, output = run_script(SCRIPT, "--table")
    rows = [line for line in output.splitlines() if line.startswith("| ") and not line.startswith("| value")]
    assert len(rows) > 10 + len(names["STOPS"])
    docs = (ROOT / "docs" / "stopping.md").read_text()
    assert [row for row in rows if row not in docs] == []


def test_the_pages_of_the_metrics_say_what_was_measured(run_script):
    names, _ = run_script(SCRIPT, "--table")
    runs = json.loads((ROOT / "benchmarks" / "results" / "within_run.json").read_text())
    tau = {value: {run: names["judge"](runs[run], value)[0] for run in runs} for value in ("rdi", "roby", "fim")}
    pages = {name: " ".join((ROOT / "docs" / f"{name}.md").read_text().split()) for name in ("rdi", "roby", "fisher")}

    natural = [tau["rdi"][run] for run in runs if "natural" in run]
    adversarial = [tau["rdi"][run] for run in runs if "natural" not in run]
    assert f"Kendall's tau {min(natural):.2f} and {max(natural):.2f}" in pages["rdi"]
    assert f"({min(adversarial):.2f} to {max(adversarial):.2f})" in pages["rdi"]
    for value, page in (("roby", "roby"), ("fim", "fisher")):
        num_negative = sum(correlation < 0 for correlation in tau[value].values())
        assert f"negative in {num_negative} of {len(runs)}" in pages[page]


def make_history():
    """RDI is best in epoch 1, robust accuracy in epoch 4, on held-out images in epoch 3."""
    series = {
        "rdi": [0.3, 0.6, 0.5, 0.4, 0.3, 0.3, 0.2, 0.2, 0.1, 0.1],
        "adv_acc/pgd": [0.2, 0.3, 0.4, 0.45, 0.5, 0.45, 0.4, 0.35, 0.3, 0.3],
        "truth": [0.2, 0.3, 0.4, 0.52, 0.5, 0.45, 0.4, 0.35, 0.3, 0.3],
    }
    rows = [dict(zip(series, values, strict=True)) for values in zip(*series.values(), strict=True)]
    return [{"epoch": epoch, "acc": 0.9, **row} for epoch, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("rule", "epoch", "trained", "lost"),
    [
        ("no stop", 4, 10, 2.0),
        ("RDI confirmed by PGD", 4, 7, 2.0),  # two evaluations after PGD's best one
        ("PGD alone", 4, 8, 2.0),
        ("RDI alone", 1, 5, 22.0),
    ],
)
def test_rules_are_replayed_by_the_callbacks(run_script, rule, epoch, trained, lost):
    names, _ = run_script(SCRIPT, "--table")
    history = make_history()
    (settings,) = [own for name, own in names["STOPS"].items() if name.startswith(rule)]
    assert names["replay"](history, *settings) == {"epoch": epoch, "trained": trained}
    assert names["points_lost"](history, epoch) == pytest.approx(lost)


def test_all_columns_have_one_baseline(run_script):
    names, _ = run_script(SCRIPT, "--table")
    history = make_history()
    parts = {"kept": {"rdi": {"epoch": 1}}, "stopped": {"rdi": {"epoch": 2}}}
    tau, *lost = names["judge"]({"history": history, **parts}, "rdi")
    assert lost == pytest.approx([22.0, 22.0, 12.0])
    assert -1 < tau < 1
