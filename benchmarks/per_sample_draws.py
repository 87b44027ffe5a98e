"""What random numbers per sample cost, as a share of PGD's time, and beside the generator of torch.

python benchmarks/per_sample_draws.py
"""

import argparse

import torch
from networks import resnet18, small_network
from timing import seconds
from torch import nn

from lightning_robustness._isolation.draws import Draws
from lightning_robustness.attacks import PGD, run_attack


def row(name: str, network: nn.Module, shape: tuple[int, ...], repetitions: int) -> str:
    """Measure one network and write its row of the table."""
    network, x, y = network.eval(), torch.rand(shape), torch.randint(10, shape[:1])
    positions, attack = torch.arange(shape[0]), PGD(eps=8 / 255, all_steps=True)
    times = seconds(
        {
            "pgd": lambda: run_attack(network, attack, x, y),
            "ours": lambda: Draws(positions).stream(0).uniform(0, shape[1:], -0.1, 0.1),
            "torch": lambda: torch.empty(shape).uniform_(-0.1, 0.1),
        },
        repetitions,
    )
    cells = [f"{1000 * times[key]:.2f} ms" for key in ("pgd", "ours", "torch")]
    return f"| {name} | {shape[0]} | {' | '.join(cells)} | {times['ours'] / times['pgd']:.1%} |"


def main() -> None:
    """Print a table, one row per network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print("| network | batch | PGD, 10 steps | start, per sample | start, torch | share of PGD |")
    print("|---|---|---|---|---|---|")
    print(row("small, 28x28", small_network(10), (128, 1, 28, 28), arguments.repetitions))
    print(row("ResNet-18, 32x32", resnet18(10), (8, 3, 32, 32), arguments.repetitions))


if __name__ == "__main__":
    main()
