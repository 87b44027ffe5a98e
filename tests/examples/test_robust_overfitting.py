import re
import runpy
from pathlib import Path

import matplotlib.image
import pytest
import torch

from lightning_robustness import evaluate

ROOT = Path(__file__).parents[2]


def test_what_is_kept_is_the_most_robust_epoch(run_example, logged, tmp_path, caplog):
    _, output = run_example("robust_overfitting.py", "--epochs", "4", "--patience", "2")
    whole = list(logged("robustness/adv_acc/pgd", "version_0").values())
    acc, robust = (list(logged(f"robustness/{key}", "version_1").values()) for key in ("acc", "adv_acc/pgd"))

    best, epoch, last = re.search(r"PGD ([\d.]+) in epoch (\d), ([\d.]+) in epoch 3, the last", output).groups()
    assert (float(best), int(epoch)) == (pytest.approx(max(whole), abs=6e-4), whole.index(max(whole)))
    assert float(last) == pytest.approx(whole[3], abs=6e-4)

    stopped, kept = map(int, re.search(r"stopped after epoch (\d)\. .* kept epoch (\d)", output).groups())
    assert stopped == len(robust) - 1
    tied = [epoch for epoch, value in enumerate(robust) if value >= max(robust) - 0.005]
    assert kept == max(tied, key=lambda epoch: (acc[epoch], epoch))
    score, corrected = map(float, re.search(r"PGD ([\d.]+); ([\d.]+), corrected", output).groups())
    assert score == pytest.approx(robust[kept], abs=6e-4)
    assert 100 * corrected == pytest.approx(
        float(re.findall(r"([\d.]+) % accuracy under pgd", caplog.text)[-1]), abs=0.06
    )
    assert matplotlib.image.imread(tmp_path / "robust_overfitting.png").shape == (912, 1680, 4)


def test_the_recipe_with_averaged_weights(tmp_path, monkeypatch):
    """What is attacked, logged and kept are the averaged weights."""
    pytest.importorskip("lightning.pytorch.callbacks.weight_averaging", reason="averaging is in lightning 2.6 or later")
    monkeypatch.chdir(tmp_path)
    quickstart = runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    page, names = (ROOT / "docs" / "stopping.md").read_text(), {}
    recipe = re.search(r"```py\n(.*?)```", page, flags=re.DOTALL).group(1)
    exec(recipe.replace("max_epochs=200", "max_epochs=2, enable_progress_bar=False, enable_model_summary=False"), names)
    model, (train, held_out) = quickstart["DigitsClassifier"](), quickstart["digits_loaders"]()
    names["trainer"].fit(model, train, held_out)

    kept = torch.load(names["trainer"].checkpoint_callback.best_model_path, weights_only=False)
    model.load_state_dict(kept["state_dict"])
    settings = {"eps": 8 / 255, "strength": "fast", "attack_samples": 1024, "progress": False}
    logged, found = names["callbacks"][0].history[kept["epoch"]], evaluate(model, held_out, ("pgd",), **settings)
    for name in ("acc", "rdi", "adv_acc/pgd"):
        assert found.metrics[name] == pytest.approx(logged[name], abs=1e-6)
    current = kept["current_model_state"]
    assert any(not torch.equal(current[name], value) for name, value in kept["state_dict"].items())
