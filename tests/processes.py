"""Processes for tests, forked from one that has imported what takes time, where the system can fork."""

import multiprocessing
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

START_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
CONTEXT = multiprocessing.get_context(START_METHOD)
if START_METHOD == "forkserver":
    CONTEXT.set_forkserver_preload(["lightning_robustness.callbacks", "lightning_robustness.evaluation", "sklearn"])


def _initialize(ranks, number, directory):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=(Path(directory) / "store").as_uri(), rank=ranks.get(), world_size=number
    )


def _call(function, arguments):
    dist.barrier()  # so that each process takes one of the calls
    return dist.get_rank(), function(dist.get_rank(), *arguments)


@contextmanager
def start_processes(number=2):
    """Start gloo processes; return a callable that runs a function in each of them and returns all results."""
    ranks = CONTEXT.Queue()
    for rank in range(number):
        ranks.put(rank)
    with (
        tempfile.TemporaryDirectory() as directory,
        CONTEXT.Pool(number, initializer=_initialize, initargs=(ranks, number, directory)) as pool,
    ):

        def run(function, *arguments):
            results = pool.starmap_async(_call, [(function, arguments)] * number, chunksize=1).get(timeout=300)
            return [result for _, result in sorted(results, key=lambda pair: pair[0])]

        yield run


def run_in_a_process(function, *arguments):
    """Call a function in a process that may be killed; return its exit code."""
    process = CONTEXT.Process(target=function, args=arguments)
    process.start()
    process.join(timeout=300)
    return process.exitcode
