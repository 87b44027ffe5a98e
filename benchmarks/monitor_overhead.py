"""Cost of RobustnessMonitor: a validation epoch, whole fits, and RDI against the attack that it stands for.

Everything is measured in one run and printed as ratios: medians of repetitions, both sides in turn. Takes about fifteen
minutes on two cores: ``python benchmarks/monitor_overhead.py --data DIRECTORY``, where the directory holds the four
files of Fashion-MNIST (without ``--data``, torchvision downloads them, where it is installed). With ``--repetitions 1``
it takes a third of that, and ``--part 3`` runs the third part alone.
"""

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial

import lightning as L
import torch
from fashion_mnist import load_fashion_mnist
from networks import resnet18, small_network
from timing import record, seconds
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from lightning_robustness import RobustnessMonitor
from lightning_robustness._model.route import find_route
from lightning_robustness.attacks import PGD, run_attack
from lightning_robustness.metrics import RobustnessDifferenceIndex


class Classifier(L.LightningModule):
    """Any network, trained with Adam."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Stopwatch(L.Callback):
    """Seconds of a validation epoch from its second batch on: with the first, the monitor finds the head, once a run.

    It stands first in the list of callbacks, so that all that others do falls between.
    """

    def __init__(self) -> None:
        self.start = self.seconds = 0.0

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx == 1:
            self.start = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seconds = time.perf_counter() - self.start


def make_trainer(directory: str, callbacks: list[L.Callback], **options: object) -> L.Trainer:
    """Trainer with TensorBoard, and nothing else that takes time."""
    return L.Trainer(
        default_root_dir=directory,
        callbacks=callbacks,
        accelerator="cpu",
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        **options,
    )


def in_turn(sides: dict[str, Callable[[], float]], repetitions: int, what: str) -> dict[str, list[float]]:
    """What each side says that it took, time after time; a slow moment of the machine hits all."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in tqdm(range(repetitions), desc=what, leave=False):
        for name, side in sides.items():
            times[name].append(side())
    return times


def print_ratio(times: dict[str, list[float]]) -> float:
    """Print the ratio of the second side to the first and the range of all pairs; return the ratio of medians."""
    (first, base), (second, other) = times.items()
    ratio = statistics.median(other) / statistics.median(base)
    pairs = sorted(b / a for a, b in zip(base, other, strict=True))
    print(
        f"   {first} {statistics.median(base):.2f} s, {second} {statistics.median(other):.2f} s: ratio {ratio:.3f} "
        f"({len(pairs)} pairs from {pairs[0]:.3f} to {pairs[-1]:.3f})"
    )
    return ratio


def centered_resnet18(x: Tensor) -> nn.Sequential:
    """A ResNet-18 that predicts all classes, without training: statistics of BatchNorm are there, and mean logits 0."""
    network = resnet18(num_classes=10).requires_grad_(False)
    network.train()(x)
    network.eval()
    network[-1].bias -= network(x).mean(dim=0)
    return network


def validation_epoch(repetitions: int, num_samples: int) -> None:
    """A validation epoch with RDI and ROBY against one without the monitor; and the hooks by themselves."""
    print(f"\n1. A validation epoch of a ResNet-18 at 32x32, {num_samples} samples, with RDI and ROBY")
    images = torch.rand(num_samples, 3, 32, 32)
    loader = DataLoader(TensorDataset(images, torch.arange(num_samples) % 10), batch_size=64)
    network = centered_resnet18(images[:128])

    def epoch(callbacks: list[L.Callback]) -> float:
        stopwatch = Stopwatch()
        with tempfile.TemporaryDirectory() as directory:
            make_trainer(directory, [stopwatch, *callbacks]).validate(Classifier(network), loader, verbose=False)
        return stopwatch.seconds

    epoch([])
    sides = {"without": lambda: epoch([]), "with": lambda: epoch([RobustnessMonitor(attacks=(), fim_samples=0)])}
    record(validation=print_ratio(in_turn(sides, repetitions, "validation epochs")))

    x = images[:64]
    tap = find_route(network, x[:2]).tap(network)

    def forward() -> None:
        with torch.inference_mode():
            network(x)

    def forward_with_hooks() -> None:
        with tap, torch.inference_mode():
            tap.listen(x)
            network(x)
            tap.take()

    times = seconds({"forward": forward, "hooks": forward_with_hooks}, 10 * repetitions)
    record(hooks=times["hooks"] / times["forward"])
    print(f"   forward pass of 64 samples: with the hooks {times['hooks'] / times['forward']:.3f} times as long")


