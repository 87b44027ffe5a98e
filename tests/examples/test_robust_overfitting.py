import re

import matplotlib.image
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def test_what_is_kept_is_the_most_robust_epoch(run_example, tmp_path):
    _, output = run_example("robust_overfitting.py", "--epochs", "4", "--patience", "2")
    curves = []
    for version in ("version_0", "version_1"):
        events = EventAccumulator(str(next((tmp_path / "lightning_logs" / version).glob("events*")))).Reload()
        curves.append([[e.value for e in events.Scalars(f"robustness/{key}")] for key in ("acc", "adv_acc/pgd")])
    (_, whole), (acc, robust) = curves

    best, epoch, last = re.search(r"PGD ([\d.]+) in epoch (\d), ([\d.]+) in epoch 3, the last", output).groups()
    assert (float(best), int(epoch)) == (pytest.approx(max(whole), abs=6e-4), whole.index(max(whole)))
    assert float(last) == pytest.approx(whole[3], abs=6e-4)

    stopped, kept = map(int, re.search(r"stopped after epoch (\d)\. .* kept epoch (\d)", output).groups())
    assert stopped == len(robust) - 1
    tied = [epoch for epoch, value in enumerate(robust) if value >= max(robust) - 0.005]
    assert kept == max(tied, key=lambda epoch: (acc[epoch], epoch))
    assert f"accuracy under PGD {robust[kept]:.3f}." in output
    assert matplotlib.image.imread(tmp_path / "robust_overfitting.png").shape == (480, 840, 4)
