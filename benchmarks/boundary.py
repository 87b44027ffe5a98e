"""The distance to the decision boundary: its cost, how few rivals are enough, and how it trains.

Everything is measured in one run and printed as ratios, both sides in turn. Takes about ten minutes on two cores:
``python benchmarks/boundary.py``, or one part of it with ``--part cost``, ``rivals``, ``training`` or ``equal``.
"""

import argparse
import time
from collections.abc import Callable

import torch
from fisher import peaked_resnet18, pgd
from networks import small_network
from sklearn.datasets import load_digits
from timing import seconds
from torch import Tensor, nn

from lightning_robustness.attacks import PGD, run_attack
from lightning_robustness.functional import boundary_distance, fisher_spectral_norm
from lightning_robustness.functional.fisher_spectral_norm import FisherSettings, fisher_and_boundary
from lightning_robustness.losses import boundary_penalty, fisher_penalty, rdi_loss


def cost(repetitions: int) -> None:
    """Processor time of the distance beside those of the Fisher information and of PGD, in one thread."""
    torch.set_num_threads(1)
    print("\n1. Cost: the Fisher information with the distance over the Fisher information alone; over 20-step PGD")
    print("   network          K  samples  Fisher with distance / Fisher  distance / PGD-20  both / PGD-20")
    for name, num_classes, number in (("ResNet-18", 10, 8), ("small network", 10, 256), ("ResNet-18", 1000, 8)):
        if name == "ResNet-18":
            x = torch.rand(number, 3, 32, 32)
            network = peaked_resnet18(num_classes, x)
        else:
            x = torch.rand(number, 1, 28, 28)
            network = small_network(num_classes).eval().requires_grad_(False)
        y = torch.randint(num_classes, (number,))
        functions: dict[str, Callable[[], object]] = {
            "fim": lambda n=network, x=x: fisher_spectral_norm(n, x),
            "both": lambda n=network, x=x, y=y: fisher_and_boundary(n, x, FisherSettings(), "linf", y),
            "alone": lambda n=network, x=x, y=y: boundary_distance(n, x, y),
            "pgd": lambda n=network, x=x: pgd(n, x),
        }
        times = seconds(functions, repetitions, time.process_time)
        ratios = times["both"] / times["fim"], times["alone"] / times["pgd"], times["both"] / times["pgd"]
        columns = f"{ratios[0]:29.2f}  {ratios[1]:17.2f}  {ratios[2]:13.2f}"
        print(f"   {name:13s} {num_classes:5d}  {number:7d}  {columns}")


