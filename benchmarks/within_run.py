"""How well values follow robust accuracy within a training run, and what it costs to keep and stop by them.

Trains small networks naturally, against PGD, with TRADES and fast, with the monitor attached. After each epoch, PGD
also attacks held-out images, which nothing else sees: accuracy on these is the truth that all values are judged by.
What the monitor logged is then replayed through the callbacks, which keep and stop as they would have in training.
Everything goes to a JSON file, run by run: a benchmark that is interrupted resumes where it was. From the file it makes
two tables. One has Kendall's tau of each value with the truth over the epochs of a run, and the points of true robust
accuracy that an epoch loses against the best one of the run: the epoch with the best value, the one that
``RobustModelCheckpoint`` keeps by it, and the one that is kept when ``RobustEarlyStopping`` stops by this value alone.
The other table compares rules to stop by.

Runs take up to two minutes each, on one idle core: ``python benchmarks/within_run.py --data DIRECTORY`` makes sixteen,
where the directory holds the four files of Fashion-MNIST (without ``--data``, torchvision downloads them, where it is
installed). ``--cifar10 DIRECTORY`` adds sixteen on CIFAR-10, ``--seeds 1`` makes half of them, ``--only pgd-plain``
takes the runs with this in their names, ``--table`` prints the tables alone.
"""

import argparse
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from cifar10 import load_cifar10
from fashion_mnist import load_fashion_mnist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_robustness import AdversarialTraining, RobustEarlyStopping, RobustModelCheckpoint, RobustnessMonitor
from lightning_robustness._measurement.keys import attack_free_metrics, get_key
from lightning_robustness._measurement.statistics import Evaluation, kendall, pick
from lightning_robustness.attacks import PGD, run_attack
from lightning_robustness.losses import trades_loss

TRUTH = "truth"
PATIENCE = 5
BUDGETS = {"fashion": 0.1, "cifar10": 8 / 255}
METHODS = ("natural", "pgd", "trades", "fast")
# Test images: the first to validate, the others held out
VALIDATED, HELD_OUT = 2000, 2000
RESULTS = Path(__file__).parent / "results" / "within_run.json"
# By name: key to keep by, key to stop by, and options of early stopping
STOPS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "no stop, kept by PGD": ("adv_acc/pgd", None, {}),
    "RDI confirmed by PGD, `patience=2`, kept by PGD": (
        "adv_acc/pgd",
        "rdi",
        {"patience": 2, "confirm": "robustness/adv_acc/pgd"},
    ),
    "PGD alone, `patience=3`, kept by PGD": ("adv_acc/pgd", "adv_acc/pgd", {"patience": 3}),
    "RDI alone, `patience=3`, kept by RDI": ("rdi", "rdi", {"patience": 3, "confirm": None}),
}


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


class Truth(L.Callback):
    """Attacks held-out images after each validation, and keeps their accuracy."""

    def __init__(self, data: TensorDataset, eps: float) -> None:
        self.data, self.eps = data, eps
        self.values: list[float] = []

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Attack, in a sandbox."""
        x, y = self.data.tensors
        attack = PGD(eps=self.eps, steps=20)
        right = [
            run_attack(pl_module, attack, *rows).adv_preds == rows[1]
            for rows in zip(x.split(500), y.split(500), strict=True)
        ]
        self.values.append(torch.cat(right).double().mean().item())


def train(
    data: tuple[TensorDataset, ...], eps: float, method: str, network: str, seed: int, epochs: int
) -> list[Evaluation]:
    """Train a network and return what the monitor saw, without the times, and the truth of each epoch."""
    L.seed_everything(seed, verbose=False)
    training = {"pgd": [AdversarialTraining("pgd", eps=eps, steps=5)], "fast": [AdversarialTraining("fast", eps=eps)]}
    monitor = RobustnessMonitor(attacks=("pgd", "fgsm"), eps=eps, attack_every_n_epochs=1, log_figures=False)
    truth = Truth(data[2], eps)
    trainer = L.Trainer(
        max_epochs=epochs,
        callbacks=[*training.get(method, []), monitor, truth],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    channels = data[0].tensors[0].shape[1]
    module = Classifier(NETWORKS[network](channels), eps if method == "trades" else None)
    trainer.fit(module, DataLoader(data[0], batch_size=64, shuffle=True), DataLoader(data[1], batch_size=200))
    left_out = ("seconds/", "trust/")
    return [
        {key: value for key, value in row.items() if not key.startswith(left_out)} | {TRUTH: value}
        for row, value in zip(monitor.history, truth.values, strict=True)
    ]


class Replay(L.LightningModule):
    """Logs what was measured instead of learning."""

    def __init__(self, history: list[Evaluation]) -> None:
        super().__init__()
        self.history = history
        self.weight = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """A step on nothing."""
        return self.weight.sum()

    def validation_step(self, batch: list[Tensor]) -> None:
        """Log the values of the epoch."""
        row = self.history[self.current_epoch]
        self.log_dict({f"robustness/{name}": row[name] for name in (*names([self.history]), "acc", "adv_acc/pgd")})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The rate is constant, as it was in training."""
        return torch.optim.SGD(self.parameters(), lr=1.0)


