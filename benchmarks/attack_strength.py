"""Robust accuracy that attacks leave, with passes per sample and CPU seconds: ours, torchattacks' and foolbox's.

Networks are trained on Fashion-MNIST, naturally, against PGD and with TRADES (eps 0.1), which takes a few minutes, and
kept in ``--cache``; ``--checkpoint NAME=FILE`` adds the networks of checkpoints of Lightning that go with these images,
as ``lightning-robustness evaluate`` takes them. AutoAttack is twice in the table: with 100 steps, as published, from
parts of torchattacks; and as torchattacks 3.3 has it, with 10. Takes about ten minutes on two cores:
``python benchmarks/attack_strength.py --data DIRECTORY --cache DIRECTORY``, where the first directory holds the four
files of Fashion-MNIST (without ``--data``, torchvision downloads them, where it is installed). Needs torchattacks and
foolbox. ``--offset`` takes other test images and ``--seed`` other networks than those that settings were chosen on, and
``--attack`` some rows of the table only.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import foolbox
import torch
import torchattacks
from attacks import adversarial
from fashion_mnist import load_fashion_mnist
from networks import small_network, train
from torch import Tensor, nn
from tqdm import tqdm

from lightning_robustness._measurement.plan import DEFAULT_ATTACKS, name_attacks
from lightning_robustness.attacks import get_attack, run_attack
from lightning_robustness.cli.loading import load_model
from lightning_robustness.losses import trades_loss

# From a network and a budget to a function from images and labels to adversarial images
Maker = Callable[[nn.Module, float], Callable[[Tensor, Tensor], Tensor]]
EPS = {"natural": 0.03, "pgd": 0.1, "trades": 0.1}


def ours(name: str, **options: object) -> Maker:
    """Make an attack of this package by its name."""

    def make(network: nn.Module, eps: float) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, y: run_attack(network, get_attack(name, eps=eps, **options), x, y).x_adv

    return make


def monitor(network: nn.Module, eps: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Run the attacks that the monitor runs by default; of each sample, keep the image of one that breaks it in eps."""

    def attack_all(x: Tensor, y: Tensor) -> Tensor:
        final = x.clone()
        for attack in name_attacks(DEFAULT_ATTACKS, eps).values():
            result = run_attack(network, attack, x, y)
            counts = result.success & (result.linf <= 1.0001 * eps)
            final[counts] = result.x_adv[counts]
        return final

    return attack_all


def of_torchattacks(name: str, **options: object) -> Maker:
    """Make an attack of torchattacks."""
    return lambda network, eps: getattr(torchattacks, name)(network, eps=eps, **options)


