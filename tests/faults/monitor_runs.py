"""Runs of a Trainer in which a part of the monitor fails, in one process or in the second of two."""

import warnings

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_robustness import RobustnessMonitor
from lightning_robustness._measurement.keys import name_of
from tests.callbacks.distributed_fit import as_torchrun_would
from tests.callbacks.modules import make_trainer
from tests.zoo import Trained

BATCH_SIZE = 6
NUM_SAMPLES = 24


def make_inputs(number=NUM_SAMPLES):
    return torch.rand(number, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def make_network():
    """A network that predicts all classes."""
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.data = 3 * torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 1.5
    with torch.no_grad():
        network[2].bias -= network(make_inputs()).mean(dim=0)
    return network


def make_data(number=NUM_SAMPLES):
    """Samples, of which every fifth has a label that the network does not predict."""
    x = make_inputs(number)
    with torch.no_grad():
        y = make_network()(x).argmax(dim=1)
    y[::5] = (y[::5] + 1) % 3
    return TensorDataset(x, y)


class Module(Trained):
    def __init__(self):
        super().__init__(make_network())


class Unlabelled(Module):
    def validation_step(self, batch):
        self(batch)


class Silent(Module):
    """Does not run the network in validation, so that the features take a pass of the monitor's own."""

    def validation_step(self, batch):
        pass


class Trap:
    """Raises in one part once it is armed; says which part a forward pass belongs to by what everybody can see."""

    def __init__(self, part, error):
        self.part = part
        self.error = error
        self.is_armed = False
        self.attack = None  # the one under way, of those that are callables
        self.num_calls = 0  # of the last of them, in this epoch

    def spring(self, part):
        if self.is_armed and part == self.part:
            raise self.error(f"no {part}")

    def batch_fn(self, batch):
        self.spring("batch")
        return batch

    def forward_fn(self, module, x):
        logits = module(x)
        if self.attack is None:
            is_sample = len(x) < BATCH_SIZE
            self.spring("sample" if is_sample else "features")
            if self.is_armed and self.part == "nan" and not is_sample:
                return logits * torch.nan
            if x.requires_grad:
                self.spring("gradient")
        return logits

    def make_attack(self, name):
        """An attack that moves against the sign of the inputs' gradient."""

        def attack(model, x, y):
            self.spring(name)
            self.num_calls += name == "last"
            if self.num_calls == 2:
                self.spring("second batch")
            self.attack = name
            try:
                with torch.enable_grad():
                    x_adv = x.detach().clone().requires_grad_()
                    (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(model(x_adv), y), x_adv)
                return (x + 0.1 * gradient.sign()).clamp(0, 1)
            finally:
                self.attack = None

        return attack


class Arm(L.Callback):
    """Arms a trap in the second epoch, or from the beginning."""

    def __init__(self, trap, is_early):
        self.trap, self.is_early = trap, is_early

    def setup(self, trainer, pl_module, stage):
        self.trap.is_armed = self.is_early

    def on_validation_start(self, trainer, pl_module):
        self.trap.is_armed = self.is_early or trainer.current_epoch == 1
        self.trap.num_calls = 0


class Board(CSVLogger):
    """A logger that takes texts and pictures as that of Weights & Biases does."""

    trap = None

    def log_text(self, key, columns, data, step=None):
        self.trap.spring("board")

    def log_image(self, key, images, step=None):
        self.trap.spring("board")


# The part that fails, the module, and what the monitor does besides
CASES = {
    "batch hook": ("batch", Module, {}),
    "features": ("features", Silent, {}),
    "not a number": ("nan", Silent, {}),
    "fim": ("gradient", Module, {}),
    "first attack": ("first", Module, {}),
    "last attack": ("last", Module, {}),
    "second batch": ("second batch", Module, {}),
    "pgd": ("gradient", Module, {"fim_samples": 0, "attacks": ["pgd"]}),
    "cw": ("gradient", Module, {"fim_samples": 0, "attacks": ["cw"]}),
    "square": ("sample", Module, {"fim_samples": 0, "attacks": ["square"]}),
    "board": ("board", Module, {"log_figures": True}),
}
# Built-in attacks differ in one process if anywhere
IN_TWO = [name for name in CASES if name not in ("cw", "square")]


def fit(path, part, kind=Module, is_early=False, error=ValueError, is_faulty=True, **options):
    """Fit for three epochs with a fault in the second, or in the sanity check; say how it went."""
    trap = Trap(part if is_faulty else None, error)
    attacks = dict.fromkeys(options.pop("attacks", ()))
    attacks = {name: name for name in attacks} or {name: trap.make_attack(name) for name in ("first", "last")}
    monitor = RobustnessMonitor(
        attacks,
        eps=0.1,
        attack_every_n_epochs=1,
        attack_samples=8,
        batch_size=2,
        batch_fn=trap.batch_fn,
        forward_fn=trap.forward_fn,
        **{"fim_samples": 8, "log_figures": False, **options},
    )
    module, logger = kind(), Board(path)
    logger.trap = trap
    trainer = make_trainer(path, Arm(trap, is_early), monitor, max_epochs=3, logger=logger, **_strategy())
    loader, raised = DataLoader(make_data(), batch_size=BATCH_SIZE), None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, loader, loader)
        except (Exception, SystemExit, KeyboardInterrupt) as exception:
            raised = f"{type(exception).__name__}: {exception}"
    texts = [str(warning.message) for warning in caught]
    return {
        "error": raised,
        "warnings": [
            text for text in texts if text.startswith("RobustnessMonitor") and "another forward pass" not in text
        ],
        "steps": trainer.global_step,
        "status": str(trainer.state.status.value),
        # Distortions are logged where half of the samples are broken, which is another matter
        "keys": {entry["epoch"]: [key for key in entry if "distortion" not in key] for entry in monitor.history},
        "logged": list(trainer.callback_metrics),
        "hooks": sum(len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in module.modules()),
    }