def replay(history: list[Evaluation], keep: str, stop: str | None, options: dict[str, Any]) -> dict[str, int]:
    """The epoch that is kept, and the number of epochs that are trained, by the callbacks themselves."""
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = RobustModelCheckpoint(
            f"robustness/{keep}", dirpath=directory, save_weights_only=True, guard=guard_of(keep)
        )
        stopping = [] if stop is None else [RobustEarlyStopping(f"robustness/{stop}", guard=guard_of(stop), **options)]
        trainer = L.Trainer(
            max_epochs=len(history),
            callbacks=[checkpoint, *stopping],
            default_root_dir=directory,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        loader = DataLoader(TensorDataset(torch.zeros(1, 1)))
        trainer.fit(Replay(history), loader, loader)
        kept = torch.load(checkpoint.best_model_path, weights_only=True)["epoch"]
        return {"epoch": int(kept), "trained": trainer.current_epoch}


def guard_of(name: str) -> str | None:
    """The guard that a value has by default; it has to be named where the monitor does not run."""
    return None if name == "boundary_acc" or name.startswith("adv_acc/") else "robustness/acc"


def replay_all(history: list[Evaluation]) -> dict[str, dict[str, dict[str, int]]]:
    """What the callbacks keep: by each value, by each value with a stop, and by the rules to stop by."""
    alone = {"patience": PATIENCE, "confirm": None}
    return {
        "kept": {name: replay(history, name, None, {}) for name in names([history])},
        "stopped": {name: replay(history, name, name, alone) for name in names([history])},
        "rules": {rule: replay(history, *settings) for rule, settings in STOPS.items()},
    }


def names(histories: list[list[Evaluation]]) -> list[str]:
    """Values that rank epochs, of those that all runs have."""
    ranked = [name for name, key in attack_free_metrics().items() if key.higher_is_better is not None]
    return [name for name in (*ranked, "adv_acc/fgsm", "adv_acc/pgd") if all(name in rows[0] for rows in histories)]


def planned(datasets: dict[str, object], seeds: int) -> Iterator[tuple[str, str, str, str, int]]:
    """Yield name, data set, method, network and seed of all runs."""
    for seed, dataset, network, method in product(range(seeds), datasets, NETWORKS, METHODS):
        yield f"{dataset}-{method}-{network}-{seed}", dataset, method, network, seed


def load(arguments: argparse.Namespace) -> dict[str, tuple[TensorDataset, ...]]:
    """Images of each data set to train on, to validate, and held out."""
    loaders = {"fashion": lambda is_train: load_fashion_mnist(arguments.data, is_train)}
    if arguments.cifar10 is not None:
        loaders["cifar10"] = lambda is_train: load_cifar10(arguments.cifar10, is_train)
    ranges = {
        True: [slice(arguments.samples)],
        False: [slice(VALIDATED), slice(VALIDATED, VALIDATED + arguments.held_out)],
    }
    return {
        name: tuple(
            TensorDataset(*(part[rows] for part in images))
            for is_train, parts in ranges.items()
            for images in [loader(is_train)]
            for rows in parts
        )
        for name, loader in loaders.items()
    }


def run_all(arguments: argparse.Namespace) -> None:
    """Train everything that is not in the file yet."""
    datasets = load(arguments)
    settings = {"epochs": arguments.epochs, "samples": arguments.samples, "held_out": arguments.held_out}
    for name, dataset, method, network, seed in planned(datasets, arguments.seeds):
        runs = read(arguments.output)
        if arguments.only not in name or runs.get(name, {}).get("settings") == settings:
            continue
        start = time.perf_counter()
        history = train(datasets[dataset], BUDGETS[dataset], method, network, seed, arguments.epochs)
        runs[name] = {"settings": settings, "seeds": arguments.seeds, "eps": BUDGETS[dataset]}
        runs[name] |= {"history": history, **replay_all(history)}
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(runs, indent=1) + "\n")
        last, seconds = history[-1], time.perf_counter() - start
        print(f"{name}: accuracy {last['acc']:.3f}, under PGD {last[TRUTH]:.3f}, {seconds:.0f} s", flush=True)


