"""What a sweep over budgets costs and finds, against independent attacks at the same budgets.

Both sides attack the same samples with FGSM, BIM, PGD and MIFGSM at the twenty budgets of the CMMR paper, in batches of
128, and take turns. A natural network and one that is trained against PGD with eps 0.1, on Fashion-MNIST. Seconds are
medians of repetitions; quality is what image quality adds to the sweep. Takes about fifteen minutes on two cores:
``python benchmarks/sweep.py --data DIRECTORY``, where the directory holds the four files of Fashion-MNIST (without
``--data``, torchvision downloads them, where it is installed). Needs torchattacks and foolbox, as the script beside it.
"""

import argparse

import torch
from attacks import adversarial
from fashion_mnist import load_fashion_mnist
from networks import small_network, train
from timing import record, seconds
from torch import Tensor, nn

from lightning_robustness.attacks import get_attack, run_attack
from lightning_robustness.evaluation import SweepReport, sweep
from lightning_robustness.evaluation.sweep import SWEEP_ATTACKS, SWEEP_BUDGETS
from lightning_robustness.functional._image_quality import image_quality

BATCH_SIZE = 128


def independent(network: nn.Module, x: Tensor, y: Tensor, name: str, with_quality: bool) -> list[float]:
    """Accuracy at each budget, each attacked from the start, with or without the quality of the images."""
    accuracies = []
    for eps in SWEEP_BUDGETS:
        right = 0
        batches = zip(x.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True)
        for index, (rows, labels) in enumerate(batches):
            attack = get_attack(name, eps=eps, all_steps=with_quality)  # quality is that of images of full strength
            result = run_attack(network, attack, rows, labels, index=index)
            right += int((result.adv_preds == labels).sum())
            if with_quality:
                image_quality(result.x_adv, rows)
        accuracies.append(right / len(x))
    return accuracies


def measure(network: nn.Module, x: Tensor, y: Tensor, name: str, repetitions: int) -> tuple[float, float]:
    """Print a line of the table; return the ratio of seconds and the largest excess of accuracy in points."""
    curves: dict[str, list[float]] = {}
    report: list[SweepReport] = []
    times = seconds(
        {
            "attacks": lambda: curves.update(independent=independent(network, x, y, name, with_quality=False)),
            "all": lambda: independent(network, x, y, name, with_quality=True),
            "sweep": lambda: report.append(sweep(network, [(x, y)], [name], attack_samples=None, progress=False)),
        },
        repetitions,
    )
    excess = max(
        ours - theirs for ours, theirs in zip(report[0].values["accuracy"][0], curves["independent"], strict=True)
    )
    mean = sum(report[0].values["accuracy"][0]) - sum(curves["independent"])
    print(
        f"   {name:8s} {times['attacks']:7.2f}  {times['all']:7.2f} -> {times['sweep']:6.2f}  "
        f"{times['sweep'] / times['attacks']:8.2f}  {times['sweep'] / times['all']:8.2f}  "
        f"{100 * excess:+10.1f}  {100 * mean / len(SWEEP_BUDGETS):+9.1f}",
        flush=True,
    )
    return times["sweep"] / times["all"], 100 * excess


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="directory with Fashion-MNIST's idx files")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    images, labels = load_fashion_mnist(arguments.data, train=True)
    networks = {
        "natural": train(small_network(num_classes=10), images, labels, epochs=2),
        "robust": adversarial(small_network(num_classes=10), images[:40_000], labels[:40_000], epochs=2, eps=0.1),
    }
    images, labels = load_fashion_mnist(arguments.data, train=False)
    x, y = images[: arguments.samples], labels[: arguments.samples]
    results = []
    for name, network in networks.items():
        network.requires_grad_(False)
        print(f"\n{name} network, {len(x)} samples, {len(SWEEP_BUDGETS)} budgets")
        print("                    seconds               ratio of seconds    accuracy above independent, points")
        print("   attack   attacks   +quality -> sweep   to attacks  to all    at most    on average")
        for attack in SWEEP_ATTACKS:
            results.append(measure(network, x, y, attack, arguments.repetitions))
    ratios, excesses = zip(*results, strict=True)
    record(sweep_lowest=min(ratios), sweep_highest=max(ratios), sweep_excess=max(excesses))
