"""Two gloo processes that stay alive for a whole test session, since starting them is what takes time."""

import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD_SIZE = 2


def _initialize(ranks, directory):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=(Path(directory) / "store").as_uri(), rank=ranks.get(), world_size=WORLD_SIZE
    )


def _call(function, arguments):
    dist.barrier()  # so that each process takes one of the two calls
    return dist.get_rank(), function(dist.get_rank(), *arguments)


@contextmanager
def start_two_processes():
    context = mp.get_context("spawn")
    ranks = context.Queue()
    for rank in range(WORLD_SIZE):
        ranks.put(rank)
    with (
        tempfile.TemporaryDirectory() as directory,
        context.Pool(WORLD_SIZE, initializer=_initialize, initargs=(ranks, directory)) as pool,
    ):

        def run(function, *arguments):
            results = pool.starmap_async(_call, [(function, arguments)] * WORLD_SIZE, chunksize=1).get(timeout=300)
            return [result for _, result in sorted(results, key=lambda pair: pair[0])]

        yield run
