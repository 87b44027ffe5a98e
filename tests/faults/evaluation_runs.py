"""Evaluations of which one part is interrupted, fails or is killed at a sample of its second batch."""

import os
import signal
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_robustness.attacks import PGD
from lightning_robustness.evaluation import evaluate, sweep
from tests.evaluation.distributed_evaluation import without_times
from tests.faults.monitor_runs import make_data, make_inputs, make_network

NOTHING = {"attacks": (), "fim_samples": 0, "batch_size": 4}
ATTACK = {"pgd": PGD(eps=0.1, steps=3)}
# What else is measured besides the features; batches of the loader are larger, also if two processes share them
PARTS = {
    "features": NOTHING,
    "fim": {**NOTHING, "fim_samples": 24},
    "clever": {**NOTHING, "clever_samples": 6, "batch_size": 2},
    "attack": {**NOTHING, "attacks": ATTACK},
    "sweep": {**NOTHING, "sweep_budgets": [0.05, 0.1], "sweep_attacks": ["fgsm", "pgd"]},
    "decision space": {**NOTHING, "decision_space": "pca"},
}
NUM_SAMPLES = {"clever": 6}
# Not in the first batch, in one process and in two
MARKED = {"features": 20, "clever": 5}


def kill(message):
    os.kill(os.getpid(), signal.SIGKILL)


class Trap(nn.Module):
    """Acts when it sees the marked sample: in a batch of the loader for the features, in a smaller one otherwise."""

    def __init__(self, part, action):
        super().__init__()
        self.network = make_network()
        self.marked = make_inputs()[MARKED.get(part, 10)]
        self.least = 5 if part == "features" else 0
        self.most = 24 if part == "features" else PARTS[part]["batch_size"]
        self.action = action

    def forward(self, x):
        if self.action is not None and self.least <= len(x) <= self.most and (x == self.marked).all(dim=1).any():
            raise self.action("enough")
        return self.network(x)


def evaluate_part(part, action=None, **options):
    """Evaluate with one part besides the features; return the report as JSON."""
    loader = DataLoader(make_data(NUM_SAMPLES.get(part, 24)), batch_size=12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, options = Trap(part, action), {**PARTS[part], "attack_samples": 24, **options}
        return without_times(evaluate(model, loader, per_sample=True, progress=False, **options))


def describe(part, action):
    try:
        return evaluate_part(part, action)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


class Masked(nn.Module):
    """Classifies the mean of the positions that are no padding."""

    def __init__(self):
        super().__init__()
        self.network = make_network()

    def forward(self, x, mask):
        return self.network((x * mask.unsqueeze(2)).sum(dim=1) / mask.sum(dim=1, keepdim=True))


def make_padded():
    """A loader of samples of one to five positions, two of them padded to a batch."""
    samples = make_inputs(sum(1 + number % 5 for number in range(24))).split([1 + number % 5 for number in range(24)])
    data = TensorDataset(torch.arange(24), make_data()[:][1])

    def pad(rows):
        x = [samples[number] for number, _ in rows]
        mask = [torch.ones(len(sample), dtype=torch.float64) for sample in x]
        padded = (nn.utils.rnn.pad_sequence(values, batch_first=True) for values in (x, mask))
        return dict(zip(("x", "mask"), padded, strict=True), labels=torch.stack([y for _, y in rows]))

    return DataLoader(data, batch_size=2, collate_fn=pad)


def evaluate_masked():
    """Padded batches of several lengths with masks; evaluate and sweep."""
    attacks, budgets = {"pgd": PGD(eps=0.1, steps=3, start="clean")}, [0.05, 0.1]
    options = {"per_sample": True, "progress": False, "batch_size": 2}
    kinds = {"sweep_budgets": budgets, "decision_space": "pca", **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "evaluate": without_times(evaluate(Masked(), make_padded(), attacks, **kinds)),
            "sweep": without_times(sweep(Masked(), make_padded(), attacks, budgets, **options)),
        }


def run_all(rank, folder):
    """Everything in one of two processes."""
    return {
        "interrupted": {part: evaluate_part(part, KeyboardInterrupt) for part in PARTS},
        "failed": {part: describe(part, ValueError) for part in PARTS},
        "resumed": {part: evaluate_part(part, resume=folder / part) for part in PARTS},
        "masked": evaluate_masked(),
    }
