"""What AdversarialTraining costs: an epoch with the callback against the same attack by hand and by torchattacks.

By hand there are two: a plain PyTorch loop, and a LightningModule that attacks in its ``training_step``. Everything is
measured in one run, in seconds of the processor, so that other programs do not count, and printed as ratios: medians
of repetitions, all sides in turn. The network is so small that a natural step takes some ten milliseconds. Takes about
ten minutes on two cores:
``python benchmarks/adversarial_training.py --data DIRECTORY``, where the directory holds the four files of
Fashion-MNIST (without ``--data``, torchvision downloads them, where it is installed). Needs torchattacks.

``--parts one_step`` measures one thing alone, on one thread and random images: the milliseconds of a batch with an
attack of one step, on the small network and on a ResNet-18. Batches of all sides take turns.
"""

import argparse
import itertools
import logging
import statistics
import time
import warnings
from collections.abc import Callable

import lightning as L
import torch
import torchattacks
from fashion_mnist import load_fashion_mnist
from networks import resnet18, small_network
from timing import record
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from lightning_robustness import AdversarialTraining, AdversarialWeightPerturbation, AttackFreeRegularization
from lightning_robustness.attacks import PGD
from lightning_robustness.losses import trades_loss

EPS = 0.1
Step = Callable[[nn.Module, Tensor, Tensor], Tensor]


def pgd(network: nn.Module, x: Tensor, y: Tensor, steps: int, alpha: float) -> Tensor:
    """Projected gradient descent, as one writes it oneself."""
    network.eval()
    x_adv = (x + torch.empty_like(x).uniform_(-EPS, EPS)).clamp(0, 1)
    for _ in range(steps):
        x_adv.requires_grad_()
        (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(network(x_adv), y), x_adv)
        x_adv = x_adv.detach() + alpha * gradient.sign()
        x_adv = (x + (x_adv - x).clamp(-EPS, EPS)).clamp(0, 1)
    network.train()
    return x_adv