def many_classes(num_classes: int, number: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw inputs in [0, 1]^64 around anchors in groups of ten, as some classes of real data are more alike."""
    torch.manual_seed(seed)
    groups = torch.rand(num_classes // 10, 64).repeat_interleave(10, dim=0)
    anchors = (groups + 0.15 * torch.randn(num_classes, 64)).clamp(0, 1)
    labels = torch.randint(num_classes, (number,))
    return (anchors[labels] + 0.1 * torch.randn(number, 64)).clamp(0, 1), labels


def rivals() -> None:
    """Share of test samples whose nearest rival is among those with the highest logits."""
    print(
        "\n2. Networks with many classes: share of 500 test samples whose nearest rival has one of the highest logits,"
    )
    print("   and by how much the median distance is too high with as many rivals")
    print("      K  trained with  accuracy  rivals  share linf  share l2  median linf  median l2")
    for num_classes in (100, 1000):
        x, y = many_classes(num_classes, 20_500)
        for eps in (0.0, 0.05):
            network = train_many(x[:20_000], y[:20_000], num_classes, eps)
            with torch.no_grad():
                accuracy = (network(x[20_000:]).argmax(dim=1) == y[20_000:]).double().mean()
            distances = {
                (norm, number): boundary_distance(network, x[20_000:], norm=norm, num_rivals=number)
                for norm in ("linf", "l2")
                for number in (1, 3, 5, 9, num_classes)
            }
            for number in (1, 3, 5, 9):
                shares, excesses = [], []
                for norm in ("linf", "l2"):
                    exact, few = distances[norm, num_classes], distances[norm, number]
                    shares.append(f"{(few <= exact * (1 + 1e-4)).double().mean():.3f}")
                    excesses.append(f"{few.median() / exact.median() - 1:.2%}")
                columns = f"{shares[0]:>10s}  {shares[1]:>8s}  {excesses[0]:>11s}  {excesses[1]:>9s}"
                print(f"   {num_classes:4d}  {f'eps {eps}':>12s}  {accuracy:8.3f}  {number:6d}  {columns}")


def train_many(x: Tensor, y: Tensor, num_classes: int, eps: float) -> nn.Sequential:
    """Train a network of two hidden layers, on adversarial inputs where eps is positive."""
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, num_classes)),
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    attack = PGD(eps=eps, steps=3, all_steps=True)
    for epoch in range(15 if num_classes == 100 else 25):
        for index, batch in enumerate(torch.randperm(len(x)).split(256)):
            inputs = attack(network, x[batch], y[batch], seed=epoch, index=index) if eps else x[batch]
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(inputs), y[batch]).backward()
            optimizer.step()
    return network.eval()


Term = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


def attack_free_terms() -> dict[str, Term]:
    """Terms of the loss, by what they are called in the tables."""
    terms: dict[str, Term] = {"natural": lambda network, x, y, logits: logits.new_zeros(())}
    for weight in (0.1, 1.0):
        terms[f"RDI, weight {weight:g}"] = lambda n, x, y, logits, w=weight: w * rdi_loss(logits, y)
    for weight in (0.1, 0.3, 1.0):
        terms[f"Fisher, weight {weight:g}"] = lambda n, x, y, logits, w=weight: w * fisher_penalty(n, x, num_products=1)
    for margin in (0.1, 0.2):
        for weight in (0.3, 1.0):
            name = f"boundary, margin {margin:g}, weight {weight:g}"
            terms[name] = lambda n, x, y, logits, m=margin, w=weight: w * boundary_penalty(n, x, y, margin=m)
    return terms


def load_images() -> tuple[Tensor, Tensor]:
    """Images of digits in [0, 1], and labels."""
    digits = load_digits()
    return torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(digits.target)


def training() -> None:
    """Robust accuracy of networks trained with each attack-free term, and what it costs."""
    print("\n3. Digits, 10 epochs, means of three seeds: accuracy under PGD with 20 steps on 597 test images")
    print(f"   {'term':33s}  cost  accuracy  eps 0.1  eps 0.2")
    images, labels = load_images()
    baseline = None
    for name, term in attack_free_terms().items():
        rows = [train_digits(images, labels, term, seed) for seed in range(3)]
        cost_, accuracy, *robust = torch.tensor(rows, dtype=torch.float64).mean(dim=0).tolist()
        baseline = baseline or cost_
        print(f"   {name:33s}  {cost_ / baseline:4.1f}  {accuracy:8.3f}  {robust[0]:7.3f}  {robust[1]:7.3f}")


def equal_cost() -> None:
    """Robust accuracy of networks trained with each attack-free term for the same time: that of 10 Fisher epochs."""
    torch.set_num_threads(1)
    print("\n4. Digits, as long as 10 epochs with the Fisher term take, means of three seeds, one thread")
    print(f"   {'term':33s}  ms/epoch  epochs  seconds  accuracy  eps 0.1  eps 0.2")
    (images, labels), terms = load_images(), attack_free_terms()
    per_epoch = {name: train_digits(images, labels, term, 0, epochs=3)[0] / 3 for name, term in terms.items()}
    for name, term in terms.items():
        epochs = round(10 * per_epoch["Fisher, weight 0.3"] / per_epoch[name])
        rows = [train_digits(images, labels, term, seed, epochs) for seed in range(3)]
        spent, accuracy, *robust = torch.tensor(rows, dtype=torch.float64).mean(dim=0).tolist()
        columns = f"{accuracy:8.3f}  {robust[0]:7.3f}  {robust[1]:7.3f}"
        print(f"   {name:33s}  {1e3 * per_epoch[name]:8.0f}  {epochs:6d}  {spent:7.1f}  {columns}", flush=True)


def train_digits(images: Tensor, labels: Tensor, term: Term, seed: int, epochs: int = 10) -> list[float]:
    """Train on the first 1,200 images; return processor seconds, accuracy and robust accuracies."""
    torch.manual_seed(seed)
    network = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    optimizer, start = torch.optim.Adam(network.parameters(), lr=2e-3), time.process_time()
    for _ in range(epochs):
        for batch in torch.randperm(1200).split(64):
            x, y = images[batch], labels[batch]
            optimizer.zero_grad()
            logits = network(x)
            (nn.functional.cross_entropy(logits, y) + term(network, x, y, logits)).backward()
            optimizer.step()
    spent = time.process_time() - start
    network.eval()
    x, y = images[1200:], labels[1200:]
    results = [run_attack(network, PGD(eps=eps, steps=20), x, y) for eps in (0.1, 0.2)]
    clean = (results[0].preds == y).double().mean().item()
    return [spent, clean, *((result.adv_preds == y).double().mean().item() for result in results)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["cost", "rivals", "training", "equal"])
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    if arguments.part in (None, "cost"):
        cost(arguments.repetitions)
    if arguments.part in (None, "rivals"):
        rivals()
    if arguments.part in (None, "training"):
        training()
    if arguments.part in (None, "equal"):
        equal_cost()
