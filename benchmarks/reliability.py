"""Try to break what the package promises, and count what holds: the table of ``docs/reliability.md``.

Takes a few minutes on an idle core: ``python benchmarks/reliability.py``; it needs ``scikit-learn`` and
``torchattacks``, and a system that can fork. Every row is a promise with the cases that were tried and those that held;
the cases that did not hold are listed below the table, and the exit code is then 1.
"""

import gc
import logging
import multiprocessing
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from reliability_modules import (
    LEAKS,
    NETWORKS,
    NETWORKS_IN_USE,
    Classifier,
    Edges,
    InGlobal,
    InList,
    InPlace,
    ManualClassifier,
    Scaled,
    SecondOrderClassifier,
    convolutional,
    perceptron,
)
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from tqdm import tqdm

from lightning_robustness import AdversarialTraining, InputSpace, RobustnessMonitor, evaluate
from lightning_robustness._isolation.sandbox import find_leaks
from lightning_robustness.attacks import PGD, get_attack, run_attack

MEMORY_EPOCHS = 200


class Digits(Dataset):
    """Images of digits with noise from every random number generator; notes what was asked for."""

    def __init__(self, start: int, stop: int, noise: float = 0.1) -> None:
        data = load_digits()
        self.x = torch.tensor(data.images[start:stop] / 16, dtype=torch.float32).unsqueeze(1)
        self.y = torch.tensor(data.target[start:stop])
        self.noise = noise
        self.order: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.order.append(index)
        noise = torch.rand_like(self.x[index]) + np.random.rand() + random.random() if self.noise else 0.0
        return (self.x[index] + self.noise * noise).clamp(0, 1), self.y[index]


class Stream(IterableDataset):
    """The same data without a length."""

    def __init__(self, data: Digits) -> None:
        self.data = data

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.data[index] for index in range(len(self.data)))


@dataclass
class Case:
    """A training to be run with and without the monitor."""

    network: Callable[[], nn.Module] = perceptron
    module: type[Classifier] = Classifier
    trainer: dict[str, Any] = field(default_factory=dict)
    monitor: dict[str, Any] = field(default_factory=dict)
    num_monitors: int = 1
    num_loaders: int = 1
    workers: int = 0
    stream: bool = False
    logger: type[CSVLogger] = CSVLogger


def _foreign_attacks() -> dict[str, Any]:
    # These reset the global random state, or add to gradients, when nobody keeps them from it
    return {"square": get_attack("torchattacks:Square", n_queries=10), "cw": get_attack("torchattacks:CW", steps=5)}


CASES = {
    **{name: Case(network) for name, network in NETWORKS.items()},
    "accumulation over 4 batches": Case(trainer={"accumulate_grad_batches": 4}),
    "validation in mid-epoch, within an accumulation": Case(
        trainer={"accumulate_grad_batches": 4, "val_check_interval": 5}
    ),
    "gradient clipping": Case(trainer={"gradient_clip_val": 0.5}),
    "mixed precision, bf16": Case(NETWORKS["dropout and BatchNorm"], trainer={"precision": "bf16-mixed"}),
    "bf16 throughout": Case(trainer={"precision": "bf16-true"}),
    "double precision": Case(trainer={"precision": "64-true"}),
    "without a sanity check": Case(trainer={"num_sanity_val_steps": 0}),
    "validation every second epoch": Case(trainer={"check_val_every_n_epoch": 2}),
    "manual optimization by the raw optimizer": Case(module=ManualClassifier),
    "L-BFGS": Case(module=SecondOrderClassifier),
    "two validation loaders": Case(num_loaders=2, monitor={"dataloader_idx": 1}),
    "a data set without a length": Case(stream=True),
    "loaders with worker processes": Case(workers=1),
    "a limit of validation batches": Case(trainer={"limit_val_batches": 2}),
    "attacks of torchattacks": Case(NETWORKS["dropout and BatchNorm"], monitor={"attacks": _foreign_attacks()}),
    "streaming mode": Case(monitor={"storage": "streaming"}),
    "two monitors": Case(num_monitors=2),
    "CLEVER": Case(monitor={"clever_samples": 2}),
    "figures and embeddings": Case(monitor={"log_figures": True, "log_embeddings": True}),
}