def plain(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy."""
    return nn.functional.cross_entropy(network(x), y)


class Classifier(L.LightningModule):
    """The network of the benchmark, with a training step that is given."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.network, self.step = small_network(num_classes=10), step

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.step(self.network, *batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def loop(data: TensorDataset, step: Step) -> float:
    """Seconds of an epoch in plain PyTorch."""
    torch.manual_seed(0)
    network = small_network(num_classes=10)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    start = time.process_time()
    for x, y in DataLoader(data, batch_size=128, shuffle=True):
        loss = step(network, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return time.process_time() - start


class Stopwatch(L.Callback):
    """Seconds of the epochs of a fit; first in the list, so that it starts before the others do."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.start = time.process_time()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seconds = time.process_time() - self.start


def fit(data: TensorDataset, step: Step, *callbacks: L.Callback) -> float:
    """Seconds of an epoch in Lightning."""
    torch.manual_seed(0)
    stopwatch = Stopwatch()
    make_trainer(stopwatch, *callbacks).fit(Classifier(step), DataLoader(data, batch_size=128, shuffle=True))
    return stopwatch.seconds


def make_trainer(*callbacks: L.Callback) -> L.Trainer:
    """A Trainer for one epoch, with nothing that takes time of its own."""
    return L.Trainer(
        max_epochs=1,
        callbacks=list(callbacks),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def compare(title: str, sides: dict[str, Callable[[], float]], repetitions: int, reference: str) -> dict[str, float]:
    """Measure all sides in turn; print their seconds and return their ratios to one of them."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in tqdm(range(repetitions), desc=title, leave=False):
        for name in list(sides)[:: -1 if number % 2 else 1]:  # there and back, so that none is always behind the same
            times[name].append(sides[name]())
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"\n{title}\n   {'':34s} seconds   / {reference}")
    for name, median in medians.items():
        print(f"   {name:34s} {median:7.2f}  {median / medians[reference]:6.3f}", flush=True)
    return {name: median / medians[reference] for name, median in medians.items()}


def against(data: TensorDataset, name: str, steps: int, alpha: float, repetitions: int) -> None:
    """The callback against the same attack by hand and by torchattacks."""

    def by_hand(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return plain(network, pgd(network, x, y, steps, alpha), y)

    def by_torchattacks(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        attack = torchattacks.PGD(network, eps=EPS, alpha=alpha, steps=steps)
        return plain(network, attack(x, y), y)

    def callback(all_steps: bool) -> float:
        attack = PGD(eps=EPS, steps=steps, alpha=alpha)
        return fit(data, plain, AdversarialTraining(attack, all_steps=all_steps))

    sides = {
        "callback": lambda: callback(all_steps=True),
        "callback, all_steps=False": lambda: callback(all_steps=False),
        "loop by hand": lambda: loop(data, by_hand),
        "training_step by hand": lambda: fit(data, by_hand),
        "training_step with torchattacks": lambda: fit(data, by_torchattacks),
    }
    title = f"{name}: {steps} steps, an epoch of {len(data):,} images"
    ratios = compare(title, sides, repetitions, "loop by hand")
    record(
        **{
            f"{name}_callback": ratios["callback"],
            f"{name}_active": ratios["callback, all_steps=False"],
            f"{name}_torchattacks": ratios["training_step with torchattacks"],
        }
    )


class Marks(L.Callback):
    """Seconds from the beginning of one batch to that of the next."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.marks: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, idx: int) -> None:
        self.marks.append(time.process_time())


def one_step(name: str, make: Callable[[], nn.Module], shape: tuple[int, ...], batches: int, repetitions: int) -> None:
    """A batch with an attack of one step: medians, without the batches on which the callback measures something."""
    data = TensorDataset(torch.rand(batches * shape[0], *shape[1:]), torch.randint(10, (batches * shape[0],)))
    loader, alpha = DataLoader(data, batch_size=shape[0]), 1.25 * EPS

    def by_hand(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return plain(network, pgd(network, x, y, 1, alpha), y)

    def by_torchattacks(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return plain(network, torchattacks.PGD(network, eps=EPS, alpha=alpha, steps=1)(x, y), y)

    def in_a_loop() -> list[float]:
        network, marks = make(), []
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
        for x, y in loader:
            marks.append(time.process_time())
            loss = by_hand(network, x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return marks

    def in_lightning(step: Step, *callbacks: L.Callback) -> list[float]:
        marks, classifier = Marks(), Classifier(step)
        classifier.network = make()
        make_trainer(marks, *callbacks).fit(classifier, loader)
        return marks.marks

    def callback() -> list[float]:
        attack = PGD(eps=EPS, steps=1, alpha=alpha)
        return in_lightning(plain, AdversarialTraining(attack, overfitting_samples=0))

    sides: dict[str, Callable[[], list[float]]] = {
        "loop by hand": in_a_loop,
        "training_step by hand": lambda: in_lightning(by_hand),
        "training_step with torchattacks": lambda: in_lightning(by_torchattacks),
        "callback": callback,
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in tqdm(range(repetitions), desc=name, leave=False):
        for side in list(sides)[:: -1 if number % 2 else 1]:
            marks = sides[side]()
            times[side] += [end - start for start, end in itertools.pairwise(marks[1:])]
    medians = {side: statistics.median(values) for side, values in times.items()}
    print(f"\n{name}, {shape[0]} images, one step\n   {'':34s}      ms   / loop by hand")
    for side, median in medians.items():
        print(f"   {side:34s} {1000 * median:7.2f}  {median / medians['loop by hand']:6.3f}", flush=True)


def others(data: TensorDataset, repetitions: int) -> None:
    """The other ways to train, relative to a natural epoch."""

    def trades(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return trades_loss(network, x, y, eps=EPS, alpha=EPS / 4)

    def adversarial() -> AdversarialTraining:
        return AdversarialTraining("pgd", eps=EPS, steps=7)

    sides: dict[str, Callable[[], float]] = {
        "natural": lambda: fit(data, plain),
        "fast": lambda: fit(data, plain, AdversarialTraining("fast", eps=EPS)),
        "PGD, 7 steps": lambda: fit(data, plain, adversarial()),
        "PGD, 7 steps, concat": lambda: fit(
            data, plain, AdversarialTraining("pgd", eps=EPS, steps=7, combine="concat")
        ),
        "PGD, 7 steps, and AWP": lambda: fit(data, plain, adversarial(), AdversarialWeightPerturbation()),
        "TRADES, 10 steps": lambda: fit(data, trades),
        "attack-free: RDI": lambda: fit(data, plain, AttackFreeRegularization(rdi_weight=0.1, fisher_weight=0.0)),
        "attack-free: Fisher, 1 product": lambda: fit(
            data, plain, AttackFreeRegularization(rdi_weight=0.0, fisher_weight=0.1)
        ),
        "attack-free: Fisher, exact": lambda: fit(
            data, plain, AttackFreeRegularization(rdi_weight=0.0, fisher_weight=0.1, num_products=None)
        ),
    }
    compare(f"Ways to train, an epoch of {len(data):,} images", sides, repetitions, "natural")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="directory with Fashion-MNIST's idx files")
    parser.add_argument("--repetitions", type=int, default=8)
    names = ["pgd", "fast", "others", "one_step"]
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="which parts to run")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, torchattacks {torchattacks.__version__}")
    if {"pgd", "fast", "others"} & set(arguments.parts):
        images, labels = load_fashion_mnist(arguments.data, train=True)
        part, larger_part = (TensorDataset(images[:number], labels[:number]) for number in (6400, 25600))
    if "pgd" in arguments.parts:
        against(part, "PGD", steps=7, alpha=EPS / 4, repetitions=arguments.repetitions)
    if "fast" in arguments.parts:
        against(larger_part, "fast", steps=1, alpha=1.25 * EPS, repetitions=arguments.repetitions)
    if "others" in arguments.parts:
        others(part, arguments.repetitions)
    if "one_step" in arguments.parts:
        torch.set_num_threads(1)  # CPU time of several threads is not the time that passes
        one_step("Small network", lambda: small_network(num_classes=10), (128, 1, 28, 28), 40, arguments.repetitions)
        one_step("ResNet-18", lambda: resnet18(num_classes=10), (16, 3, 32, 32), 5, arguments.repetitions)
