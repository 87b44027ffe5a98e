"""Fits in two processes of which the second ends: by an error before training, or by an interrupt in an attack."""

import json
import sys

import torch
import torch.distributed as dist

from tests.callbacks.distributed_fit import as_torchrun_would
from tests.faults.killed import fork, wait
from tests.faults.monitor_runs import fit

CASES = {
    "before": {"part": "batch", "is_early": True},
    "interrupt": {"part": "first", "error": KeyboardInterrupt},
}


def fit_and_leave(case, folder, rank):
    torch.set_num_threads(1)
    store = (folder / f"{case}.store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    as_torchrun_would(rank)
    result = fit(folder, **CASES[case], is_faulty=rank == 1)
    (folder / f"{case}.{rank}.json").write_text(json.dumps(result))
    return 0


def leave_all(directory):
    for name in CASES:
        children = [fork(fit_and_leave, name, directory, number) for number in range(2)]
        if [wait(child) for child in children] != [0, 0]:
            sys.exit(f"{name}: a process failed")
