import re

import pytest
import torch

from tests.references import rdi


def test_a_network_that_hears_is_watched(run_example, logged, tmp_path):
    names, output = run_example("text_or_audio.py", "--epochs", "1")
    [row] = re.findall(r"^ +0 +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", output, flags=re.MULTILINE)
    keys = ["acc", "rdi", "fim", "adv_acc/pgd", "adv_acc/siren"]
    assert list(row) == [f"{value:.3f}" for key in keys for value in logged(f"robustness/{key}").values()]
    assert {"robustness/examples/pgd", "robustness/examples/siren"} <= set(logged()["images"])

    model = names["Listener"]()
    model.load_state_dict(torch.load(next(tmp_path.rglob("*.ckpt")), weights_only=False)["state_dict"])
    waves, labels = names["sounds"](500, seed=1).tensors
    assert waves.shape == (500, 1, 512)
    assert waves.abs().amax(dim=2).unique().tolist() == [1.0]
    with torch.no_grad():
        logits = model(waves)
    preds = logits.argmax(dim=1)
    assert float(row[0]) == pytest.approx((preds == labels).double().mean().item(), abs=6e-4)
    assert float(row[1]) == pytest.approx(rdi(logits, preds)["rdi"], abs=6e-4)
    assert list(logged("robustness_details/samples_attacks").values()) == [100.0]
