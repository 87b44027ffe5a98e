import html
import random
from pathlib import Path

import pytest
import scipy.stats

from lightning_robustness import InputSpace, RobustModelCheckpoint, RobustnessMonitor
from lightning_robustness._display.drawing import new_figure
from lightning_robustness._display.run_figures import history_figure
from lightning_robustness._lightning.summary import RunSummary, run_page, run_verdict
from lightning_robustness._measurement.verdict import kept_epoch
from tests.callbacks.test_robust_model_checkpoint import fit

ACC = [0.60, 0.95, 0.94, 0.93, 0.95, 0.95]
ROBUST = [0.10, 0.40, 0.55, 0.50, 0.35, 0.30]
RDI = [0.90, 0.30, 0.40, 0.50, 0.45, 0.60]
FIM = [9.00, 5.00, 2.00, 3.00, 6.00, 7.00]


def history(**changes):
    columns = {"acc": ACC, "adv_acc/pgd": ROBUST, "rdi": RDI, "fim": FIM, **changes}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    extra = {"samples_attacks": 200, "seconds/pgd": 1.5, "seconds/fim": 0.25, "masking": 0.0}
    return [{"epoch": epoch, "step": 10 * epoch, **row, **extra} for epoch, row in enumerate(rows)]


def test_values():
    summary = RunSummary.of(history())
    assert (summary.kept.reference, summary.epoch, summary.accuracy) == ("adv_acc/pgd", 2, 0.55)
    expected = scipy.stats.binomtest(110, 200).proportion_ci(method="wilson")
    assert summary.interval == pytest.approx((expected.low, expected.high), abs=1e-6)
    assert summary.choices["rdi"][:4] == (0, pytest.approx(45.0), 5, pytest.approx(25.0))
    assert summary.choices["fim"][:4] == (2, pytest.approx(0.0), 2, pytest.approx(0.0))
    assert summary.choices["rdi"].trust == pytest.approx(scipy.stats.kendalltau(RDI, ROBUST).statistic)
    assert summary.choices["fim"].trust == pytest.approx(-scipy.stats.kendalltau(FIM, ROBUST).statistic)
    assert summary.seconds == {"pgd": 9.0, "fim": 1.5}
    assert summary.masked_epochs == []


def test_five_lines():
    tau = scipy.stats.kendalltau(RDI, ROBUST).statistic
    summary = RunSummary.of(history(), notes=["ROBY failed"])
    titles, texts = zip(*summary.lines(), strict=True)
    assert titles == ("verdict", "attack-free values", "gradient masking", "notes", "monitoring overhead")
    assert texts[0] == (
        "epoch 2 most robust (RobustModelCheckpoint would keep it): 55.0 % accuracy under pgd (95 % interval 48-62 %, "
        "n = 200), 94.0 % clean"
    )
    assert f"RDI contradicted them (tau {tau:+.2f}, its epoch 45.0 points lower)" in texts[1]
    assert "Fisher information followed the attacks (tau +1.00, its epoch 0.0 points lower)" in texts[1]
    assert "by pgd in 6 evaluations" in texts[2]
    assert texts[3:] == ("ROBY failed", "10.5 s (pgd 9.0, fim 1.5)")


@pytest.mark.parametrize(
    ("space", "text"), [(None, "3.1/255"), (InputSpace(), "3.1/255"), (InputSpace(high=255), "0.0121")]
)
def test_distance_to_the_boundary_of_the_kept_epoch(space, text):
    lines = dict(RunSummary.of(history(boundary=[0.5, 0.4, 0.0121, 0.3, 0.2, 0.1]), space).lines())
    assert lines["attack-free values"].endswith(f"median distance to the boundary {text}")


def test_signs_of_masking_and_the_worst_case():
    rows = history(**{"adv_acc/worst": ROBUST})
    rows[3]["masking"] = rows[5]["masking"] = 1.0
    text = str(RunSummary.of(rows))
    assert "55.0 % accuracy under all attacks" in text
    assert "signs in epochs 3, 5: accuracy under attack is too high" in text


def test_an_epoch_that_was_kept_without_an_attack_is_named_as_such():
    rows = history()
    for epoch in (1, 3, 4):
        del rows[epoch]["adv_acc/pgd"]
    kept = kept_epoch(rows, checkpoint=("rdi", 30))
    summary = RunSummary.of(rows, kept=kept)
    assert (summary.epoch, summary.accuracy) == (2, 0.55)
    start = "epoch 3 kept, not attacked; epoch 2 most robust"
    assert dict(summary.lines())["verdict"].startswith(f"{start}: 55.0 % accuracy under pgd")
    assert run_verdict(summary, rows, "").startswith(f"E{start[1:]}: 55.0 %")
    figure = history_figure(rows, "robustness", kept=kept)
    assert figure.texts[0].get_text().replace("\n", " ") == f"robustness: {start}, 55.0 % under pgd"
    assert [line.get_xdata() for line in figure.axes[1].lines][-1] == [3, 3]


def test_an_epoch_that_was_kept_with_its_attack():
    kept = kept_epoch(history(), checkpoint=("rdi", 30))
    assert kept.is_checkpoint
    assert dict(RunSummary.of(history(), kept=kept).lines())["verdict"].startswith("epoch 3 kept: 50.0 % accuracy")


def test_few_evaluations_have_no_trust():
    summary = RunSummary.of(history()[:3])
    assert summary.choices["rdi"] == (0, pytest.approx(45.0), 2, pytest.approx(0.0), None)
    assert "too few evaluations" in str(summary)


def test_without_attacks():
    lines = dict(RunSummary.of([{"epoch": 0, "rdi": 0.5, "seconds/features": 0.01}]).lines())
    assert lines["verdict"] == "not known, as no attack ran"
    assert lines["gradient masking"] == "not checked"
    assert lines["monitoring overhead"] == "0.0 s"
    assert dict(RunSummary.of([]).lines())["verdict"].startswith("not known")


RANDOM = random.Random(0)
RUNS = [
    [(0.9, 0.500), (0.8, 0.504), (0.7, 0.508)],  # the second is tied with the third, but was not kept
    [(0.80, 0.530), (0.81, 0.527), (0.85, 0.48)],
    [(0.8, 0.5), (0.8, 0.5)],
    *([(RANDOM.choice([0.7, 0.8, 0.9]), RANDOM.choice([0.5, 0.504, 0.508])) for _ in range(6)] for _ in range(3)),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_most_robust_epoch_is_the_one_that_a_checkpoint_keeps(run, tmp_path):
    acc, robust = (list(values) for values in zip(*run, strict=True))
    columns = {"acc": acc, "adv_acc/pgd": robust}
    rows = [dict(zip(columns, values, strict=True)) | {"samples_attacks": 200} for values in run]
    summary = RunSummary.of([{"epoch": epoch, "step": epoch, **row} for epoch, row in enumerate(rows)])
    checkpoint = RobustModelCheckpoint("robustness/adv_acc/pgd", dirpath=tmp_path, filename="{epoch}")
    assert {summary.epoch} == fit(tmp_path, checkpoint, robust, acc=acc)
    assert (summary.accuracy, summary.kept.entry["acc"]) == (robust[summary.epoch], acc[summary.epoch])


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
    page = run_page(HISTORY, monitor.settings, new_figure(3, 2), RunSummary.of(HISTORY))
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
    monitor.history.extend(HISTORY)
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
