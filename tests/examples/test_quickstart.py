import re
import subprocess
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.py"


def test_quickstart_prints_the_values_that_it_logs(tmp_path):
    result = subprocess.run(
        [sys.executable, str(QUICKSTART), "--epochs", "2"], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    table = re.findall(r"^ +\d+ +([\d.]+) +([-\d.]+) +([\d.]+)$", result.stdout, flags=re.MULTILINE)
    events = EventAccumulator(str(next((tmp_path / "lightning_logs").glob("*/events*")))).Reload()
    for column, tag in enumerate(["val_acc", "rdi", "roby"]):
        assert [row[column] for row in table] == [f"{event.value:.3f}" for event in events.Scalars(tag)]
    assert len(table) == 2
    assert "tensorboard --logdir" in result.stdout.splitlines()[-1]
