"""A run on several processes, started by torchrun or by the tests: writes what was logged as JSON."""

import json
import os
import sys
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_robustness import RobustModelCheckpoint, RobustnessMonitor
from lightning_robustness._measurement.keys import name_of
from tests.callbacks.modules import Classifier, digits_data, make_trainer, train_loader, val_loader

# Odd, so that a distributed sampler has to repeat a sample
NUM_SAMPLES = 103


def trained(kind=Classifier, steps=10):
    """Make a network that is the same in each process, and train it a little."""
    L.seed_everything(3, verbose=False)
    module = kind().train()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    for batch in DataLoader(digits_data(0, 64 * steps), batch_size=64) if steps else ():
        optimizer.zero_grad()
        module.training_step(batch, 0).backward()
        optimizer.step()
    return module


def validate(path, storage="exact", loader=None, **kwargs):
    """Validate a network, the same in each process, and return what was logged, by name."""
    module = trained()
    monitor = RobustnessMonitor(
        attacks=("pgd", "square"),
        eps=0.1,
        fim_samples=51,
        attack_samples=NUM_SAMPLES,
        storage=storage,
        log_figures=False,
    )
    trainer = make_trainer(path, monitor, **kwargs)
    trainer.validate(module, val_loader(16, NUM_SAMPLES) if loader is None else loader, verbose=False)
    metrics = {name_of("robustness", key): value.item() for key, value in trainer.callback_metrics.items()}
    return {name: value for name, value in metrics.items() if name is not None and "seconds" not in name}


class Interpolated(Classifier):
    """Has, in each validation epoch, weights between those of a new and of a trained network."""

    shares = (0.3, 1.0, 0.6)

    def __init__(self):
        super().__init__()
        self.ends = [trained().state_dict(), trained(steps=0).state_dict()]

    def on_validation_start(self):
        share = self.shares[self.trainer.current_epoch]
        trained, new = self.ends
        self.load_state_dict({name: (share * trained[name] + (1 - share) * new[name]) for name in new})


def fit(path, **kwargs):
    """Fit a network that is the same in each process; return the epochs that were kept, and all evaluations."""
    monitor = RobustnessMonitor(("pgd", "square"), 0.03, attack_every_n_epochs=1, fim_samples=51, log_figures=False)
    checkpoint = RobustModelCheckpoint("robustness/adv_acc/worst", dirpath=path / "kept", filename="{epoch}")
    trainer = make_trainer(
        path,
        monitor,
        checkpoint,
        max_epochs=len(Interpolated.shares),
        enable_checkpointing=True,
        num_sanity_val_steps=0,
        **kwargs,
    )
    trainer.fit(Interpolated(), train_loader(size=64), val_loader(16, NUM_SAMPLES))
    names = [name for name in monitor.history[0] if "seconds" not in name and name != "step"]
    history = [{name: entry[name] for name in names} for entry in monitor.history]
    kept = monitor.summary().kept
    return Path(checkpoint.best_model_path).name, kept.describe(), history


def as_torchrun_would(rank):
    """Make this process look like one of two on one machine."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1", TORCHELASTIC_RUN_ID="test")


if __name__ == "__main__":
    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    values = validate(directory, strategy="ddp", devices=1, num_nodes=2)
    (directory / f"{os.environ['RANK']}.json").write_text(json.dumps(values))
