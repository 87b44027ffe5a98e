"""CLEVER scores here and in the Adversarial Robustness Toolbox, on the same samples of scikit-learn's digits.

Both are estimates from random points, so that each is run with several seeds: what is printed are means over the seeds
and, in brackets, standard deviations. The toolbox is not a requirement of this package: install it in an environment
of its own with ``pip install adversarial-robustness-toolbox scikit-learn``. Takes about seven minutes on two cores:
``python benchmarks/clever.py``.

The toolbox draws all batches from one pool of points, so that its maxima end at the largest gradient of the pool. That
may be why its scores are higher: a little in the l2 and l-infinity balls, more in the l1 ball. Its default pool is that
of 10 batches; one of five times as many points as are drawn is printed first. Where its fit runs away, a score is near
0 and the deviation large.
"""

import argparse
import math
import time

import numpy as np
import torch
from art.estimators.classification import PyTorchClassifier
from art.metrics import clever_u
from networks import train
from sklearn.datasets import load_digits
from torch import Tensor, nn

from lightning_robustness import InputSpace
from lightning_robustness.functional import clever_score


def trained_network(images: Tensor, labels: Tensor) -> nn.Sequential:
    """A small network with a smooth activation."""
    network = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(512, 32), nn.GELU(), nn.Linear(32, 10)
    )
    return train(network, images, labels, epochs=20).requires_grad_(False)


def toolbox_scores(
    network: nn.Sequential, x: Tensor, radius: float, p: float, seeds: int, pool_factor: int, sizes: tuple[int, int]
) -> np.ndarray:
    """Scores of the toolbox, one row for each seed."""
    classifier = PyTorchClassifier(network, nn.CrossEntropyLoss(), input_shape=(1, 8, 8), nb_classes=10)
    rows = []
    for seed in range(seeds):
        np.random.seed(seed)
        settings = {"radius": radius, "norm": p, "pool_factor": pool_factor, "verbose": False}
        rows.append([clever_u(classifier, sample.numpy(), *sizes, **settings) for sample in x])
    return np.array(rows)


def show(name: str, scores: np.ndarray, seconds: float) -> None:
    """One line: mean and standard deviation of each sample."""
    cells = "  ".join(f"{m:.4f} ({s:.4f})" for m, s in zip(scores.mean(0), scores.std(0, ddof=1), strict=True))
    print(f"   {name:28s} {cells}  {seconds:6.1f} s")


def main(num_samples: int, seeds: int, num_batches: int, batch_size: int) -> None:
    """Print both for the three norms."""
    data = load_digits()
    images, labels = torch.tensor(data.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(data.target)
    network = trained_network(images[:1200], labels[:1200])
    x, space = images[1200 : 1200 + num_samples], InputSpace(low=None, high=None)  # the toolbox does not clamp points
    for p, radius in ((2, 1.0), (math.inf, 0.2), (1, 5.0)):
        print(f"\np = {p}, radius {radius}, {num_batches} batches of {batch_size} points, {seeds} seeds")
        start = time.perf_counter()
        norm = {1: "l1", 2: "l2", math.inf: "linf"}[p]
        options = {"norm": norm, "num_batches": num_batches, "points_per_batch": batch_size, "input_space": space}
        ours = np.stack([clever_score(network, x, radius, seed=s, **options).numpy() for s in range(seeds)])
        show("lightning-robustness", ours, time.perf_counter() - start)
        for pool_factor in (5 * num_batches, 10):
            start = time.perf_counter()
            theirs = toolbox_scores(network, x, radius, p, seeds, pool_factor, (num_batches, batch_size))
            show(f"toolbox, pool factor {pool_factor}", theirs, time.perf_counter() - start)
            noise = np.sqrt(ours.var(0, ddof=1) + theirs.var(0, ddof=1))
            difference = (np.abs(ours.mean(0) - theirs.mean(0)) / noise).max()
            print(f"   largest difference of the means: {difference:.1f} times the noise of one run")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=32)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    main(arguments.samples, arguments.seeds, arguments.batches, arguments.batch_size)
