"""Minimum-norm attacks in l2, ours beside foolbox's and, if installed, adv-lib's, at equal gradients.

    python benchmarks/minimum_norm.py --data FOLDER [--network NAME=FILE ...]

Without a network it trains two on Fashion-MNIST, one naturally and one against PGD. A file holds a whole module, saved
by ``torch.save``: load only files that you trust.
"""

import argparse
import time
from collections.abc import Callable

import foolbox
import torch
from fashion_mnist import load_fashion_mnist
from networks import small_network, train
from torch import Tensor, nn

from lightning_robustness.attacks import CW, DDN, PGD, MinimumNormCW, run

Attack = Callable[[nn.Module, Tensor, Tensor], Tensor]


def attacks(gradients: int) -> dict[str, Attack]:
    """Attacks that take this many gradients."""

    def ours(attack: Callable[..., Tensor]) -> Attack:
        return lambda network, x, y: run(network, attack, x, y).x_adv

    def of_foolbox(attack: foolbox.attacks.base.Attack) -> Attack:
        def call(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            wrapped = foolbox.PyTorchModel(network, bounds=(0, 1), device=x.device)
            return attack(wrapped, x, y, epsilons=None)[1]

        return call

    half = gradients // 2
    table = {
        "DDN": ours(DDN(steps=gradients)),
        "C&W from a DDN start": ours(MinimumNormCW(steps=gradients - half, initial_steps=half)),
        "C&W as published": ours(CW(steps=gradients)),
        "foolbox DDN": of_foolbox(foolbox.attacks.DDNAttack(steps=gradients)),
        "foolbox FMN": of_foolbox(foolbox.attacks.L2FMNAttack(steps=gradients)),
        "foolbox C&W": of_foolbox(foolbox.attacks.L2CarliniWagnerAttack(4, steps=gradients // 4)),
    }
    try:
        from adv_lib.attacks.augmented_lagrangian import alma
        from adv_lib.attacks.decoupled_direction_norm import ddn
        from adv_lib.attacks.fast_minimum_norm import fmn
    except ImportError:
        return table
    return table | {
        "adv-lib DDN": lambda network, x, y: ddn(network, x, y, steps=gradients),
        "adv-lib FMN": lambda network, x, y: fmn(network, x, y, norm=2, steps=gradients),
        "adv-lib ALMA": lambda network, x, y: alma(network, x, y, distance="l2", num_steps=gradients),
    }


def train_against_pgd(network: nn.Module, images: Tensor, labels: Tensor) -> nn.Module:
    """Train for three epochs with adversarial images of l-infinity norm 0.1."""
    optimizer, attack = torch.optim.Adam(network.parameters(), lr=2e-3), PGD(eps=0.1, steps=5, all_steps=True)
    for epoch in range(3):
        for index, rows in enumerate(torch.randperm(len(images)).split(128)):
            x_adv = attack(network, images[rows], labels[rows], seed=epoch, index=index)
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x_adv), labels[rows]).backward()
            optimizer.step()
    return network.eval()


def main() -> None:
    """Print a table, one row per network and attack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="folder with the four files of Fashion-MNIST; by default they are downloaded")
    parser.add_argument("--network", action="append", default=[], help="name=file of a module, instead of training")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--gradients", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pairs = dict(pair.split("=", 1) for pair in arguments.network)
    networks = {name: torch.load(file, weights_only=False).eval() for name, file in pairs.items()}
    if not networks:
        images, labels = load_fashion_mnist(arguments.data, train=True)
        networks["natural"] = train(small_network(10), images, labels, 2)
        networks["PGD"] = train_against_pgd(small_network(10), images[:30000], labels[:30000])
    images, labels = load_fashion_mnist(arguments.data, train=False)
    print("| network | attack | success | mean l2 | median l2 | seconds |\n|---|---|---|---|---|---|")
    for name, network in networks.items():
        network.requires_grad_(False)
        right = (network(images[:2000]).argmax(dim=1) == labels[:2000]).nonzero().squeeze(1)[: arguments.samples]
        x, y = images[right], labels[right]
        for title, attack in attacks(arguments.gradients).items():
            start = time.perf_counter()
            x_adv = attack(network, x, y).detach()
            took = time.perf_counter() - start
            # Foolbox returns black images for failures, which may be predicted as another class
            broken = (network(x_adv).argmax(dim=1) != y) & (x_adv.flatten(1).amax(dim=1) > 0)
            distances = torch.linalg.vector_norm((x_adv - x).flatten(1), dim=1)
            median = torch.where(broken, distances, torch.inf).median()
            values = f"{broken.float().mean():.1%} | {distances[broken].mean():.3f} | {median:.3f} | {took:.1f}"
            print(f"| {name} | {title} | {values} |", flush=True)


if __name__ == "__main__":
    main()
