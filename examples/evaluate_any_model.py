"""Measure the robustness of a plain ``nn.Module``, without Lightning, trained on scikit-learn's digits.

Takes about 20 seconds on two cores: ``python examples/evaluate_any_model.py``.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_robustness import InputSpace
from lightning_robustness.evaluation import evaluate


class Classifier(nn.Module):
    """A network with two hidden layers; ``evaluate`` finds the head, its last layer, by itself."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def main() -> None:
    """Train in plain PyTorch, evaluate, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--samples", type=int, default=512, help="number of test images to attack")
    parser.add_argument("--eps", type=float, default=0.1, help="perturbation budget, for pixels from 0 to 1")
    parser.add_argument("--output", default="report.html")
    arguments = parser.parse_args()

    digits = load_digits()
    space = InputSpace(mean=0.3, std=0.38)  # normalisation of the data; budgets are for pixels in [0, 1]
    images = space.normalize(torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1))
    dataset = TensorDataset(images, torch.tensor(digits.target))
    train, test = torch.utils.data.random_split(dataset, [1200, 597], torch.Generator().manual_seed(0))

    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(arguments.epochs):
        for x, y in DataLoader(train, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    report = evaluate(
        model,
        DataLoader(test, batch_size=128),
        attacks=("fgsm", "pgd", "cw", "square"),
        eps=arguments.eps,
        input_space=space,
        fim_samples=arguments.samples,
        attack_samples=arguments.samples,
        sweep_budgets=[arguments.eps * number / 5 for number in range(1, 11)],
        decision_space="pca",
    )
    print(report)
    report.to_html(arguments.output)
    print(f"\nOpen {arguments.output} in a browser for the figures.")


if __name__ == "__main__":
    main()
