"""An evaluation that is killed while it writes the third chunk of its sweep."""

import os
import signal
from pathlib import Path

import torch

from lightning_robustness.evaluation import resume
from tests.evaluation.distributed_evaluation import evaluate_all


def kill_in_the_sweep():
    replace, written = os.replace, []

    def replace_or_die(source, target):
        written.append(Path(target).name.startswith("sweep"))
        if sum(written) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    resume.os.replace = replace_or_die


def evaluate_and_die(folder):
    torch.set_num_threads(1)
    kill_in_the_sweep()
    evaluate_all(resume=folder)
