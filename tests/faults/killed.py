"""Evaluations that are killed in the middle of a part, alone or as one of two processes.

The processes are forks of this one, since starting anew is what takes time.
"""

import json
import os

import torch
import torch.distributed as dist

from tests.faults.evaluation_runs import PARTS, evaluate_part, kill


def evaluate_and_die(part, folder, rank=None):
    """Return what a process dies of, if it is not killed."""
    torch.set_num_threads(1)
    if rank is not None:
        store = (folder.parent / f"{part}.store").as_uri()
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    try:
        evaluate_part(part, kill, resume=folder)
    except RuntimeError as error:  # of the process that is left
        (folder.parent / f"{part}.error").write_text(str(error))
        return 3
    return 0


def fork(function, *arguments):
    """Call a function in a process of its own, which ends with what it returns."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = function(*arguments)
        finally:
            os._exit(code)
    return child


def wait(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def evaluate_all_and_die(directory):
    alone, together = (directory / name for name in ("alone", "together"))
    for folder in (alone, together):
        folder.mkdir()
    codes = {part: [wait(fork(evaluate_and_die, part, alone / part))] for part in PARTS}
    for part in PARTS:
        children = [fork(evaluate_and_die, part, together / part, rank) for rank in range(2)]
        codes[part] += [wait(child) for child in children]
    (directory / "codes.json").write_text(json.dumps(codes))
