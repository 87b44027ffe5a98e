import re
import runpy
from pathlib import Path

import lightning as L
import pytest
import torch
from matplotlib.image import imread

from lightning_robustness import RobustEarlyStopping, RobustModelCheckpoint, RobustnessMonitor
from tests.references import rdi, roby

EXAMPLES = Path(__file__).parents[2] / "examples"

ATTACKED = ["adv_acc/pgd", "adv_acc/square", "adv_acc/cw", "adv_acc/worst", "distortion/cw"]
COLUMNS = ["acc", "rdi", "roby", "fim", *ATTACKED]


def test_quickstart_prints_the_values_that_it_logs(run_example, logged, tmp_path):
    names, output = run_example("quickstart.py", "--epochs", "2")
    table = [line.split() for line in output.splitlines() if re.fullmatch(r" +\d+(  +[\d.-]+){9}", line)]
    assert [row[0] for row in table] == ["0", "1"]
    for column, key in enumerate(COLUMNS, start=1):
        assert [row[column] for row in table] == [f"{value:.3f}" for value in logged(f"robustness/{key}").values()]
    assert all(0 < value < 1 for value in logged("robustness/asr/cw").values())
    assert "tensorboard --logdir" in output.splitlines()[-1]

    # The first cards have labelled lines, each of which is a run of its own
    charts = {
        "1 accuracy": {"clean": "acc", **{name: f"adv_acc/{name}" for name in ("pgd", "cw", "square", "worst")}},
        "2 success rate": {name: f"asr/{name}" for name in ("pgd", "cw", "square", "worst")},
        "3 RDI, ROBY, Fisher": {name: name for name in ("rdi", "roby", "fim")},
    }
    for title, lines in charts.items():
        for line, name in lines.items():
            shown = logged(f"Overview of robustness/{title}", f"version_0/{line}")
            assert shown == pytest.approx(logged(f"robustness/{name}"))

    picture = imread(tmp_path / "robustness.png")[..., :3]
    assert picture.std(axis=(0, 1)).min() > 0.05

    model = names["DigitsClassifier"]()
    model.load_state_dict(torch.load(next(tmp_path.rglob("*.ckpt")), weights_only=False)["state_dict"])
    images, labels = (torch.cat(parts) for parts in zip(*names["digits_loaders"]()[1], strict=True))
    with torch.no_grad():
        embedding, logits = model.network[:-1](images), model(images)
    preds = logits.argmax(dim=1)
    assert float(table[1][1]) == pytest.approx((preds == labels).double().mean().item(), abs=6e-4)
    assert float(table[1][2]) == pytest.approx(rdi(logits, preds)["rdi"], abs=6e-4)
    assert float(table[1][3]) == pytest.approx(roby(embedding, preds)["roby"], abs=6e-4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_the_callbacks_of_the_readme_keep_a_robust_epoch(seed, tmp_path, monkeypatch):
    """Stopping on RDI alone kept epoch 0 in two of three such runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # restored at the end
    monkeypatch.syspath_prepend(str(EXAMPLES))
    quickstart = runpy.run_path(str(EXAMPLES / "quickstart.py"))
    readme, names = (EXAMPLES.parent / "README.md").read_text(), {}
    exec(re.search(r"```python\n(.*?)```", readme, flags=re.DOTALL).group(1), names)
    callbacks = [
        callback
        for callback in names["trainer"].callbacks
        if isinstance(callback, (RobustModelCheckpoint, RobustEarlyStopping))
    ]
    assert len(callbacks) == 2

    L.seed_everything(seed, verbose=False)
    monitor = RobustnessMonitor(eps=0.1, log_figures=False)
    trainer = L.Trainer(
        max_epochs=8, callbacks=[monitor, *callbacks], enable_model_summary=False, enable_progress_bar=False
    )
    trainer.fit(quickstart["DigitsClassifier"](), *quickstart["digits_loaders"]())
    kept = int(re.search(r"epoch=(\d+)", trainer.checkpoint_callback.best_model_path).group(1))
    robust = {row["epoch"]: row["adv_acc/pgd"] for row in monitor.history if "adv_acc/pgd" in row}
    assert robust[kept] >= max(robust.values()) - 0.005 - 1e-6
    assert trainer.checkpoint_callback.best_model_score.item() == pytest.approx(robust[kept])
