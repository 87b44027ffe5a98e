"""How well attack-free values follow accuracy under attack within a training run, and what it costs to go by them.

Trains small networks naturally, against PGD, with TRADES and fast, with the monitor attached, and writes what it saw to
a JSON file, run by run: a benchmark that is interrupted goes on where it was. From the file it makes a table: Kendall's
tau of each value with accuracy under PGD over the epochs of a run, and the points of accuracy under PGD that are lost
by the epoch that the value picks, alone, guarded by clean accuracy, and with guarded early stopping.

Runs take a minute or two each, on one core: ``python benchmarks/within_run.py --data DIRECTORY`` makes sixteen, where
the directory holds the four files of Fashion-MNIST (without ``--data``, torchvision downloads them, where it is
installed). ``--cifar10 DIRECTORY`` adds sixteen on CIFAR-10, ``--only pgd-plain`` takes the runs with this in their
names, ``--table`` prints the table alone.
"""

import argparse
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import lightning as L
import numpy as np
import torch
from cifar10 import load_cifar10
from fashion_mnist import load_fashion_mnist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_robustness import AdversarialTraining, RobustnessMonitor
from lightning_robustness._measurement.keys import attack_free_metrics, get_key
from lightning_robustness._measurement.statistics import Evaluation, candidates, comparable, kendall, pick
from lightning_robustness.losses import trades_loss

REFERENCE = "adv_acc/pgd"
PATIENCE = 5
BUDGETS = {"fashion": 0.1, "cifar10": 8 / 255}
METHODS = ("natural", "pgd", "trades", "fast")
SEEDS = (0, 1)
RESULTS = Path(__file__).parent / "results" / "within_run.json"


def plain(channels: int) -> nn.Sequential:
    """Convolutions with strides, and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def normalized(channels: int) -> nn.Sequential:
    """Convolutions with batch normalisation, and one linear layer."""
    layers: list[nn.Module] = []
    for width in (16, 32, 64):
        layers += [nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64 * 2 * 2, 10))


NETWORKS: dict[str, Callable[[int], nn.Sequential]] = {"plain": plain, "normalized": normalized}


class Classifier(L.LightningModule):
    """A network, trained with Adam and cross-entropy or, with a budget, TRADES."""

    def __init__(self, network: nn.Module, trades_eps: float | None) -> None:
        super().__init__()
        self.network, self.trades_eps = network, trades_eps

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self.trades_eps is not None:
            return trades_loss(self, *batch, eps=self.trades_eps, alpha=self.trades_eps / 4, steps=5)
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def train(
    data: tuple[TensorDataset, TensorDataset], eps: float, method: str, network: str, seed: int, epochs: int
) -> list[dict[str, float]]:
    """Train a network and return what the monitor saw, without the times."""
    L.seed_everything(seed, verbose=False)
    training = {"pgd": [AdversarialTraining("pgd", eps=eps, steps=5)], "fast": [AdversarialTraining("fast", eps=eps)]}
    monitor = RobustnessMonitor(
        attacks=("pgd", "fgsm"), eps=eps, attack_every_n_epochs=1, attack_samples=1000, log_figures=False
    )
    trainer = L.Trainer(
        max_epochs=epochs,
        callbacks=[*training.get(method, []), monitor],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    channels = data[0].tensors[0].shape[1]
    module = Classifier(NETWORKS[network](channels), eps if method == "trades" else None)
    trainer.fit(module, DataLoader(data[0], batch_size=64, shuffle=True), DataLoader(data[1], batch_size=200))
    left_out = ("seconds/", "trust/")
    return [{key: value for key, value in row.items() if not key.startswith(left_out)} for row in monitor.history]


def planned(datasets: dict[str, object]) -> Iterator[tuple[str, str, str, str, int]]:
    """Yield name, data set, method, network and seed of all runs."""
    for seed, dataset, network, method in product(SEEDS, datasets, NETWORKS, METHODS):
        yield f"{dataset}-{method}-{network}-{seed}", dataset, method, network, seed


def load(arguments: argparse.Namespace) -> dict[str, tuple[TensorDataset, TensorDataset]]:
    """The first images of each data set, to train on and to validate."""
    loaders = {"fashion": lambda is_train: load_fashion_mnist(arguments.data, is_train)}
    if arguments.cifar10 is not None:
        loaders["cifar10"] = lambda is_train: load_cifar10(arguments.cifar10, is_train)
    sizes = {True: arguments.samples, False: 2000}
    return {
        name: tuple(TensorDataset(*(part[:size] for part in loader(is_train))) for is_train, size in sizes.items())
        for name, loader in loaders.items()
    }


def run_all(arguments: argparse.Namespace) -> None:
    """Train everything that is not in the file yet."""
    datasets, settings = load(arguments), {"epochs": arguments.epochs, "samples": arguments.samples}
    for name, dataset, method, network, seed in planned(datasets):
        runs = read(arguments.output)
        if arguments.only not in name or runs.get(name, {}).get("settings") == settings:
            continue
        start = time.perf_counter()
        history = train(datasets[dataset], BUDGETS[dataset], method, network, seed, arguments.epochs)
        runs[name] = {"settings": settings, "eps": BUDGETS[dataset], "history": history}
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(runs, indent=1) + "\n")
        last, seconds = history[-1], time.perf_counter() - start
        print(f"{name}: accuracy {last['acc']:.3f}, under PGD {last[REFERENCE]:.3f}, {seconds:.0f} s", flush=True)


def read(path: Path) -> dict[str, dict]:
    """The runs in a file, none if there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}


