"""What attacks cost, against torchattacks and foolbox: seconds and forward passes, and the success that they buy.

Everything is measured in one run on the same networks and samples: medians of repetitions, both sides in turn. A
natural network and one that is trained against PGD with eps 0.1, on Fashion-MNIST. Takes about ten minutes on two
cores: ``python benchmarks/attacks.py --data DIRECTORY``, where the directory holds the four files of Fashion-MNIST
(without ``--data``, torchvision downloads them, where it is installed). Needs torchattacks and foolbox.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import foolbox
import torch
import torchattacks
from fashion_mnist import load_fashion_mnist
from networks import small_network, train
from timing import record
from torch import Tensor, nn
from tqdm import tqdm

from lightning_robustness.attacks import CW, PGD, MinimumNormCW, Square, run_attack

HEADER = "   network   eps        seconds          faster     success rate    passes a sample"


class Side:
    """One way to run an attack: what it took, and what came of it, medians of repetitions."""

    def __init__(self, network: nn.Module, x: Tensor, y: Tensor, attack: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.network, self.x, self.y, self.attack = network, x, y, attack
        self.times: list[float] = []
        self.passes, self.l2, self.success_rate = 0.0, 0.0, 0.0

    def measure(self) -> None:
        rows = []
        hook = self.network.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
        start = time.perf_counter()
        x_adv = self.attack(self.x, self.y)
        self.times.append(time.perf_counter() - start)
        hook.remove()
        self.passes = sum(rows) / len(self.x)
        with torch.no_grad():
            right = self.network(self.x).argmax(1) == self.y
            broken = right & (self.network(x_adv).argmax(1) != self.y) & (x_adv.flatten(1).amax(1) > 0)
        self.success_rate = broken.sum().item() / right.sum().item()
        self.l2 = torch.where(broken, (x_adv - self.x).flatten(1).norm(dim=1), torch.inf)[right].median().item()

    @property
    def seconds(self) -> float:
        return statistics.median(self.times)


def compare(theirs: Side, ours: Side, repetitions: int) -> None:
    """Measure both sides in turn, so that a slow moment of the machine hits both."""
    for _ in tqdm(range(repetitions), leave=False, desc="repetitions"):
        theirs.measure()
        ours.measure()


def row(name: str, eps: str, theirs: Side, ours: Side, distance: bool = False) -> None:
    """Print one line of a table."""
    median = f"   {theirs.l2:5.2f} -> {ours.l2:5.2f}" if distance else ""
    print(
        f"   {name:8s} {eps:>4s}  {theirs.seconds:6.2f} -> {ours.seconds:6.2f}  "
        f"{theirs.seconds / ours.seconds:6.2f} x  "
        f"{theirs.success_rate:6.3f} -> {ours.success_rate:5.3f}  {theirs.passes:7.1f} -> {ours.passes:6.1f}{median}",
        flush=True,
    )


def sides(
    network: nn.Module, x: Tensor, y: Tensor, theirs: Callable[[Tensor, Tensor], Tensor], attack: object
) -> tuple[Side, Side]:
    """Another way to run an attack, and ours."""
    return Side(network, x, y, theirs), Side(network, x, y, lambda x, y: run_attack(network, attack, x, y).x_adv)


def pgd(networks: dict[str, nn.Module], x: Tensor, y: Tensor, repetitions: int) -> None:
    """PGD at the setting of the RDI paper, and with a smaller budget."""
    print(f"\n1. PGD, 40 steps of 0.01, {len(x)} samples: torchattacks -> here")
    print(HEADER)
    for eps in (0.3, 0.1):
        for name, network in networks.items():
            theirs = torchattacks.PGD(network, eps=eps, alpha=0.01, steps=40)
            pair = sides(network, x, y, theirs, PGD(eps=eps, alpha=0.01, steps=40))
            compare(*pair, repetitions)
            row(name, str(eps), *pair)
            key = f"pgd_{name}_{round(100 * eps)}"
            record(**{key: pair[0].seconds / pair[1].seconds})
            record(**{f"{key}_success": pair[1].success_rate - pair[0].success_rate})


def square(networks: dict[str, nn.Module], x: Tensor, y: Tensor, repetitions: int) -> None:
    """Square at the setting of the RDI paper, and with a smaller budget and fewer queries."""
    print(f"\n2. Square, 5,000 queries for eps 0.3 and 200 for 0.1, {len(x)} samples: torchattacks -> here")
    print(HEADER)
    for eps, num_queries in ((0.3, 5000), (0.1, 200)):
        for name, network in networks.items():
            theirs = torchattacks.Square(network, eps=eps, n_queries=num_queries)
            pair = sides(network, x, y, theirs, Square(eps=eps, num_queries=num_queries, as_published=True))
            compare(*pair, repetitions)
            row(name, str(eps), *pair)
            key = f"square_{name}_{round(100 * eps)}"
            record(**{key: pair[0].seconds / pair[1].seconds})
            record(**{f"{key}_success": pair[1].success_rate - pair[0].success_rate})


def cw(networks: dict[str, nn.Module], x: Tensor, y: Tensor, repetitions: int) -> None:
    """C&W at the setting of the RDI paper, and with binary search."""
    print(f"\n3. C&W, 50 steps, lr 0.01, c 1, {len(x)} samples: torchattacks -> here")
    print(HEADER + "      median l2")
    for name, network in networks.items():
        pair = sides(network, x, y, torchattacks.CW(network, c=1, steps=50, lr=0.01), CW(c=1.0, steps=50, lr=0.01))
        compare(*pair, repetitions)
        row(name, "-", *pair, distance=True)
    print(f"\n4. C&W with 5 binary search steps of 50, c from 1, lr 0.01, {len(x)} samples: foolbox -> here")
    print("   from a DDN start, with as many search steps and with the fewest that reach foolbox's success rate")
    print(HEADER.replace("eps   ", "search") + "      median l2")
    reference = foolbox.attacks.L2CarliniWagnerAttack(5, steps=50, stepsize=0.01, initial_const=1.0)
    for name, network in networks.items():

        def theirs(x: Tensor, y: Tensor, network: nn.Module = network) -> Tensor:
            return reference(foolbox.PyTorchModel(network, bounds=(0, 1), device=x.device), x, y, epsilons=None)[1]

        pair = sides(network, x, y, theirs, MinimumNormCW(c=1.0, steps=50, lr=0.01, binary_search_steps=5))
        compare(*pair, repetitions)
        fastest = pair[1]
        row(name, "5", *pair, distance=True)
        for number in range(1, 5):
            ours = sides(network, x, y, theirs, MinimumNormCW(steps=50, binary_search_steps=number))[1]
            ours.measure()
            if ours.success_rate >= pair[0].success_rate:
                row(name, str(number), pair[0], ours, distance=True)
                fastest = ours
                break
        record(**{f"cw_{name}": pair[0].seconds / fastest.seconds})


def adversarial(network: nn.Sequential, images: Tensor, labels: Tensor, epochs: int, eps: float) -> nn.Sequential:
    """Train against PGD and return the network in eval mode."""
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    attack = PGD(eps=eps, steps=4, all_steps=True)
    for epoch in range(epochs):
        batches = torch.randperm(len(images)).split(128)
        for number, batch in enumerate(tqdm(batches, desc="adversarial training", leave=False)):
            x = attack(network, images[batch], labels[batch], seed=epoch, index=number)
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), labels[batch]).backward()
            optimizer.step()
    return network.eval()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="directory with Fashion-MNIST's idx files")
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, torchattacks {torchattacks.__version__}")
    images, labels = load_fashion_mnist(arguments.data, train=True)
    networks = {
        "natural": train(small_network(num_classes=10), images, labels, epochs=2),
        "robust": adversarial(small_network(num_classes=10), images[:40_000], labels[:40_000], epochs=2, eps=0.1),
    }
    images, labels = load_fashion_mnist(arguments.data, train=False)
    for name, network in networks.items():
        network.requires_grad_(False)
        print(f"accuracy of the {name} network: {(network(images).argmax(1) == labels).float().mean():.3f}")
    pgd(networks, images[:1000], labels[:1000], arguments.repetitions)
    square(networks, images[:1000], labels[:1000], arguments.repetitions)
    cw(networks, images[:300], labels[:300], arguments.repetitions)
