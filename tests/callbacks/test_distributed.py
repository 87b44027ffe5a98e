import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_robustness import RobustnessMonitor
from lightning_robustness._measurement.keys import name_of
from tests.callbacks.distributed_fit import NUM_SAMPLES, as_torchrun_would, fit, validate
from tests.callbacks.modules import Classifier, make_trainer, train_loader, val_loader
from tests.processes import START_METHOD
from tests.test_any_batch import FREE, Data, Transformer, embed, settings

ROOT = Path(__file__).parent.parent.parent


def assert_same_values(values, expected):
    assert values.keys() == expected.keys()
    assert expected["acc"] > 0.5
    assert values == pytest.approx(expected, rel=1e-6, abs=1e-6)


def fit_as_one_of_two(rank, path):
    as_torchrun_would(rank)
    return fit(path, strategy="ddp", devices=2)


@pytest.mark.filterwarnings("ignore:RobustnessMonitor. gradients seem to be masked")
def test_two_processes_keep_the_epoch_of_one(tmp_path, two_processes):
    kept, verdict, history = fit(tmp_path / "one")
    first, second = two_processes(fit_as_one_of_two, tmp_path / "two")
    assert first[0] == second[0] == kept != ""
    assert first[1] == second[1] == verdict
    for values, others, expected in zip(first[2], second[2], history, strict=True):
        assert values == others
        assert values == pytest.approx(expected, rel=1e-6, abs=1e-6)


def validate_as_one_of_two(rank, path, storage):
    as_torchrun_would(rank)
    return validate(path, storage, strategy="ddp", devices=2)


@pytest.mark.filterwarnings("ignore:RobustnessMonitor. gradients seem to be masked")
@pytest.mark.parametrize("storage", ["exact", "streaming"])
def test_two_processes_log_the_values_of_one(tmp_path, two_processes, storage):
    expected = validate(tmp_path, storage)
    first, second = two_processes(validate_as_one_of_two, tmp_path, storage)
    assert first == second
    assert expected["samples"] == first["samples"] == NUM_SAMPLES
    assert first["samples_attacks"] == NUM_SAMPLES
    assert first["samples_fim"] == 51
    assert_same_values(first, expected)


def watch_tokens(rank, path):
    """Watch every second batch of a network of tokens."""
    as_torchrun_would(rank)
    monitor = RobustnessMonitor(**settings(embed_fn=embed), log_figures=False)
    trainer = make_trainer(path, monitor, strategy="ddp", devices=2, use_distributed_sampler=False)
    batches = list(Data(Transformer()).batches("tokens"))[rank::2]
    trainer.validate(Transformer(), DataLoader(batches, batch_size=None), verbose=False)
    metrics = trainer.callback_metrics.items()
    return {name: value.item() for key, value in metrics if (name := name_of("robustness", key))}


@pytest.mark.filterwarnings("ignore:RobustnessMonitor. gradients seem to be masked")
def test_masks_and_embeddings(tmp_path, two_processes):
    first, second = two_processes(watch_tokens, tmp_path)
    Data(Transformer()).check(first, FREE)
    assert first == second


@pytest.mark.filterwarnings("ignore:RobustnessMonitor. gradients seem to be masked")
def test_two_torchrun_nodes_log_the_values_of_one_process(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"),
        *("--master_addr=localhost", f"--master_port={port}"),
    ]
    script = ["-m", "tests.callbacks.distributed_fit", str(tmp_path)]
    nodes = [subprocess.Popen([*command, f"--node_rank={rank}", *script], cwd=ROOT) for rank in range(2)]
    assert [node.wait(timeout=120) for node in nodes] == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert_same_values(first, validate(tmp_path))


@pytest.mark.filterwarnings("ignore")
def test_the_history_survives_processes_that_lightning_starts(tmp_path):
    monitor = RobustnessMonitor(attacks=["fgsm"], fim_samples=4, attack_samples=8, log_figures=False)
    trainer = make_trainer(tmp_path, monitor, max_epochs=2, strategy=DDPStrategy(start_method=START_METHOD), devices=1)
    trainer.fit(Classifier(), train_loader(size=32), val_loader(size=32))
    assert [entry["epoch"] for entry in monitor.history] == [0, 1]
    assert monitor.history[-1]["acc"] == pytest.approx(trainer.callback_metrics["robustness/acc"].item())
    assert "2 evaluations" in repr(monitor)
