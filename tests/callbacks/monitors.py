"""Small monitors, their runs, and the names of what they log."""

import lightning as L
from torch import nn
from torch.utils.data import DataLoader

from lightning_robustness import RobustnessMonitor
from lightning_robustness._measurement.keys import name_of
from tests.callbacks.modules import Classifier, digits_data, make_trainer, train_loader, val_loader

FEATURES = {
    *("rdi", "rdi_intra", "rdi_inter", "rdi_embedding", "roby", "fsa", "fsd", "acc", "samples", "seconds/features")
}

FISHER = {
    *("fim", "fim_inverse", "fim_geometric", "lipschitz", "boundary", "boundary_acc", "samples_fim", "seconds/fim"),
    *("boundary_acc_low", "boundary_acc_high", "boundary_acc_plain"),
}

ALWAYS = {"skipped", "seconds/figures"}


def attack_keys(*names):
    kinds = ("asr", "adv_acc", "distortion", "adv_acc_low", "adv_acc_high", "adv_acc_plain")
    kinds = [f"{kind}/{name}" for kind in kinds for name in (*names, "worst")]
    return {*kinds, *(f"seconds/{name}" for name in names), "masking", "samples_attacks"}


def small_monitor(**kwargs):
    """Cheap: no pictures, one attack of a step."""
    defaults = {"attacks": ["fgsm"], "eps": 0.1, "fim_samples": 16, "attack_samples": 16, "log_figures": False}
    return RobustnessMonitor(**{**defaults, **kwargs})


def fit(path, *callbacks, module=None, data=None, loader=None, ckpt_path=None, **kwargs):
    """Train with callbacks; return the Trainer."""
    trainer = make_trainer(path, *callbacks, **kwargs)
    loaders = train_loader() if data is None else data, val_loader() if loader is None else loader
    trainer.fit(module or Classifier(), *loaders, ckpt_path=ckpt_path)
    return trainer


def validated(path, module, monitor, loader=None, **kwargs):
    """Validate with a monitor; return the values by name."""
    trainer = make_trainer(path, monitor, **kwargs)
    trainer.validate(module, val_loader() if loader is None else loader, verbose=False)
    return logged(trainer)


def logged(trainer, prefix="robustness"):
    """Values by name."""
    names = {key: name for key in trainer.callback_metrics if (name := name_of(prefix, key))}
    return {name: trainer.callback_metrics[key].item() for key, name in names.items()}


def fit_without_noise(path, *callbacks, **kwargs):
    """No random numbers are drawn in training, so that a resumed run is the same apart from the monitor."""
    L.seed_everything(1, verbose=False)
    module = Classifier()
    module.net[5] = nn.Identity()
    return fit(path, *callbacks, module=module, data=DataLoader(digits_data(0, 320), batch_size=32), **kwargs)


def count_hooks(module):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())
