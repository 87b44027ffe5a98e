"""Evaluations in one process or several."""

import json
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from lightning_robustness.attacks import PGD, MinimumNormCW, Square
from lightning_robustness.evaluation import compare, evaluate, sweep

# Odd, so that shares are uneven
NUM_SAMPLES = 37
EPS = 0.02


def _images(number):
    return torch.rand(number, 1, 8, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def make_network(seed=0):
    """A network in double precision, so that the arithmetic does not depend on the size of a batch."""
    torch.manual_seed(seed)
    layers = nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 8), nn.Tanh(), nn.Linear(8, 4)
    network = nn.Sequential(*layers).double()
    with torch.no_grad():  # so that it predicts all classes
        network[3].weight *= 5
        network[5].bias -= network(_images(200)).mean(dim=0)
    return network


def make_data(number=NUM_SAMPLES):
    """Images, most of them with the label that the network predicts."""
    x = _images(number)
    with torch.no_grad():
        y = make_network()(x).argmax(1)
    y[::9] = (y[::9] + 1) % 4
    return TensorDataset(x, y)


def attacks():
    cw = MinimumNormCW(initial_steps=4, steps=2)
    return {"pgd": PGD(eps=EPS, steps=4), "square": Square(eps=EPS, num_queries=20), "cw": cw}


class Interleaved(IterableDataset):
    """Gives process ``r`` of ``n`` the samples ``r``, ``r + n``, ..."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        rank, number = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        yield from (self.data[index] for index in range(rank, len(self.data), number))


def evaluate_all(**options):
    """Everything that a report can hold, from a loader that shuffles."""
    loader = DataLoader(make_data(), batch_size=8, shuffle=True)
    arguments = {"sweep_budgets": [0.01, EPS], "sweep_attacks": ["fgsm", "pgd"], "decision_space": "pca"}
    arguments |= {"attack_samples": 23, "fim_samples": 11, "clever_samples": 2, "batch_size": 5, "per_sample": True}
    return evaluate(make_network(), loader, attacks(), progress=False, **arguments | options)


def sweep_divided(**options):
    """A sweep of all samples, which a distributed sampler divides and pads."""
    data = make_data()
    sampler = DistributedSampler(data, shuffle=False) if dist.is_initialized() else None
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    options = {"per_sample": True, "attack_samples": None, "batch_size": 6, "progress": False, **options}
    return sweep(make_network(), loader, ["pgd"], [0.01, EPS], **options)


def _evaluate_by_sample(loader, **options):
    options |= {"sweep_budgets": [EPS], "sweep_attacks": ["fgsm"], "per_sample": True, "progress": False}
    return evaluate(make_network(), loader, {"pgd": PGD(eps=EPS)}, **options)


def evaluate_stream():
    """A stream that each process reads its part of; the number of samples is unknown."""
    loader = DataLoader(Interleaved(make_data()), batch_size=4)
    return _evaluate_by_sample(loader, fim_samples=9, attack_samples=9)


def evaluate_few():
    """Fewer samples than three processes."""
    loader = DataLoader(make_data(2), batch_size=4)
    return _evaluate_by_sample(loader, decision_space="pca")


def compare_some():
    """Three models, of which the second has other classes."""
    models = {"a": make_network(), "b": make_network()[:-1], "c": make_network(7)}
    loader = DataLoader(make_data(), batch_size=8)
    return compare(models, loader, ["fgsm", "pgd"], [0.01, EPS], attack_samples=20, fim_samples=0, progress=False)


REPORTS = {
    "everything": evaluate_all,
    "divided": sweep_divided,
    "stream": evaluate_stream,
    "few": evaluate_few,
    "comparison": compare_some,
}


def without_times(report):
    """The report as JSON, apart from times."""

    def clean(value):
        if isinstance(value, dict):
            return {key: clean(entry) for key, entry in value.items() if "seconds" not in key and key != "date"}
        return [clean(entry) for entry in value] if isinstance(value, list) else value

    return clean(json.loads(report.to_json()))


def make_reports(rank=None):
    return {name: without_times(make()) for name, make in REPORTS.items()}


def _text_of(function):
    try:
        function()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def make_errors(rank):
    """Errors as each process sees them."""
    last = dist.get_world_size() - 1
    loader, options = DataLoader(make_data(), batch_size=8), {"progress": False, "fim_samples": 0}
    shuffled = DataLoader(make_data(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(rank))
    sampler = DistributedSampler(make_data(), num_replicas=7, rank=rank)
    same = list(DataLoader(make_data(), batch_size=8))
    wrapped = nn.Sequential(nn.parallel.DistributedDataParallel(make_network()))
    sharded, x = make_network(), make_data()[:][0]
    for parameter in sharded.parameters():
        parameter.ds_id = 1  # as DeepSpeed marks them

    calls = []

    def slow_or_broken(model, x, y):
        calls.append(len(x))
        time.sleep(0.2)
        if rank == last:
            raise ValueError("the third cable is loose")
        return x

    cases = {
        "slow attack": lambda: evaluate(make_network(), loader, {"bad": slow_or_broken}, batch_size=1, **options),
        "weights": lambda: evaluate(make_network(rank), loader, (), **options),
        "order": lambda: evaluate(make_network(), shuffled, (), **options),
        "sampler": lambda: evaluate(make_network(), DataLoader(make_data(), sampler=sampler), (), **options),
        "same": lambda: evaluate(make_network(), same, (), **options),
        "same sweep": lambda: sweep(make_network(), same, ["pgd"], [0.1], progress=False),
        "empty": lambda: evaluate(make_network(), DataLoader(TensorDataset(x[:0], x[:0])), (), **options),
        "wrapped": lambda: evaluate(wrapped, loader, (), **options),
        "sharded": lambda: evaluate(sharded, loader, (), **options),
    }
    errors = {name: _text_of(function) for name, function in cases.items()}
    ddp = evaluate(nn.parallel.DistributedDataParallel(make_network()), loader, (), **options)
    return {"errors": errors, "ddp": ddp.metrics["rdi"], "calls": len(calls)}
