"""Weights & Biases, offline, and MLflow, in a local store, as they are."""

import numpy as np
import pytest
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger
from PIL import Image

from lightning_robustness import RobustnessMonitor
from lightning_robustness._display.drawing import render
from tests.callbacks.modules import Classifier, make_trainer, train_loader, val_loader

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
# Everything but the picture of the run: in the first of three evaluations, and at the end
SLOW = ("examples/fgsm", "boundary_curve", "classes")


def fit(path, logger):
    monitor = RobustnessMonitor(attacks=("fgsm",), eps=0.1, fim_samples=16, attack_samples=32, attack_every_n_epochs=1)
    make_trainer(path, monitor, max_epochs=3, logger=logger).fit(Classifier(), train_loader(), val_loader())
    return monitor


def last_picture(monitor):
    return render(monitor.plot())


@pytest.mark.slow
def test_mlflow(tmp_path):
    pytest.importorskip("mlflow", reason="MLflow is not installed")
    store = {"tracking_uri": f"sqlite:///{tmp_path}/store.db", "artifact_location": str(tmp_path / "artifacts")}
    logger = MLFlowLogger("experiment", **store)
    monitor = fit(tmp_path, logger)
    rdi = logger.experiment.get_metric_history(logger.run_id, "robustness/rdi")
    assert [point.value for point in rdi] == pytest.approx([entry["rdi"] for entry in monitor.history])
    folder = tmp_path / "artifacts" / logger.run_id / "artifacts"
    names = [file.name.split("+") for file in (folder / "images").glob("*.png")]
    steps = {"robustness": [9, 19, 29], **{f"robustness/{name}".replace("/", "~"): [9, 30] for name in SLOW}}
    assert {parts[0] for parts in names} == steps.keys()
    for name, expected in steps.items():
        assert sorted(int(parts[2]) for parts in names if parts[0] == name) == expected
    (file,) = (folder / "images").glob("robustness+step+29+*.png")
    np.testing.assert_array_equal(np.asarray(Image.open(file).convert("RGB")), last_picture(monitor))
    texts = {file.stem: file.read_text() for file in (folder / "robustness").glob("*.md")}
    assert texts.keys() == {"glossary", "settings", "summary"}
    assert "- **rdi**: RDI of the logits" in texts["glossary"]
    assert f"- **verdict**: epoch {monitor.summary().epoch} most robust" in texts["summary"]


@pytest.mark.slow
def test_weights_and_biases(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(offline=True, save_dir=tmp_path, project="project")
    try:
        monitor = fit(tmp_path, logger)
    finally:
        logger.experiment.finish()
        wandb.teardown()  # waits until its own process has written everything
    (media,) = tmp_path.glob("wandb/offline-run-*/files/media")
    for name in SLOW:
        assert len([*(media / "images" / "robustness").glob(f"{name}_*.png")]) == 2
    pictures = [np.asarray(Image.open(path).convert("RGB")) for path in (media / "images").glob("robustness_*.png")]
    assert len(pictures) == 3
    expected = last_picture(monitor)
    assert any(np.array_equal(picture, expected) for picture in pictures)
    assert {path.name.split("_")[0] for path in (media / "table" / "robustness").iterdir()} == {
        *("glossary", "settings", "summary")
    }
