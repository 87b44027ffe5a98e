"""Train natural and robust networks on scikit-learn's digits, compare them, and write ``report.html``.

Takes about a minute on two cores: ``python examples/compare_models.py``. Open ``report.html`` in a browser.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from lightning_robustness.attacks import PGD
from lightning_robustness.evaluation import compare


def train(images: Tensor, labels: Tensor, eps: float, epochs: int) -> nn.Sequential:
    """Train a network on adversarial images, or on natural ones for a budget of 0."""
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    optimizer, attack = torch.optim.Adam(network.parameters(), lr=2e-3), PGD(eps=eps, steps=5, all_steps=True)
    for epoch in tqdm(range(epochs), desc=f"training with eps {eps}", leave=False):
        for index, batch in enumerate(torch.randperm(len(images)).split(64)):
            x, y = images[batch], labels[batch]
            x = attack(network, x, y, seed=epoch, index=index) if eps else x
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()
            optimizer.step()
    return network.eval()


def main() -> None:
    """Train, compare, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--samples", type=int, default=256, help="number of test images to attack")
    parser.add_argument("--budgets", type=int, default=10, help="number of budgets, from 0.02 in steps of 0.02")
    parser.add_argument("--output", default="report.html")
    arguments = parser.parse_args()

    digits = load_digits()
    images, labels = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(digits.target)
    trained = {"natural": 0.0, "robust 0.05": 0.05, "robust 0.15": 0.15, "robust 0.25": 0.25}
    models = {name: train(images[:1200], labels[:1200], eps, arguments.epochs) for name, eps in trained.items()}

    loader = DataLoader(TensorDataset(images[1200:], labels[1200:]), batch_size=128)
    sizes = {"attack_samples": arguments.samples, "fim_samples": arguments.samples}
    budgets = [number / 50 for number in range(1, arguments.budgets + 1)]
    report = compare(models, loader, budgets=budgets, decision_space="pca", **sizes)
    print(report)
    report.to_html(arguments.output)
    print(f"\nOpen {arguments.output} in a browser for the figures.")


if __name__ == "__main__":
    main()