def published_autoattack(network: nn.Module, eps: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Make the standard ensemble with its published settings from the parts of torchattacks."""
    return torchattacks.MultiAttack(
        [
            torchattacks.APGD(network, eps=eps, steps=100),
            torchattacks.APGDT(network, eps=eps, steps=100, n_classes=10),
            torchattacks.FAB(network, eps=eps, steps=100, multi_targeted=True, n_classes=10),
            torchattacks.Square(network, eps=eps, n_queries=5000),
        ]
    )


def foolbox_pgd(network: nn.Module, eps: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Make PGD of foolbox."""
    attack = foolbox.attacks.LinfPGD(steps=40)
    return lambda x, y: attack(foolbox.PyTorchModel(network, bounds=(0, 1), device=x.device), x, y, epsilons=eps)[1]


ATTACKS: dict[str, Maker] = {
    "PGD, 10 steps": ours("pgd"),
    "PGD, 40 steps (preset)": ours("pgd", preset="fashion-mnist"),
    "PGD, fast (monitor's)": ours("pgd", strength="fast"),
    "PGD, strong (evaluate's)": ours("pgd", strength="strong"),
    "monitor's worst": monitor,
    "cascade": ours("cascade"),
    "ensemble": ours("ensemble"),
    "torchattacks PGD, 40 steps": of_torchattacks("PGD", steps=40, alpha=0.01),
    "torchattacks APGD, 100 steps": of_torchattacks("APGD", steps=100),
    "torchattacks AutoAttack": of_torchattacks("AutoAttack", n_classes=10, seed=0),
    "AutoAttack, as published": published_autoattack,
    "foolbox PGD, 40 steps": foolbox_pgd,
}


def measure(network: nn.Module, attack: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> list[float]:
    """Robust accuracy, passes per sample, with or without a gradient, and CPU seconds."""
    rows: list[int] = []
    hook = network.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    start = time.process_time()  # not disturbed by what else runs on the machine
    x_adv = attack(x, y)
    seconds = time.process_time() - start
    hook.remove()
    with torch.no_grad():
        right = (network(x).argmax(1) == y) & (network(x_adv.detach()).argmax(1) == y)
    return [right.float().mean().item(), sum(rows) / len(x), seconds]


def trades(network: nn.Sequential, images: Tensor, labels: Tensor, epochs: int, eps: float) -> nn.Sequential:
    """Train with TRADES and return the network in eval mode."""
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    for _ in range(epochs):
        for batch in tqdm(torch.randperm(len(images)).split(128), desc="TRADES", leave=False):
            optimizer.zero_grad()
            trades_loss(network, images[batch], labels[batch], eps=eps, alpha=eps / 3, steps=4).backward()
            optimizer.step()
    return network.eval()


def trained(cache: Path, data: str | None, seed: int) -> dict[str, nn.Module]:
    """Train the networks from a seed, or read them from the cache."""
    cache.mkdir(parents=True, exist_ok=True)
    images, labels = load_fashion_mnist(data, train=True)
    few = images[:40_000], labels[:40_000]
    recipes = {
        "natural": lambda network: train(network, images, labels, epochs=2),
        "pgd": lambda network: adversarial(network, *few, epochs=2, eps=EPS["pgd"]),
        "trades": lambda network: trades(network, *few, epochs=2, eps=EPS["trades"]),
    }
    networks = {}
    for name, recipe in recipes.items():
        torch.manual_seed(seed)
        network, path = small_network(num_classes=10), cache / (f"{name}-{seed}.pt" if seed else f"{name}.pt")
        if path.exists():
            network.load_state_dict(torch.load(path, weights_only=True))
        else:
            torch.save(recipe(network).state_dict(), path)
        networks[name] = network.eval().requires_grad_(False)
    return networks


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="directory with Fashion-MNIST's idx files")
    parser.add_argument("--cache", type=Path, required=True, help="directory for the trained networks")
    parser.add_argument("--checkpoint", action="append", default=[], metavar="NAME=FILE", help="another network")
    parser.add_argument("--model", help="class of the checkpoints, package.module:Class")
    parser.add_argument("--eps", type=float, default=0.1, help="budget for checkpoints")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--offset", type=int, default=0, help="number of test images to leave out at the beginning")
    parser.add_argument("--seed", type=int, default=0, help="seed of the training")
    parser.add_argument("--attack", action="append", choices=list(ATTACKS), help="a row of the table; by default all")
    arguments = parser.parse_args()
    networks = trained(arguments.cache, arguments.data, arguments.seed)
    for name, _, path in (given.partition("=") for given in arguments.checkpoint):
        networks[name] = load_model(arguments.model, path).eval().requires_grad_(False)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, torchattacks {torchattacks.__version__}")
    rows = slice(arguments.offset, arguments.offset + arguments.samples)
    x, y = (part[rows] for part in load_fashion_mnist(arguments.data, train=False))
    for name, network in networks.items():
        eps = EPS.get(name, arguments.eps)
        accuracy = (network(x).argmax(1) == y).float().mean()
        print(f"\n{name} network, eps {eps}, {len(x)} samples, clean accuracy {accuracy:.3f}")
        print(f"   {'':30s} accuracy  passes/sample  seconds")
        for label in arguments.attack or ATTACKS:
            robust, passes, seconds = measure(network, ATTACKS[label](network, eps), x, y)
            print(f"   {label:30s} {robust:8.3f}  {passes:13.1f}  {seconds:7.2f}", flush=True)
