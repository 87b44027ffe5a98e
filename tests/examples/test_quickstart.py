import re

import pytest
import torch
from matplotlib.image import imread

from tests.references import rdi, roby

COLUMNS = ["acc", "rdi", "roby", "fim", "adv_acc/pgd", "adv_acc/square", "adv_acc/worst", "distortion/cw"]


def test_quickstart_prints_the_values_that_it_logs(run_example, logged, tmp_path):
    names, output = run_example("quickstart.py", "--epochs", "2")
    table = [line.split() for line in output.splitlines() if re.fullmatch(r" +\d+(  +[\d.-]+){8}", line)]
    assert [row[0] for row in table] == ["0", "1"]
    for column, key in enumerate(COLUMNS, start=1):
        assert [row[column] for row in table] == [f"{value:.3f}" for value in logged(f"robustness/{key}").values()]
    assert "tensorboard --logdir" in output.splitlines()[-1]

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
