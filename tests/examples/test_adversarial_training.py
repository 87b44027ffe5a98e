import gzip
import re

import matplotlib.image
import numpy as np
from sklearn.datasets import load_digits

KEYS = ("acc", "adv_acc/pgd", "rdi", "fim")
VERSIONS = ("natural", "PGD", "fast", "TRADES", "attack-free")


def test_the_table_has_what_the_board_shows_of_all_versions(run_example, logged, tmp_path):
    _, output = run_example("adversarial_training.py", "--epochs", "1")
    rows = re.findall(r"^(\S+) +([\d.]+) +([\d.]+) +(-?[\d.]+) +([\d.]+)$", output, flags=re.MULTILINE)
    assert [name for name, *_ in rows] == list(VERSIONS)
    directory = tmp_path / "lightning_logs" / "adversarial_training"
    for name, *values in rows:
        last = [list(logged(f"robustness/{key}", directory / name).values())[-1] for key in KEYS]
        assert values == [f"{value:.3f}" for value in last]
        assert len(list((directory / name).glob("checkpoints/*.ckpt"))) == 1
    assert matplotlib.image.imread(tmp_path / "adversarial_training.png").shape == (1300, 1800, 4)
    assert "tensorboard --logdir lightning_logs/adversarial_training" in output


def test_files_of_fashion_mnist(run_example, tmp_path):
    images = np.kron(load_digits().images[:100], np.ones((4, 4)))[:, 2:30, 2:30] * 15
    labels = load_digits().target[:100]
    for name in ("train", "t10k"):
        for kind, header, values in (("images-idx3", 16, images), ("labels-idx1", 8, labels)):
            data = bytes(header) + values.astype(np.uint8).tobytes()
            (tmp_path / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(data))
    names, _ = run_example("adversarial_training.py", "--epochs", "1", "--data", str(tmp_path))
    train, validation = names["fashion_mnist_loaders"](tmp_path)
    assert train.dataset.tensors[0].shape == (100, 1, 28, 28)
    assert np.array_equal((validation.dataset.tensors[0][:, 0] * 255).numpy().round(), images)
    assert validation.dataset.tensors[1].tolist() == labels.tolist()