def rdi_against_pgd(repetitions: int, num_samples: int) -> None:
    """What RDI adds to validation against an evaluation of the same samples with PGD."""
    print(f"\n2. What RDI adds to validation against PGD with 10 steps, ResNet-18 at 32x32, {num_samples} samples")
    x = torch.rand(num_samples, 3, 32, 32)
    network = centered_resnet18(x)
    logits = network(x)
    preds = logits.argmax(dim=1)

    def rdi_20_times() -> None:
        for _ in range(20):
            metric = RobustnessDifferenceIndex(num_classes=10)
            metric.update(logits, preds)
            metric.compute()

    all_steps, active = PGD(steps=10, all_steps=True), PGD(steps=10)
    functions = {
        "RDI": rdi_20_times,
        "all": lambda: run_attack(network, all_steps, x, preds),
        "active": lambda: run_attack(network, active, x, preds),
    }
    times = seconds(functions, repetitions)
    rdi = times["RDI"] / 20
    record(pgd_per_rdi=times["all"] / rdi)
    print(f"   RDI {1e3 * rdi:.2f} ms, PGD {times['all']:.2f} s: 1/{times['all'] / rdi:.0f}")
    print(
        f"   PGD that leaves alone what it has broken, as here by default, {times['active']:.2f} s: "
        f"1/{times['active'] / rdi:.0f}"
    )


def whole_fit(repetitions: int, directory: str | None, num_samples: int) -> None:
    """Five epochs with everything on, at the defaults, against five without."""
    images, labels = load_fashion_mnist(directory, train=True)
    train = TensorDataset(images[:num_samples], labels[:num_samples])
    validation = TensorDataset(*load_fashion_mnist(directory, train=False))
    print(
        "\n3. Five epochs with everything on, a small network on Fashion-MNIST, "
        f"{len(train)} images to train on and {len(validation)} to validate"
    )
    compare_fits("fit", repetitions, lambda: small_network(num_classes=10), train, validation, 128, RobustnessMonitor)


def whole_fit_of_resnet18(repetitions: int, directory: str | None) -> None:
    """Five epochs of a ResNet-18, on a hundredth of the images of CIFAR-10 and with a hundredth of all samples."""
    images, labels = load_fashion_mnist(directory, train=True)
    images = nn.functional.pad(images[:600], (2, 2, 2, 2)).expand(-1, 3, -1, -1).contiguous()
    train, validation = TensorDataset(images[:500], labels[:500]), TensorDataset(images[500:], labels[500:600])
    monitor = partial(RobustnessMonitor, attack_samples=3, fim_samples=3)
    print(
        "\n4. Five epochs with everything on, a ResNet-18 on Fashion-MNIST at 32x32 in three channels, 500 images to "
        "train on and\n   100 to validate, 3 attacked and 3 for the Fisher information: each a hundredth of CIFAR-10 "
        "and of the defaults"
    )
    compare_fits("resnet18_fit", repetitions, lambda: resnet18(num_classes=10), train, validation, 50, monitor)


def compare_fits(
    name: str,
    repetitions: int,
    make_network: Callable[[], nn.Module],
    train: TensorDataset,
    validation: TensorDataset,
    batch_size: int,
    make_monitor: Callable[[], RobustnessMonitor],
) -> None:
    """Print the ratio of fits of five epochs with and without the monitor, and the shares of its parts."""
    histories: list[list[dict[str, float]]] = []

    def fit(monitor: RobustnessMonitor | None) -> float:
        torch.manual_seed(0)
        model = Classifier(make_network())
        with tempfile.TemporaryDirectory() as logs:
            trainer = make_trainer(logs, [] if monitor is None else [monitor], max_epochs=5)
            start = time.perf_counter()
            trainer.fit(
                model,
                DataLoader(train, batch_size=batch_size, shuffle=True),
                DataLoader(validation, batch_size=batch_size),
            )
            duration = time.perf_counter() - start
        if monitor is not None:
            histories.append(monitor.history)
        return duration

    times = in_turn({"without": lambda: fit(None), "with": lambda: fit(make_monitor())}, repetitions, "fits")
    record(**{name: print_ratio(times)})
    total = statistics.median(times["with"])
    for key in sorted({key for row in histories[0] for key in row if "seconds/" in key}):
        part = key.partition("seconds/")[2]
        sums = [sum(row.get(key, 0.0) for row in history) for history in histories]
        calls = sum(key in row for row in histories[0])
        share = statistics.median(sums) / total
        record(**{f"{name}_{part}": share})
        print(f"   {part:9s} {share * total:6.2f} s in {calls} epochs: {share:6.2%} of the fit")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="directory with Fashion-MNIST's idx files")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--part", type=int, choices=range(1, 5), action="append", help="a part to run; by default all")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    parts = {
        1: lambda: validation_epoch(3 * arguments.repetitions, num_samples=320),
        2: lambda: rdi_against_pgd(arguments.repetitions, num_samples=32),
        3: lambda: whole_fit(arguments.repetitions, arguments.data, num_samples=60_000),
        4: lambda: whole_fit_of_resnet18(arguments.repetitions, arguments.data),
    }
    for part in arguments.part or parts:
        parts[part]()
