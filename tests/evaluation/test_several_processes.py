"""Reports of several processes are those of one."""

from datetime import timedelta

import lightning as L
import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_robustness import _processes as processes
from lightning_robustness._processes import Processes, ProcessesLostError
from lightning_robustness.attacks import PGD
from lightning_robustness.evaluation import evaluate
from tests.callbacks.distributed_fit import as_torchrun_would
from tests.evaluation.distributed_evaluation import (
    EPS,
    make_data,
    make_errors,
    make_network,
    make_reports,
    without_times,
)
from tests.golden.runs import differences
from tests.processes import start_processes
from tests.zoo import Trained

pytestmark = pytest.mark.filterwarnings("ignore:.* could not be measured")


@pytest.fixture(scope="module")
def expected():
    return make_reports()


def test_two_processes(two_processes, expected):
    first, second = two_processes(make_reports)
    assert first == second
    assert differences(first, expected, tolerance=1e-9) == []
    # The results are neither trivial nor of the first process alone
    everything = expected["everything"]
    assert 0 < everything["rates"]["pgd"]["adv_acc"] < 1
    assert 0 < everything["rates"]["square"]["asr"] < 1
    assert everything["metrics"]["samples"] == 37
    assert len(everything["per_sample"]["index"]) == 23
    assert everything["per_sample"]["index"] == sorted(set(everything["per_sample"]["index"]))
    assert len(everything["decision_space"]["clean"]) == 23
    assert expected["divided"]["index"] == list(range(37))
    assert expected["few"]["sweep"]["samples"] == 2
    assert list(expected["comparison"]["failed"]) == ["b"]


def test_three_processes(expected):
    with start_processes(3) as run:
        results = run(make_reports)
    assert all(result == results[0] for result in results)
    assert differences(results[0], expected, tolerance=1e-9) == []


MESSAGES = {
    "slow attack": "ValueError: the third cable is loose",
    "weights": "ValueError: Expected the same weights in all processes but they differ. Load the same checkpoint",
    "order": "ValueError: Expected the loader to go through the data in the same order in all processes but the",
    "sampler": "ValueError: Expected a DistributedSampler for 2 processes but it divides the samples among 7. Pass",
    "same": "ValueError: Expected a share of the data in each process but all of them start with the same batch.",
    "same sweep": "ValueError: Expected a share of the data in each process but all of them start with the same",
    "empty": "ValueError: Expected `dataloader`",
    "wrapped": "ValueError: Expected a model that each process can use by itself but got DistributedDataParallel",
    "sharded": "ValueError: Expected a model that is whole in each process but the parameters of Sequential are",
}


def test_a_process_that_fails_ends_all_with_its_error(two_processes, expected):
    first, second = two_processes(make_errors)
    assert first["errors"].keys() == second["errors"].keys() == MESSAGES.keys()
    for name, message in MESSAGES.items():
        assert second["errors"][name].startswith(message), name
        own = f"OtherProcessError: Process 1 of 2 failed. {message}" if name == "slow attack" else message
        assert first["errors"][name].startswith(own), name
    assert first["calls"] < 19  # it did not attack all of its samples first
    # Within DistributedDataParallel, whose own forward would wait for the others
    assert first["ddp"] == second["ddp"] == pytest.approx(expected["everything"]["metrics"]["rdi"])


def start_alone(rank):
    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(processes, "_PATIENCE", timedelta(seconds=0.5))
            message = "all 2 processes to evaluate together but process 1 did not start within 0.5 seconds"
            with pytest.raises(ProcessesLostError, match=message):
                Processes()
    dist.barrier()
    return Processes().gather(rank)


def test_a_process_that_is_alone_says_so(two_processes):
    assert two_processes(start_alone) == [[0, 1], [0, 1]]


class EvaluateInTest(L.Callback):
    def on_test_epoch_end(self, trainer, pl_module):
        self.report = evaluate_with(pl_module, trainer.test_dataloaders)


def evaluate_with(model, loader):
    options = {"sweep_budgets": [EPS], "sweep_attacks": ["pgd"], "fim_samples": 11, "attack_samples": 11}
    report = evaluate(model, loader, {"pgd": PGD(eps=EPS)}, per_sample=True, progress=False, **options)
    return without_times(report)


def make_loader():
    return DataLoader(make_data(), batch_size=4)


def within_lightning(rank, path):
    as_torchrun_would(rank)
    callback = EvaluateInTest()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "default_root_dir": path}
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", callbacks=[callback], **options)
    trainer.test(Trained(make_network()), make_loader(), verbose=False)
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    module, loader = fabric.setup_module(Trained(make_network())), fabric.setup_dataloaders(make_loader())
    with pytest.raises(ValueError, match=r"DistributedDataParallel .*Pass the module within"):
        evaluate_with(module, loader)
    return callback.report, evaluate_with(module.module, loader)


def test_within_a_trainer_and_fabric(tmp_path, two_processes):
    expected = evaluate_with(Trained(make_network()), make_loader())
    for reports in two_processes(within_lightning, tmp_path):
        for report in reports:
            assert differences(report, expected, tolerance=1e-9) == []


def out_of_step(rank):
    """One process has left an evaluation that the other is still in."""
    outer, inner = Processes(), Processes()
    message = "all 2 processes to be in the same part of an evaluation but they are not"
    with pytest.raises(ProcessesLostError, match=message), outer.step():
        _ = inner.gather(None) if rank == 0 else None
    return Processes().gather(rank)


def test_processes_that_are_out_of_step_say_so(two_processes):
    assert two_processes(out_of_step) == [[0, 1], [0, 1]]
