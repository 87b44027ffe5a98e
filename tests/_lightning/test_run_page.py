import html
from pathlib import Path

import pytest

from lightning_robustness import RobustnessMonitor
from lightning_robustness._display.drawing import new_figure
from lightning_robustness._lightning.summary import RunSummary, run_page, run_verdict


def entry(epoch, accuracy, **values):
    return {"epoch": epoch, "step": 9 * epoch, "acc": 0.75, "rdi": 0.1 * epoch, "adv_acc/worst": accuracy} | values


WOULD = "most robust (RobustModelCheckpoint would keep it)"
HISTORY = [entry(epoch, (epoch + 1) / 10, samples_attacks=100.0, masking=0.0) for epoch in range(6)]


def verdict(history, budget="8/255"):
    return run_verdict(RunSummary.of(history), history, budget)


def test_verdict_names_the_most_robust_epoch():
    expected = f"Epoch 5 {WOULD}: 60.0 % robust accuracy at 8/255 (95 % interval 50-69 %, n = 100), 75.0 % clean"
    assert verdict(HISTORY) == f"{expected}; no signs of masked gradients."
    masked = [*HISTORY[:-1], HISTORY[-1] | {"masking": 1.0}]
    assert verdict(masked) == f"{expected}; signs of masked gradients in epochs 5, so the true value may be lower."
    unchecked = [{name: value for name, value in row.items() if name != "masking"} for row in HISTORY]
    assert verdict(unchecked) == f"{expected}; masked gradients were not checked."


def test_verdict_without_all_attacks():
    history = [{"epoch": 0, "step": 9, "adv_acc/pgd": 0.5, "samples_attacks": 100.0}]
    assert verdict(history).startswith(
        f"Epoch 0 {WOULD}: 50.0 % accuracy under pgd at 8/255 (95 % interval 40-60 %, n = 100)"
    )
    assert verdict(history, "").startswith(f"Epoch 0 {WOULD}: 50.0 % accuracy under pgd (95 % interval 40-60 %")
    assert verdict([{"epoch": 0, "step": 9, "rdi": 0.5}]) == (
        "The most robust of 1 evaluations is unknown, as no attack ran."
    )
    assert verdict([]) == "Nothing was measured: there was no validation epoch to watch."


def test_tables_have_the_history():
    monitor = RobustnessMonitor(eps=8 / 255)
    page = run_page(HISTORY, monitor.settings, new_figure(3, 2))
    tables = {table.title: table for table in page.tables}
    attacks = tables["Attacks, by epoch"]
    assert attacks.header == ["epoch", "adv_acc/worst", "masking"]
    assert attacks.rows == [[epoch, (epoch + 1) / 10, 0.0] for epoch in range(6)]
    features = tables["RDI, ROBY and accuracy, by epoch"]
    assert (features.header, features.rows[2]) == (["epoch", "rdi", "acc"], [2, 0.2, 0.75])
    (choice,) = tables["Epochs that attack-free metrics would have picked"].rows
    assert choice == ["RDI", 5, 0.0, 5, 0.0, pytest.approx(1.0)]
    assert dict(tables["Settings"].rows) == monitor.settings.describe()
    assert page.facts["budget"] == "8/255"
    assert page.provenance["seed"] == "0"
    assert [row[0] for row in page.glossary.rows] == ["rdi", "acc", "adv_acc/<attack>", "masking"]


def test_monitor_writes_its_page(tmp_path):
    monitor = RobustnessMonitor(attacks=["pgd"], eps=8 / 255, prefix="a<b>")
    monitor.history = HISTORY
    page = monitor.to_html(tmp_path / "run.html")
    assert Path(tmp_path / "run.html").read_text() == page
    assert "<h1>Training run, a&lt;b&gt;</h1>" in page
    assert "a<b>: epoch 5 most robust, 60.0 % under all" in html.unescape(page)
    assert verdict(HISTORY) in html.unescape(page).replace("\u00a0", " ").replace("\u2011", "-")
    assert page.count("<svg") == 1


def test_page_of_a_run_without_evaluations():
    page = RobustnessMonitor().to_html()
    assert "Nothing was measured" in page
    assert "<svg" not in page