def _strategy():
    """Two processes if there is a group of them."""
    is_group = torch.distributed.is_initialized()
    return {"strategy": "ddp", "devices": 2} if is_group else {"devices": 1}


def fit_all(path, is_early, faulty_rank=None, names=CASES):
    """Cases by name; the fault is in one process, or in all of them."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    results = {}
    for name in names:
        part, kind, options = CASES[name]
        is_faulty = faulty_rank is None or rank == (0 if part == "board" else faulty_rank)
        results[name] = fit(path, part, kind, is_early, is_faulty=is_faulty, **options)
    return results


class Stream(IterableDataset):
    """Gives all samples, or none."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        yield from self.data


def watch(path, loader, kind=Module, **options):
    """Validate once; return what was logged, and the positions of the samples that were attacked in this process."""
    (x, _), attacked = make_data()[:], set()

    def attack(model, inputs, y):
        attacked.update((x == row).all(dim=1).nonzero().item() for row in inputs)
        return inputs

    monitor = RobustnessMonitor(**{"attacks": {"still": attack}, "log_figures": False, **options})
    trainer = make_trainer(path, monitor, use_distributed_sampler=False, **_strategy())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.validate(kind(), loader, verbose=False)
    values = {name_of("robustness", key): value.item() for key, value in trainer.callback_metrics.items()}
    return {key: value for key, value in values.items() if "seconds" not in key}, sorted(attacked)


def watch_all(rank, path, size=8):
    """Loaders that do not divide the samples among processes, and processes without any."""
    data, sizes = make_data(), {"fim_samples": size, "attack_samples": size}
    labelled = DataLoader(Stream(data if rank == 0 else ()), batch_size=BATCH_SIZE)
    unlabelled = DataLoader(Stream([x for x, _ in data] if rank == 0 else ()), batch_size=BATCH_SIZE)
    plain, blackbox = {"attacks": (), **sizes}, {"fim_method": "blackbox"}
    return {
        "everything": watch(path, DataLoader(data, batch_size=BATCH_SIZE), **sizes),
        "stream of everything": watch(path, DataLoader(Stream(data), batch_size=BATCH_SIZE), **sizes),
        "labels": watch(path, labelled, **sizes),
        "labels, blackbox": watch(path, labelled, **sizes, **blackbox),
        "no labels": watch(path, unlabelled, Unlabelled, **plain),
        "no labels, blackbox": watch(path, unlabelled, Unlabelled, **plain, **blackbox),
    }


def run_all(rank, path):
    """Everything in one of two processes."""
    as_torchrun_would(rank)
    return {
        "before": fit_all(path, is_early=True, names=IN_TWO),
        "after": fit_all(path, is_early=False, faulty_rank=1, names=IN_TWO),
        "watched": watch_all(rank, path),
    }
