"""Bias, coverage and variance of assisted robust accuracy, on digits with natural and robust networks.

All samples are attacked once. Samples are then drawn again and again, as if only they had been attacked, and estimates
are compared with the share of all. Budgets bring robust accuracy near 0 and near 1 as well.

    python benchmarks/assisted.py --json benchmarks/results/assisted.json
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from lightning_robustness._measurement.assisted import assist
from lightning_robustness._measurement.feature_pass import _margins
from lightning_robustness._measurement.rows import Rows
from lightning_robustness._measurement.statistics import accuracy_interval
from lightning_robustness.attacks import PGD, run_attack


def train(x: Tensor, y: Tensor, eps: float, epochs: int = 30) -> nn.Module:
    """Train a small network, with PGD if there is a budget."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            inputs = run_attack(network, PGD(eps=eps, steps=5), x[rows], y[rows]).x_adv if eps else x[rows]
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(inputs), y[rows]).backward()
            optimizer.step()
    return network.eval()


def population(network: nn.Module, x: Tensor, y: Tensor, eps: float, total: int) -> tuple[Rows, Tensor]:
    """Return margins of ``total`` samples, drawn with a little noise if there are fewer, and which are robust."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(len(x), (total,), generator=generator) if total > len(x) else torch.randperm(len(x))[:total]
    noise = 0.05 * torch.randn(total, *x.shape[1:], generator=generator)
    inputs, labels = (x[rows] + noise).clamp(0, 1), y[rows]
    with torch.no_grad():
        logits = network(inputs)
    adv_preds = run_attack(network, PGD(eps=eps, steps=20), inputs, labels).adv_preds
    columns = {"margin": _margins(logits, labels), "right": logits.argmax(dim=1) == labels}
    return Rows(torch.arange(total), columns), adv_preds == labels


def resample(margins: Rows, robust: Tensor, number: int, draws: int) -> dict[str, float]:
    """Estimate from samples: bias in points, coverage of both intervals, and how much smaller the variance is."""
    generator, truth = np.random.default_rng(0), robust.double().mean().item()
    found = []
    for seed in range(draws):
        chosen = torch.from_numpy(np.sort(generator.choice(len(robust), number, replace=False)))
        share = assist(margins, seed, Rows(chosen, {}), robust[chosen]).estimate()
        low, high = accuracy_interval(share.plain, number)
        found.append((share.value, share.plain, share.low <= truth <= share.high, low <= truth <= high))
    value, plain, covered, plain_covered = (np.array(column, dtype=float) for column in zip(*found, strict=True))
    ratio = plain.var() / value.var() if value.var() > 0 else math.nan
    return {
        "truth": truth,
        "bias": 100 * (value.mean() - truth),
        "coverage": covered.mean(),
        "plain_coverage": plain_covered.mean(),
        "variance_ratio": ratio,
    }


def main() -> None:
    """Run everything, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    digits = load_digits()
    x, y = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(digits.target)
    networks = {"natural": train(x[:900], y[:900], 0.0), "robust": train(x[:900], y[:900], 0.1)}
    results = []
    print(f"{'network':8s} {'eps':>5s} {'N':>6s} {'n':>4s}  truth  bias  coverage (plain)  variance ratio")
    for name, network in networks.items():
        for eps in (0.01, 0.08, 0.2):
            for total in (512, 2_000, 10_000):
                margins, robust = population(network, x[900:], y[900:], eps, total)
                for number in (64, 128, 256, 512):
                    row = resample(margins, robust, number, arguments.draws)
                    results.append({"network": name, "eps": eps, "total": total, "attacked": number, **row})
                    print(
                        f"{name:8s} {eps:5.2f} {total:6d} {number:4d}  {row['truth']:.3f} {row['bias']:+5.2f}"
                        f"  {row['coverage']:.3f} ({row['plain_coverage']:.3f})  {row['variance_ratio']:.2f}",
                        flush=True,
                    )
    covered = np.mean([row["coverage"] for row in results])
    print(f"largest bias {max(abs(row['bias']) for row in results):.2f} points; mean coverage {covered:.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"draws": arguments.draws, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
