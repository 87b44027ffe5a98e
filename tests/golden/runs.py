"""Small deterministic runs through the public surface, and everything they compute, in order."""

import json
import math
import tempfile
import warnings
import zlib
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from sklearn.datasets import load_digits
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util.tensor_util import make_ndarray
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_robustness import RobustnessMonitor
from lightning_robustness.attacks import Square
from lightning_robustness.evaluation import compare, evaluate, sweep

VALUES = Path(__file__).parent / "values.json"
EPS = 0.1
BUDGETS = [0.05, EPS, 0.2]
# What depends on the clock, on the machine or on the wording
LEFT_OUT = {"provenance", "settings", "png"}


class Classifier(L.LightningModule):
    """The quickstart's module with fewer channels."""

    def __init__(self, dtype):
        super().__init__()
        self.network = make_network(0).to(dtype)

    def forward(self, images):
        return self.network(images)

    def training_step(self, batch):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch):
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class StopAfter(L.Callback):
    """Stops earlier than the Trainer was told, so that attacks which are due run at the end of training."""

    def __init__(self, epochs):
        self.epochs = epochs

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = trainer.current_epoch + 1 >= self.epochs


def make_network(seed):
    """Make a network whose first weights are the same on all machines, which those of torch are not to the last bit."""
    layers = nn.Conv2d(1, 6, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(96, 24), nn.ReLU()
    network = nn.Sequential(*layers, nn.Linear(24, 10)).double()
    generator = torch.Generator().manual_seed(seed)
    for layer in (network[0], network[3], network[5]):
        uniform = torch.rand(layer.weight.shape, generator=generator, dtype=torch.float64)
        layer.weight.data = (2 * uniform - 1) / layer.weight[0].numel() ** 0.5
        layer.bias.data.zero_()
    return network


def make_loader(start, stop, batch_size, dtype=torch.float64):
    digits = load_digits()
    images = torch.tensor(digits.images[start:stop] / 16, dtype=dtype).unsqueeze(1)
    return DataLoader(TensorDataset(images, torch.tensor(digits.target[start:stop])), batch_size=batch_size)


def train_network(dtype=torch.float64, noise=0.0):
    """Train a network in plain torch."""
    network, generator = make_network(1).to(dtype), torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for x, y in list(make_loader(0, 640, 64, dtype)) * 3:
        optimizer.zero_grad()
        added = noise * torch.rand(x.shape, generator=generator, dtype=dtype)
        nn.functional.cross_entropy(network(x + added), y).backward()
        optimizer.step()
    return network


def describe_arithmetic():
    """Name what decides the last bits of a value: the version of torch, and how this machine computes with it."""
    probe = 0
    for dtype in (torch.float32, torch.float64):
        for parameter in train_network(dtype).parameters():
            probe = zlib.crc32(parameter.detach().numpy().tobytes(), probe)
    return {"torch": torch.__version__, "probe": f"{probe:08x}"}


def numbers(value):
    """Keep keys and their order, numbers, truth values and None; leave out times and words."""
    if isinstance(value, dict):
        kept = {key: entry for key, entry in value.items() if key not in LEFT_OUT}
        return {key: "time" if "seconds" in key else numbers(entry) for key, entry in kept.items()}
    if isinstance(value, list):
        return [numbers(entry) for entry in value]
    if isinstance(value, str):
        return "text"
    return value


def read_events(folder):
    """Read scalars with their steps by tag, and the tags of everything else, in the order of the file."""
    scalars, others = {}, []
    for path in sorted(Path(folder).rglob("events.*")):
        for event in EventFileLoader(str(path)).Load():
            for entry in event.summary.value:
                if entry.metadata.plugin_data.plugin_name == "scalars":
                    value = make_ndarray(entry.tensor).item()
                    scalars.setdefault(entry.tag, []).append([event.step, value])
                elif entry.tag not in others:
                    others.append(entry.tag)
    return {
        "scalars": {tag: "time" if "seconds" in tag else values for tag, values in scalars.items()},
        "others": others,
    }


def fit(dtype, max_epochs, **options):
    """Fit as the quickstart does and return what was logged."""
    L.seed_everything(0, verbose=False)
    module = Classifier(dtype)
    monitor = RobustnessMonitor(attacks=("pgd", "cw", "square"), eps=EPS, fim_samples=24, attack_samples=32, **options)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=max_epochs,
            callbacks=[monitor, StopAfter(3)],
            logger=TensorBoardLogger(folder),
            default_root_dir=folder,
            accelerator="cpu",
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            log_every_n_steps=5,
        )
        trainer.fit(module, make_loader(0, 480, 32, dtype), make_loader(1200, 1290, 32, dtype))
        found = {
            "callback_metrics": {key: value.item() for key, value in trainer.callback_metrics.items()},
            "history": monitor.history,
            "keys": dict.fromkeys(monitor.keys, True),
            "late_keys": dict.fromkeys(sorted(monitor.late_keys), True),
        }
        return numbers(found) | {"events": read_events(folder)}