def read(path: Path) -> dict[str, dict]:
    """The runs in a file, none if there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}


def judge(run: dict[str, Any], name: str) -> tuple[float, float, float, float]:
    """Kendall's tau with the truth, and the points lost against the best epoch by the truth.

    By the epoch with the best value, by the one that is kept by it, and by the one that is kept until it stops.
    """
    history, is_higher_better = run["history"], bool(get_key(name).higher_is_better)
    rows = [row for row in history if np.isfinite(row.get(name, np.nan))]
    values, truth = torch.tensor([(row[name], row[TRUTH]) for row in rows], dtype=torch.float64).unbind(1)
    tau = kendall(values if is_higher_better else -values, truth)
    epochs = [row["epoch"] for row in history].index(pick(rows, name, is_higher_better)["epoch"])
    kept, stopped = (run[part][name]["epoch"] for part in ("kept", "stopped"))
    return tau, points_lost(history, epochs), points_lost(history, kept), points_lost(history, stopped)


def points_lost(history: list[Evaluation], epoch: int) -> float:
    """True robust accuracy that an epoch loses against the best one of its run."""
    return 100 * (pick(history, TRUTH)[TRUTH] - history[epoch][TRUTH])


def describe(values: np.ndarray) -> str:
    """The mean with its 95 % interval, by resampling runs."""
    values = values[np.isfinite(values)]
    if not len(values):
        return "-"
    samples = np.random.default_rng(0).choice(values, (10_000, len(values))).mean(axis=1)
    low, high = np.percentile(samples, [2.5, 97.5])
    return f"{values.mean():.2f} ({low:.2f} to {high:.2f})"


def print_tables(runs: dict[str, dict]) -> None:
    """Print the tables of all runs, as Markdown."""
    print(f"\n{len(runs)} runs; means with 95 % intervals; points of PGD accuracy on held-out images\n")
    print("| value | Kendall's tau | lowest | negative in | points lost | kept | kept until it stops |")
    print("|---|---|---|---|---|---|---|")
    for name in names([run["history"] for run in runs.values()]):
        tau, lost, kept, stopped = np.array([judge(run, name) for run in runs.values()]).T
        negative = f"{int((tau < 0).sum())} of {len(tau)}"
        lows = [f"`{name}`", describe(tau), f"{np.nanmin(tau):.2f}", negative]
        print(f"| {' | '.join([*lows, *map(describe, (lost, kept, stopped))])} |")
    print("\n| rule | points lost | worst | epochs trained |\n|---|---|---|---|")
    for rule in STOPS:
        lost = np.array([points_lost(run["history"], run["rules"][rule]["epoch"]) for run in runs.values()])
        trained = np.mean([run["rules"][rule]["trained"] / len(run["history"]) for run in runs.values()])
        print(f"| {rule} | {describe(lost)} | {lost.max():.1f} | {100 * trained:.0f} % |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="directory with Fashion-MNIST's idx files")
    parser.add_argument("--cifar10", help="directory with CIFAR-10's Python files")
    parser.add_argument("--only", default="", help="take the runs whose names contain this")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--samples", type=int, default=6000, help="number of images to train on")
    parser.add_argument(
        "--held-out", type=int, default=HELD_OUT, help="number of images that are attacked for the truth"
    )
    parser.add_argument("--seeds", type=int, default=2, help="number of runs of each kind")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the tables of the file and train nothing")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)  # networks here are so small that threads cost more than they gain
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not arguments.table:
        run_all(arguments)
    print_tables(read(arguments.output))
