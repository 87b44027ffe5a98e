"""Time of an evaluation and of a sweep in two processes, relative to one, with one thread each.

Processor time is that of all processes together: how much of it is added does not depend on what else runs.

python benchmarks/processes.py
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from networks import resnet18, small_network
from timing import seconds
from torch.utils.data import DataLoader, TensorDataset

from lightning_robustness.evaluation import evaluate, sweep

NETWORKS = {"small": (small_network, (1, 28, 28)), "resnet18": (resnet18, (3, 32, 32))}


def measure(name: str, samples: int, repetitions: int) -> dict[str, list[float]]:
    """Median seconds, and processor seconds of all processes together, of each function."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    network, x = make(10).eval(), torch.rand(samples, *shape)
    with torch.no_grad():
        y = network(x).argmax(dim=1)
    loader = DataLoader(TensorDataset(x, y), batch_size=32)
    options = {"batch_size": 32, "progress": False}
    functions = {
        "evaluate": lambda: evaluate(network, loader, ("pgd", "square"), fim_samples=samples // 4, **options),
        "sweep": lambda: sweep(network, loader, ("fgsm", "pgd"), (2 / 255, 4 / 255, 8 / 255), **options),
    }
    wall = seconds(functions, repetitions)
    own = seconds(functions, repetitions, time.process_time)
    everywhere: list[dict[str, float]] = [own] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    return {key: [wall[key], sum(times[key] for times in everywhere)] for key in functions}


def launch(number: int, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Start processes and return the seconds that the first of them measured."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "seconds.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={number}"]
        names = ("network", "samples", "repetitions")
        options = [f"--{name}={getattr(arguments, name)}" for name in names]
        subprocess.run([*command, __file__, *options, f"--output={path}"], check=True)
        return json.loads(path.read_text())


def main() -> None:
    """Print a table, or, when started by torchrun, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=list(NETWORKS), default="small")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path, help="Where a process writes its seconds; used by the script itself.")
    arguments = parser.parse_args()
    if arguments.output is None:
        one, two = (launch(number, arguments) for number in (1, 2))
        print("| | one process | two processes | ratio | processor time, ratio |")
        print("|---|---|---|---|---|")
        for name, ((first, own), (second, both)) in {name: (one[name], two[name]) for name in one}.items():
            print(f"| {name} | {first:.1f} s | {second:.1f} s | {second / first:.2f} | {both / own:.2f} |")
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    times = measure(arguments.network, arguments.samples, arguments.repetitions)
    if dist.get_rank() == 0:
        arguments.output.write_text(json.dumps(times))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