def fit_to_the_end():
    """In double precision, with pictures."""
    return fit(torch.float64, max_epochs=3, clever_samples=1)


def fit_in_single_precision():
    """As most people train; stopped early."""
    return fit(torch.float32, max_epochs=4, log_figures=False)


def report_of(report):
    return numbers(json.loads(report.to_json()))


def evaluate_everything(dtype=torch.float64, clever_samples=2):
    return report_of(
        evaluate(
            train_network(dtype),
            make_loader(1200, 1290, 32, dtype),
            ("pgd", "cw", "square"),
            EPS,
            fim_samples=24,
            attack_samples=40,
            clever_samples=clever_samples,
            sweep_budgets=BUDGETS,
            decision_space="pca",
            batch_size=16,
            per_sample=True,
            progress=False,
        )
    )


def evaluate_in_single_precision():
    return evaluate_everything(torch.float32, clever_samples=0)


def compare_two():
    models = {"plain": train_network(), "noisy": train_network(noise=0.3)}
    loader, options = make_loader(1200, 1290, 32), {"attack_samples": 40, "fim_samples": 24, "progress": False}
    return report_of(compare(models, loader, ("fgsm", "pgd"), BUDGETS, **options))


def sweep_alone():
    loader = make_loader(1200, 1250, 32)
    return report_of(
        sweep(
            train_network(), loader, ("fgsm", "pgd", Square(num_queries=200)), BUDGETS, per_sample=True, progress=False
        )
    )


SINGLE = {"fit in single precision", "evaluate in single precision"}
RUNS = {
    "fit": fit_to_the_end,
    "fit in single precision": fit_in_single_precision,
    "evaluate": evaluate_everything,
    "evaluate in single precision": evaluate_in_single_precision,
    "compare": compare_two,
    "sweep": sweep_alone,
}


def run(name):
    """Run one of them without the warnings, which other tests are about; results are as JSON holds them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return json.loads(json.dumps(RUNS[name]()))


def read_values():
    """Read the values and what they were computed with; JSON has numbers as `repr` writes them."""
    return json.loads(VALUES.read_text(encoding="utf-8"))


def differences(actual, expected, tolerance, place=""):
    """List where two results differ: keys and their order, lengths, kinds, and numbers beyond a relative error."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        if list(actual) != list(expected):
            return [f"{place}: keys {list(actual)}, expected {list(expected)}"]
        pairs = [(f"{place}/{key}", actual[key], expected[key]) for key in expected]
    elif isinstance(expected, list) and isinstance(actual, list):
        if len(actual) != len(expected):
            return [f"{place}: {len(actual)} entries, expected {len(expected)}"]
        pairs = [(f"{place}[{i}]", *both) for i, both in enumerate(zip(actual, expected, strict=True))]
    else:
        return [] if is_same(actual, expected, tolerance) else [f"{place}: {actual!r}, expected {expected!r}"]
    return [found for name, one, other in pairs for found in differences(one, other, tolerance, name)]


def is_same(actual, expected, tolerance):
    """Compare two numbers or words; zeros of either sign are different."""
    if type(actual) is not type(expected):
        return False
    if tolerance == math.inf and isinstance(expected, int | float):
        return True
    if tolerance and isinstance(expected, float) and math.isfinite(expected):
        return math.isclose(actual, expected, rel_tol=tolerance, abs_tol=tolerance * 1e-3)
    return repr(actual) == repr(expected)
