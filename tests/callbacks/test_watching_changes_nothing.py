"""The heart of the suite: a run that is watched ends bit for bit like the run that is not."""

import random

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader

from lightning_robustness import RobustEarlyStopping, RobustModelCheckpoint, RobustnessMonitor
from lightning_robustness.attacks import get_attack
from tests.callbacks.distributed_fit import as_torchrun_would
from tests.callbacks.modules import Augmented, Classifier, digits_data, make_trainer, val_loader

# The validation data draw noise at every read, which the monitor rightly reports
pytestmark = pytest.mark.filterwarnings("ignore:RobustnessMonitor. expected the outputs that validation computed")


def run(path, callbacks, **kwargs):
    """Train three epochs; return everything that another run could have otherwise."""
    L.seed_everything(7, verbose=False)
    module, data = Classifier(), Augmented(digits_data(0, 200))
    trainer = make_trainer(path, *callbacks, max_epochs=3, logger=TensorBoardLogger(path), **kwargs)
    trainer.fit(
        module, DataLoader(data, batch_size=16, shuffle=True), DataLoader(Augmented(digits_data(1200, 1301)), 32)
    )
    optimizer, schedule = trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler
    return {
        "parameters and buffers": {name: tensor.clone() for name, tensor in module.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1],
        "python": random.getstate(),
        "order of data": data.order,
        "batches": module.seen,
        "gradients": [None if p.grad is None else p.grad.clone() for p in module.parameters()],
        "modes": [m.training for m in module.modules()],
        "requires_grad": [p.requires_grad for p in module.parameters()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in module.modules()],
        "steps": trainer.global_step,
    }


def assert_identical(first, second, path=""):
    assert type(first) is type(second), path
    if isinstance(first, dict):
        assert first.keys() == second.keys(), path
        for key in first:
            assert_identical(first[key], second[key], f"{path}/{key}")
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second), path
        for index, pair in enumerate(zip(first, second, strict=True)):
            assert_identical(*pair, f"{path}/{index}")
    elif isinstance(first, (torch.Tensor, np.ndarray)):
        assert first.dtype == second.dtype, path
        assert (torch.as_tensor(first) == torch.as_tensor(second)).all(), path
    else:
        assert first == second, path


def everything(**kwargs):
    defaults = {
        "eps": 0.1,
        "attack_every_n_epochs": 1,
        "fim_samples": 32,
        "attack_samples": 32,
        "batch_size": 16,
        "log_figures": False,
    }
    return RobustnessMonitor(attacks=("pgd", "cw", "square"), **{**defaults, **kwargs})


SETTINGS = {
    "plain": {},
    "accumulation across a validation in mid-epoch": {"accumulate_grad_batches": 4, "val_check_interval": 5},
    "clipping": {"gradient_clip_val": 0.5},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "without sanity check": {"num_sanity_val_steps": 0},
}


@pytest.mark.parametrize("kwargs", SETTINGS.values(), ids=SETTINGS.keys())
def test_one_process(tmp_path, kwargs):
    monitor = everything(log_figures=not kwargs, log_embeddings=not kwargs)  # once is enough: pictures take long
    assert_identical(run(tmp_path, [], **kwargs), run(tmp_path, [monitor], **kwargs))
    # Once more at the end, where the last validation was before the last step
    assert sum("asr/worst" in entry for entry in monitor.history) == (4 if "val_check_interval" in kwargs else 3)


def test_streaming_torchattacks_and_two_monitors(tmp_path):
    # Both reset the global random state, or add to gradients, when nobody keeps them from it
    foreign = {"square": get_attack("torchattacks:Square", n_queries=20), "cw": get_attack("torchattacks:CW", steps=5)}
    other = RobustnessMonitor(attacks=foreign, attack_samples=16, prefix="second", log_figures=False)
    monitors = [everything(storage="streaming"), other]
    assert_identical(run(tmp_path, []), run(tmp_path, monitors))


def test_stopping_and_checkpoints(tmp_path):
    callbacks = [
        everything(attack_every_n_epochs=None),
        RobustModelCheckpoint("robustness/adv_acc/worst", save_top_k=2, save_last=True),
        RobustEarlyStopping("robustness/rdi", patience=9),
    ]
    settings = {"enable_checkpointing": True}
    assert_identical(run(tmp_path, [], **settings), run(tmp_path, callbacks, **settings))
    assert len(list(tmp_path.rglob("last.ckpt"))) == 1


def run_as_one_of_two(rank, path, watched):
    as_torchrun_would(rank)
    return run(path, [everything()] if watched else [], strategy="ddp", devices=2)


def test_two_processes(tmp_path, two_processes):
    plain, watched = (two_processes(run_as_one_of_two, tmp_path, watched) for watched in (False, True))
    assert_identical(plain, watched)


def test_the_test_can_fail(tmp_path):
    class Careless(L.Callback):
        def on_validation_epoch_end(self, trainer, pl_module):
            torch.rand(1)

    plain, disturbed = run(tmp_path, []), run(tmp_path, [Careless()])
    with pytest.raises(AssertionError, match="parameters and buffers"):
        assert_identical(plain, disturbed)


def evaluate(path, *callbacks):
    L.seed_everything(7, verbose=False)
    module, trainer = Classifier(), make_trainer(path, *callbacks)
    trainer.validate(module, val_loader(), verbose=False)
    trainer.test(module, val_loader(), verbose=False)
    gradients = [(p.grad, p.requires_grad) for p in module.parameters()]
    states = random.getstate(), np.random.get_state()[1], torch.get_rng_state()
    return dict(module.state_dict()), gradients, states, [m.training for m in module.modules()]


def test_validate_and_test(tmp_path):
    assert_identical(evaluate(tmp_path), evaluate(tmp_path, everything()))