def make_monitor(prefix: str = "robustness", **options: Any) -> RobustnessMonitor:
    """Make a monitor with everything on, in small."""
    defaults = {
        "attacks": ("pgd", "cw", "square"),
        "eps": 0.1,
        "attack_every_n_epochs": 1,
        "fim_samples": 16,
        "attack_samples": 16,
        "log_figures": False,
    }
    return RobustnessMonitor(**{**defaults, **options}, prefix=prefix)


def make_trainer(directory: str, callbacks: list[L.Callback], **options: Any) -> L.Trainer:
    """Make a Trainer on the CPU without output."""
    defaults = {
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    return L.Trainer(callbacks=callbacks, default_root_dir=directory, **{**defaults, **options})


class Careless(L.Callback):
    """Draws one random number in each validation epoch: what the comparison has to notice."""

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        torch.rand(1)


def fit(case: Case, directory: str, watched: bool, *callbacks: L.Callback) -> dict[str, Any]:
    """Train, and return everything that another run could have otherwise."""
    L.seed_everything(7, verbose=False)
    module, train = case.module(case.network()), Digits(0, 200)
    prefixes = [f"robustness{number or ''}" for number in range(case.num_monitors if watched else 0)]
    monitors = [make_monitor(prefix, **case.monitor) for prefix in prefixes]
    trainer = make_trainer(directory, [*monitors, *callbacks], logger=CSVLogger(directory), **case.trainer)
    val = [DataLoader(Digits(1200, 1300), 32) for _ in range(case.num_loaders)]
    loader = DataLoader(Stream(train), 16) if case.stream else DataLoader(train, 16, True, num_workers=case.workers)
    trainer.fit(module, loader, val if case.num_loaders > 1 else val[0])
    for monitor in monitors:
        if any(entry.get("skipped") for entry in monitor.history) or "adv_acc/worst" not in monitor.history[-1]:
            raise RuntimeError("the monitor did not measure everything, so that the comparison would mean little")
    return state_of(trainer, module) | {"order of data": train.order, "batches": module.seen}


def state_of(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
    """Return what a run ends with."""
    parts = [part for part in module.modules() if part is not module]
    kinds = (Tensor, list, tuple, torch.Generator, np.random.Generator, random.Random)
    return {
        "parameters and buffers": {name: tensor.detach().clone() for name, tensor in module.state_dict().items()},
        "attributes": [{k: v for k, v in vars(part).items() if isinstance(v, kinds)} for part in parts],
        "optimizer": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedule": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "gradients": [p.grad for p in module.parameters()],
        "modes": [part.training for part in module.modules()],
        "requires_grad": [p.requires_grad for p in module.parameters()],
        "hooks": [(len(part._forward_hooks), len(part._forward_pre_hooks)) for part in module.modules()],
        "random states": (random.getstate(), np.random.get_state()[1], torch.get_rng_state()),
        "steps": trainer.global_step,
    }


def find_difference(first: Any, second: Any, place: str = "") -> str | None:
    """Return the first place at which two states differ, or None if they are bit for bit the same."""
    if type(first) is not type(second):
        return place
    if isinstance(first, weakref.ref):  # to what is compared elsewhere
        return None
    if isinstance(first, torch.Generator):
        first, second = first.get_state(), second.get_state()
    if isinstance(first, np.random.Generator):
        first, second = first.bit_generator.state, second.bit_generator.state
    if isinstance(first, random.Random):
        first, second = first.getstate(), second.getstate()
    if isinstance(first, dict):
        if first.keys() != second.keys():
            return place
        return next(filter(None, (find_difference(first[k], second[k], f"{place}/{k}") for k in first)), None)
    if isinstance(first, (list, tuple)):
        if len(first) != len(second):
            return place
        pairs = enumerate(zip(first, second, strict=True))
        return next(filter(None, (find_difference(*pair, f"{place}/{i}") for i, pair in pairs)), None)
    if isinstance(first, (Tensor, np.ndarray)):
        first, second = torch.as_tensor(first), torch.as_tensor(second)
        same = first.dtype == second.dtype and torch.equal(first, second)
        return None if same else place
    return None if first == second else place


def try_pair(case: Case) -> str | None:
    """Train with and without the monitor, and return where the two differ."""
    with tempfile.TemporaryDirectory() as directory:
        return find_difference(fit(case, directory, watched=False), fit(case, directory, watched=True))


def check_control() -> None:
    """Check that the comparison notices a callback that is careless."""
    with tempfile.TemporaryDirectory() as directory:
        plain, disturbed = fit(Case(), directory, False), fit(Case(), directory, False, Careless())
        if find_difference(plain, disturbed) is None:
            raise RuntimeError("the comparison does not notice a random number that a callback draws")


class Kill(L.Callback):
    """Ends the process at once, as the system does when memory runs out, at a hook of the third epoch."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._kill)

    def _kill(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.current_epoch == 2 and not trainer.sanity_checking:
            os.kill(os.getpid(), signal.SIGKILL)


class KillingAttack(PGD):
    """PGD that ends the process when it is called for the second time, in the third epoch."""

    calls = 0

    def perturb(self, *args: Any) -> Any:
        KillingAttack.calls += 1
        if KillingAttack.calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().perturb(*args)


def fit_to_resume(
    directory: str, *killers: L.Callback, attack: PGD | None = None, resume: bool = False
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Train five epochs without random numbers, with checkpoints, and return the state and the monitor's history."""
    L.seed_everything(1, verbose=False)
    monitor = make_monitor(attacks={"pgd": attack or PGD(eps=0.1)}, attack_every_n_epochs=2)
    save = ModelCheckpoint(directory, save_last=True)
    trainer = make_trainer(directory, [monitor, save, *killers], max_epochs=5, enable_checkpointing=True)
    module = Classifier(perceptron())
    loaders = DataLoader(Digits(0, 200, 0.0), 16), DataLoader(Digits(1200, 1300, 0.0), 32)
    trainer.fit(module, *loaders, ckpt_path=Path(directory) / "last.ckpt" if resume else None)
    history = [{key: value for key, value in entry.items() if "seconds" not in key} for entry in monitor.history]
    state = state_of(trainer, module)
    return {name: state[name] for name in ("parameters and buffers", "optimizer", "schedule", "steps")}, history


KILLS: dict[str, tuple[list[L.Callback], PGD | None]] = {
    "in a training step": ([Kill("on_train_batch_start")], None),
    "in a validation step": ([Kill("on_validation_batch_start")], None),
    "within an attack": ([], KillingAttack(eps=0.1)),
    "after validation": ([Kill("on_validation_end")], None),
    "between two epochs": ([Kill("on_train_epoch_end")], None),
}


def try_kill(killers: list[L.Callback], attack: PGD | None) -> str | None:
    """Kill a run with signal 9, resume it, and return where it differs from one that was not killed."""
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        run = partial(fit_to_resume, first, *killers, attack=attack)
        child = multiprocessing.get_context("fork").Process(target=run)
        child.start()
        child.join()
        if child.exitcode != -signal.SIGKILL:
            return f"the process ended with {child.exitcode}"
        return find_difference(fit_to_resume(first, resume=True), fit_to_resume(second))


class FailingAttack:
    """An attack that works twice: in the rehearsal and in the first epoch."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            raise RuntimeError("no attack")
        return x


def _with_pgd(shift: float) -> dict[str, Any]:
    """Return PGD, and an attack that is harmless for the two samples of the rehearsal only."""
    return {"pgd": "pgd", "foreign": lambda model, x, y: x + (shift if len(x) > 2 else 0.0)}


class Diverged(nn.Module):
    """A layer whose outputs are NaN in eval mode after many passes."""

    def __init__(self, passes: int) -> None:
        super().__init__()
        self.register_buffer("passes", torch.tensor(passes))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes -= 1
        return x * torch.nan if not self.training and self.passes < 0 else x


class Rejecting(CSVLogger):
    """A logger that does not take the values of the monitor."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if any(key.startswith("robustness") for key in metrics):
            raise ValueError("key rejected")
        super().log_metrics(metrics, step)


FAULTS = {
    "an attack raises": Case(monitor={"attacks": {"foreign": FailingAttack(), "pgd": "pgd"}}),
    "an attack returns NaN": Case(monitor={"attacks": _with_pgd(torch.nan)}),
    "an attack leaves the range": Case(monitor={"attacks": _with_pgd(5.0)}),
    "features become NaN": Case(lambda: perceptron(Diverged(20))),
    "a logger rejects keys": Case(logger=Rejecting),
    "a batch cannot be read": Case(monitor={"batch_fn": lambda batch: batch if len(batch[0]) > 4 else None}),
}


def try_fault(case: Case) -> str | None:
    """Let something fail once training runs, and return where the run differs from one that is not watched."""
    with tempfile.TemporaryDirectory() as directory:
        results = []
        for watched in (False, True):
            L.seed_everything(7, verbose=False)
            module = case.module(case.network())
            monitor = [make_monitor(**case.monitor)] if watched else []
            trainer = make_trainer(directory, list(monitor), logger=case.logger(directory), max_epochs=3)
            trainer.fit(module, DataLoader(Digits(0, 200), 16, True), DataLoader(Digits(1200, 1300), 32))
            results.append(state_of(trainer, module))
        return find_difference(*results)


class Memory(L.Callback):
    """Counts tensors, and the memory of the process, after every tenth epoch."""

    def __init__(self) -> None:
        self.tensors: list[int] = []
        self.megabytes: list[float] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch % 10 == 9:
            gc.collect()
            self.tensors.append(sum(issubclass(type(entry), Tensor) for entry in gc.get_objects()))
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.megabytes.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)


def try_memory(has_board: bool) -> str | None:
    """Train for many epochs, and return the growth of memory if it does grow."""
    L.seed_everything(7, verbose=False)
    memory, monitor = Memory(), make_monitor(attacks=("pgd",), attack_every_n_epochs=5)
    with tempfile.TemporaryDirectory() as directory:
        logger = TensorBoardLogger(directory) if has_board else False
        trainer = make_trainer(directory, [monitor, memory], max_epochs=MEMORY_EPOCHS, logger=logger)
        trainer.fit(Classifier(perceptron()), DataLoader(Digits(0, 64), 32), DataLoader(Digits(1200, 1264), 32))
    grown = memory.megabytes[-1] - memory.megabytes[0]
    # The history and its outcomes are NumPy arrays or numbers; keys that need a history come with a few scalars each
    half, end = memory.tensors[len(memory.tensors) // 2], memory.tensors[-1]
    result = f"{half} tensors after half of the epochs, {end} in the end; {grown:.1f} MB more than after 10 epochs"
    print(f"Memory, {'with' if has_board else 'without'} TensorBoard: {result}.")
    return None if end <= half and grown < 10 else result


def train(network: nn.Module, x: Tensor, y: Tensor, steps: int = 60) -> nn.Module:
    """Train a network in a few steps."""
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    return network.eval()


def try_gradients(attack: str) -> str | None:
    """Attack behind a square root at 0, and return the difference to a network with an epsilon under the root."""
    torch.manual_seed(0)
    data = Digits(0, 300)
    head = train(perceptron(), Edges(1e-8)(data.x), data.y)
    shares, warned = [], []
    for epsilon in (0.0, 1e-8):
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            result = run_attack(nn.Sequential(Edges(epsilon), head), get_attack(attack, eps=0.1), data.x, data.y)
        shares.append(result.success.float().mean().item())
        warned.append(any("epsilon" in str(warning.message) for warning in record))
    fits = abs(shares[0] - shares[1]) <= 0.03 and warned == [True, False]
    return None if fits else f"success {shares[0]:.3f} and, with an epsilon, {shares[1]:.3f}; warned: {warned}"


class Swapping(L.Callback):
    """Other weights in validation, from the first epoch on."""

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.scale = 1.0 if trainer.sanity_checking else 0.5
        pl_module.network[-1].weight.data.mul_(self.scale)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.network[-1].weight.data.div_(self.scale)


def _hidden() -> list[nn.Module]:
    return [convolutional(), convolutional()]


def _in_global() -> nn.Module:
    NETWORKS_IN_USE[:] = _hidden()
    return nn.Sequential(InGlobal(), nn.Linear(10, 10))


# Runs whose validation is of another network or of other inputs, and one that is not
SAMPLES: dict[str, tuple[Callable[[], L.LightningModule], list[L.Callback], bool]] = {
    "weights that a callback swaps in": (lambda: Classifier(perceptron()), [Swapping()], True),
    "inputs prepared in place": (lambda: InPlace(perceptron()), [], True),
    "networks of a list, in train mode": (lambda: Classifier(InList(_hidden())), [], True),
    "networks of the file, in train mode": (lambda: Classifier(_in_global()), [], True),
    "nothing of the kind": (lambda: Classifier(convolutional()), [], False),
}


def try_sample(make: Callable[[], L.LightningModule], callbacks: list[L.Callback], is_other: bool) -> str | None:
    """Return None if a monitor refuses or warns exactly where validation had other outputs for its sample."""
    L.seed_everything(7, verbose=False)
    reason = None
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        monitor = make_monitor(attacks=("pgd",))
        try:
            loaders = DataLoader(Digits(0, 200, 0.0), 16), DataLoader(Digits(1200, 1300, 0.0), 32)
            make_trainer(directory, [*callbacks, monitor]).fit(make(), *loaders)
        except Exception as error:
            reason = str(error)
    messages = [reason or "", *(str(warning.message) for warning in record)]
    is_told = any("outputs that validation computed" in message for message in messages)
    return None if is_told == is_other else f"told: {is_told} ({reason})"


def evaluate_digits(model: nn.Module, folder: str | Path | None = None, **options: Any) -> dict[str, Any]:
    """Evaluate a model and return all values but times."""
    data = Digits(1200, 1300)
    loader = DataLoader(TensorDataset(data.x, data.y), 32)
    defaults = {"attacks": ("pgd",), "eps": 0.1, "fim_samples": 16, "attack_samples": 32, "progress": False}
    report = evaluate(model, loader, resume=folder, **{**defaults, **options})
    return {name: value for name, value in report.metrics.items() if "seconds" not in name}


def try_damage(part: float) -> str | None:
    """Flip a bit of every file in a folder of results, one file at a time, and return what the next report loses."""
    torch.manual_seed(0)
    model = train(perceptron(), Digits(0, 300).x, Digits(0, 300).y)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "results"
        expected = evaluate_digits(model, folder)
        for path in sorted(folder.iterdir()):
            copy = Path(directory) / path.name
            shutil.copytree(folder, copy)
            content = bytearray(path.read_bytes())
            content[int(part * (len(content) - 1))] ^= 4
            (copy / path.name).write_bytes(content)
            try:
                found = evaluate_digits(model, copy)
            except ValueError as error:
                if path.name not in str(error):
                    return f"{path.name}: {error}"
                continue
            if found != expected:
                return f"{path.name}: other values"
    return None


class Tempered(nn.Module):
    """Divides logits by a number that is neither parameter nor buffer."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, x: Tensor) -> Tensor:
        return x / self.temperature


def _calling(factor: float) -> nn.Module:
    part = nn.Identity()
    part.forward = lambda x: factor * x  # type: ignore[method-assign]
    return part


PAIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "another activation": (nn.ReLU, nn.Tanh),
    "another attribute": (lambda: Tempered(1.0), lambda: Tempered(0.5)),
    "another value in a closure": (lambda: _calling(1.0), lambda: _calling(2.0)),
}


def try_other_model(first: Callable[[], nn.Module], second: Callable[[], nn.Module]) -> str | None:
    """Go on in a folder of results with a model of the same weights; return None if that is refused."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for part in (first, first, second):
            torch.manual_seed(0)
            try:
                results.append(evaluate_digits(perceptron(part()), folder))
            except ValueError as error:
                results.append(str(error))
    fits = results[0] == results[1] and isinstance(results[2], str)
    return None if fits else "accepted, or the same model was refused"


def try_leak(make: Callable[[], nn.Module], names: list[str]) -> str | None:
    """Return None if exactly what a pass changes for good is named."""
    found = find_leaks(nn.Sequential(make()), torch.rand(2, 4))
    fits = len(found) == len(names) and all(leak.endswith(name) for leak, name in zip(found, names, strict=True))
    return None if fits else ", ".join(found) or "nothing"


def _evaluate_pixels(data: TensorDataset) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Scaled(*perceptron())
    report = evaluate(
        model, DataLoader(data, 32), eps=8.0, input_space=InputSpace(high=255), attacks=("pgd",), progress=False
    )
    return {name: value for name, value in report.metrics.items() if "seconds" not in name}


def _fit_pixels(data: TensorDataset, is_robust: bool) -> dict[str, Any]:
    L.seed_everything(7, verbose=False)
    space = InputSpace(high=255)
    callback = AdversarialTraining(eps=8.0, steps=2, input_space=space)
    monitor = make_monitor(input_space=space, eps=8.0, attack_every_n_epochs=1)
    module = Classifier(Scaled(*perceptron()))
    with tempfile.TemporaryDirectory() as directory:
        trainer = make_trainer(directory, [*([callback] if is_robust else []), monitor])
        trainer.fit(module, DataLoader(data, 16), DataLoader(data, 32))
    if "adv_acc/pgd" not in monitor.history[-1]:
        raise RuntimeError("the monitor left attacks out")
    values = {name: value for name, value in monitor.history[-1].items() if "seconds" not in name}
    return {"values": values, "weights": module.state_dict()}


def try_bytes(run: Callable[[TensorDataset], dict[str, Any]]) -> str | None:
    """Return where results for pixels in bytes differ from those for the same pixels in floating point."""
    pixels = (255 * load_digits().images[:100] / 16).astype(np.uint8)
    x, y = torch.from_numpy(pixels).unsqueeze(1), torch.from_numpy(load_digits().target[:100])
    return find_difference(run(TensorDataset(x, y)), run(TensorDataset(x.float(), y)))


def main() -> None:
    """Try everything and print the table."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    promises: dict[str, dict[str, Callable[[], str | None]]] = {
        "A watched run ends bit for bit like one that is not": {
            name: partial(try_pair, case) for name, case in CASES.items()
        },
        "A run killed by signal 9 resumes to the same end": {
            name: partial(try_kill, *arguments) for name, arguments in KILLS.items()
        },
        "A fault once training runs costs a value, not the run": {
            name: partial(try_fault, case) for name, case in FAULTS.items()
        },
        "Gradients that are not finite are reported, and hide no more from attacks than with an epsilon": {
            name: partial(try_gradients, name) for name in ("fgsm", "bim", "mifgsm", "pgd", "cw")
        },
        "The sample has the outputs that validation computed, or the monitor says so": {
            name: partial(try_sample, *arguments) for name, arguments in SAMPLES.items()
        },
        "A flipped bit in any file of results changes no value": {
            f"{part:.0%} into each file": partial(try_damage, part) for part in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
        },
        "Results of another model with the same weights are refused": {
            name: partial(try_other_model, *pair) for name, pair in PAIRS.items()
        },
        "What `forward` changes for good is named": {
            name: partial(try_leak, *arguments) for name, arguments in LEAKS.items()
        },
        "Pixels in bytes give the results of the same pixels in floating point": {
            "evaluate": partial(try_bytes, _evaluate_pixels),
            "monitor": partial(try_bytes, partial(_fit_pixels, is_robust=False)),
            "adversarial training": partial(try_bytes, partial(_fit_pixels, is_robust=True)),
        },
        f"Memory does not grow over {MEMORY_EPOCHS} epochs": {
            "without a logger": partial(try_memory, False),
            "with TensorBoard": partial(try_memory, True),
        },
    }
    check_control()
    rows, broken = [], []
    for promise, cases in promises.items():
        held = 0
        for name, attempt in tqdm(cases.items(), desc=promise):
            try:
                difference = attempt()
            except Exception as error:
                difference = f"{type(error).__name__}: {error}"
            held += difference is None
            broken += [] if difference is None else [f"{promise}: {name}: {difference}"]
        rows.append((promise, len(cases), held))
    print("\n| promise | cases tried | cases held |\n|---|---|---|")
    for row in rows:
        print("| {} | {} | {} |".format(*row))
    print(f"\nPython {platform.python_version()}, torch {torch.__version__}, Lightning {L.__version__}.")
    print("\n".join(["", *broken]))
    sys.exit(1 if broken or any(tried != held or not tried for _, tried, held in rows) else 0)


if __name__ == "__main__":
    main()