def stop_early(history: list[Evaluation], name: str, higher_is_better: bool) -> Evaluation:
    """The epoch that guarded early stopping with patience would have kept."""
    best, record, kept = -1.0, 0, history[0]
    for number, row in enumerate(history):
        if row["acc"] > best:
            best, record = row["acc"], number
        kept = pick(candidates(history[: number + 1]), name, higher_is_better)
        if number - max(history.index(kept), record) >= PATIENCE:
            break
    return kept


def judge(history: list[Evaluation], name: str) -> tuple[float, float, float, float]:
    """Kendall's tau, and the points lost by the epoch that is picked: alone, with the guard, and by early stopping.

    Alone, they are lost against the most robust epoch of the run; otherwise against the most robust one of those within
    two points of the best clean accuracy.
    """
    rows, is_higher_better = comparable(history, name, REFERENCE), bool(get_key(name).higher_is_better)
    values, robust = torch.tensor([(row[name], row[REFERENCE]) for row in rows], dtype=torch.float64).unbind(1)
    tau, near = kendall(values if is_higher_better else -values, robust), candidates(rows)
    best, best_near = (pick(some, REFERENCE)[REFERENCE] for some in (rows, near))
    lost = 100 * (best - pick(rows, name, is_higher_better)[REFERENCE])
    guarded = 100 * (best_near - pick(near, name, is_higher_better)[REFERENCE])
    stopped = 100 * (best_near - stop_early(rows, name, is_higher_better)[REFERENCE])
    return tau, lost, guarded, max(stopped, 0.0)  # an epoch that is more robust at lower accuracy is no gain


def describe(values: np.ndarray) -> str:
    """The mean with its 95 % interval, by resampling runs."""
    values = values[np.isfinite(values)]
    if not len(values):
        return "-"
    samples = np.random.default_rng(0).choice(values, (10_000, len(values))).mean(axis=1)
    low, high = np.percentile(samples, [2.5, 97.5])
    return f"{values.mean():.2f} ({low:.2f} to {high:.2f})"


def print_table(runs: dict[str, dict]) -> None:
    """Print the table of all runs, as Markdown."""
    histories = [run["history"] for run in runs.values()]
    ranked = [name for name, key in attack_free_metrics().items() if key.higher_is_better is not None]
    names = [name for name in (*ranked, "adv_acc/fgsm") if all(name in row for row in histories[0])]
    print(f"\n{len(runs)} runs; means over runs with 95 % intervals; points of accuracy under PGD\n")
    print("| value | Kendall's tau | lowest | negative in | points lost | guarded | guarded early stopping |")
    print("|---|---|---|---|---|---|---|")
    for name in names:
        tau, lost, guarded, stopped = np.array([judge(history, name) for history in histories]).T
        negative = f"{int((tau < 0).sum())} of {len(tau)}"
        lows = [f"`{name}`", describe(tau), f"{np.nanmin(tau):.2f}", negative]
        print(f"| {' | '.join([*lows, *map(describe, (lost, guarded, stopped))])} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="directory with Fashion-MNIST's idx files")
    parser.add_argument("--cifar10", help="directory with CIFAR-10's Python files")
    parser.add_argument("--only", default="", help="take the runs whose names contain this")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--samples", type=int, default=6000, help="number of images to train on")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the table of the file and train nothing")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)  # networks here are so small that threads cost more than they gain
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if not arguments.table:
        run_all(arguments)
    print_table(read(arguments.output))
