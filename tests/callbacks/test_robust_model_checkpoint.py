import math
import re
from datetime import timedelta
from inspect import signature
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_robustness import RobustEarlyStopping, RobustModelCheckpoint, RobustnessMonitor
from tests.callbacks.distributed_fit import as_torchrun_would, trained
from tests.callbacks.modules import Classifier, Scripted, from_yaml, make_trainer, train_loader, val_loader


def fit(path, checkpoint, score, *callbacks, ckpt_path=None, max_epochs=None, module=None, **kwargs):
    """Train while a score, and a clean accuracy where one is given, are logged; return the epochs that were kept."""
    logged = {"robustness/acc" if "/" in checkpoint.monitor else "acc": kwargs.pop("acc")} if "acc" in kwargs else {}
    epochs = max_epochs or (len(score) if isinstance(score, list) else 10)
    settings = {"max_epochs": epochs, "enable_checkpointing": True, **kwargs}
    trainer = make_trainer(path, Scripted(**{checkpoint.monitor: score}, **logged), *callbacks, checkpoint, **settings)
    trainer.fit(module or Classifier(), train_loader(size=32), val_loader(size=16), ckpt_path=ckpt_path)
    if dist.is_initialized():
        dist.barrier()  # the first process removes files
    return kept(path)


def kept(path):
    return {torch.load(file, weights_only=False)["epoch"] for file in Path(path).glob("*.ckpt") if file.name[0] == "e"}


def checkpoint_of(monitor, path, **kwargs):
    return RobustModelCheckpoint(monitor, dirpath=path, **{"filename": "{epoch}", **kwargs})


def unguarded(path, **kwargs):
    return checkpoint_of("score", path, guard=None, **{"mode": "max", **kwargs})


def guarded(path, **kwargs):
    return checkpoint_of("score", path, guard="acc", **{"mode": "max", **kwargs})


EVERY_FIFTH = {0: 0.5, 5: 0.7, 9: 0.6}


def test_lightning_scores_epochs_with_the_value_of_another_one(tmp_path):
    plain = ModelCheckpoint(tmp_path / "plain", "{epoch}", monitor="score", mode="max", save_top_k=3)
    assert fit(tmp_path / "plain", plain, EVERY_FIFTH) == {5, 6, 7}
    robust = unguarded(tmp_path / "robust", save_top_k=3)
    assert fit(tmp_path / "robust", robust, EVERY_FIFTH) == {0, 5, 9}
    assert {Path(path).name: score.item() for path, score in robust.best_k_models.items()} == {
        f"epoch={epoch}.ckpt": pytest.approx(score) for epoch, score in EVERY_FIFTH.items()
    }
    assert robust.best_model_path == str(tmp_path / "robust" / "epoch=5.ckpt")
    assert robust.best_model_score.item() == pytest.approx(0.7)


def test_the_weights_are_those_of_the_epoch(tmp_path):
    class Counting(Classifier):
        def __init__(self):
            super().__init__()
            self.register_buffer("validations", torch.tensor(-1))

        def on_validation_epoch_start(self):
            self.validations += not self.trainer.sanity_checking

    checkpoint = unguarded(tmp_path)
    fit(tmp_path, checkpoint, [0.1, 0.3, 0.2], module=Counting())
    assert torch.load(checkpoint.best_model_path, weights_only=False)["state_dict"]["validations"] == 1


@pytest.mark.parametrize("mode", ["min", "max"])
def test_values_that_are_not_finite_are_ignored(tmp_path, mode):
    sign = 1 if mode == "max" else -1
    score = [math.nan, sign * 1.0, sign * math.inf, sign * 2.0, math.nan, -sign * math.inf]
    checkpoint = unguarded(tmp_path, mode=mode, save_top_k=4)
    assert fit(tmp_path, checkpoint, score) == {1, 3}
    assert checkpoint.best_model_score.item() == sign * 2.0


# RDI in the quickstart: best before the network has learnt anything
FALLING = [0.9, 0.5, 0.4, 0.42, 0.41]
LEARNING = [0.3, 0.7, 0.9, 0.91, 0.91]


@pytest.mark.parametrize(("mode", "acc"), [("max", LEARNING), ("min", [1 - value for value in LEARNING])])
def test_untrained_epochs_are_not_kept(tmp_path, mode, acc):
    assert fit(tmp_path / "none", unguarded(tmp_path / "none"), FALLING, acc=acc) == {0}
    checkpoint = guarded(tmp_path / "acc", guard_mode=mode)
    assert fit(tmp_path / "acc", checkpoint, FALLING, acc=acc) == {3}
    assert checkpoint.best_model_path == str(tmp_path / "acc" / "epoch=3.ckpt")
    assert checkpoint.best_model_score.item() == pytest.approx(0.42)


def test_several_checkpoints_are_judged_again(tmp_path):
    checkpoint = guarded(tmp_path, save_top_k=2)
    assert fit(tmp_path, checkpoint, [0.9, 0.5], acc=LEARNING) == {0, 1}
    assert checkpoint.best_model_path.endswith("epoch=1.ckpt"), "the other one is no candidate any more"
    assert checkpoint.best_model_score == 0.5
    assert sorted(score.item() for score in checkpoint.best_k_models.values()) == pytest.approx([0.5, 0.9])
    checkpoint = guarded(tmp_path / "long", save_top_k=2)
    assert fit(tmp_path / "long", checkpoint, FALLING, acc=LEARNING) == {3, 4}


ADV_ACC = "robustness/adv_acc/pgd"
# Robust overfitting: the rate falls in epoch 4, robust accuracy peaks in 5 and falls, clean accuracy goes on rising
OVERFITTING = [0.30, 0.40, 0.42, 0.43, 0.510, 0.530, 0.527, 0.50, 0.48, 0.46]
RISING = [0.50, 0.60, 0.65, 0.66, 0.780, 0.790, 0.800, 0.82, 0.84, 0.85]


@pytest.mark.parametrize(
    ("options", "epoch"),
    [
        ({}, 6),
        ({"tie_margin": 0.0}, 5),
        ({"tie_margin": 0.02}, 6),
        ({"tie_margin": 0.031}, 7),
        ({"guard": None}, 6),
        ({"guard": "robustness/acc"}, 8),
        ({"guard": "robustness/acc", "guard_tolerance": 0.04}, 9),  # by then, 7 is gone
        ({"guard": "robustness/acc", "guard_tolerance": 1.0}, 6),
    ],
)
def test_robust_overfitting(tmp_path, options, epoch):
    """By default the peak is kept, or what ties with it; a guard refuses it."""
    checkpoint = checkpoint_of(ADV_ACC, tmp_path, **options)
    assert fit(tmp_path, checkpoint, OVERFITTING, acc=RISING) == {epoch}
    assert checkpoint.best_model_path == str(tmp_path / f"epoch={epoch}.ckpt")
    assert checkpoint.best_model_score.item() == pytest.approx(OVERFITTING[epoch])


def reference(series, k, margin=0.005):
    """The epochs that are kept, the best one first: an insertion sort, with all pairs compared by the rules."""

    def comes_first(new, old, best):
        (value, acc), (old_value, old_acc) = series[new], series[old]
        is_near, is_old_near = (best - one < margin + 1e-6 for one in (value, old_value))
        if is_near != is_old_near:
            return is_near
        first, second = (acc, old_acc) if is_near else (value, old_value)
        return first > second or (first == second and new > old)

    kept = []
    for epoch in range(len(series)):
        best, candidates, kept = max(value for value, _ in series[: epoch + 1]), [*kept, epoch], []
        for candidate in candidates:
            place = sum(comes_first(other, candidate, best) for other in kept)
            kept.insert(place, candidate)
        kept = kept[:k]
    return kept


@pytest.mark.parametrize("k", [1, 2, 4, -1])
@pytest.mark.parametrize("seed", [0, 1])
def test_order_of_epochs(tmp_path, k, seed):
    """Coarse values, so that many are tied or equal, in a series that rises and falls."""
    random = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 9, (2, 24), generator=random)
    series = [
        ((500 - abs(epoch - 12) + noise[0, epoch].item()) / 1000, (800 + noise[1, epoch].item() // 2) / 1000)
        for epoch in range(24)
    ]
    checkpoint = checkpoint_of(ADV_ACC, tmp_path, save_top_k=k)
    values, accuracies = zip(*series, strict=True)
    expected = reference(series, None if k == -1 else k)
    assert fit(tmp_path, checkpoint, list(values), acc=list(accuracies)) == set(expected)
    assert checkpoint.best_model_path == str(tmp_path / f"epoch={expected[0]}.ckpt")
    assert checkpoint.best_model_score.item() == pytest.approx(values[expected[0]])
    assert checkpoint.kth_best_model_path == str(tmp_path / f"epoch={expected[-1]}.ckpt")


def test_the_highest_value_wins_without_clean_accuracy(tmp_path):
    checkpoint = checkpoint_of(ADV_ACC, tmp_path, save_top_k=2)
    assert fit(tmp_path, checkpoint, [0.500, 0.503, 0.501, 0.4]) == {1, 2}
    assert checkpoint.best_model_path.endswith("epoch=1.ckpt")


def test_equal_epochs_of_other_keys_are_tied(tmp_path):
    checkpoint = checkpoint_of("val/loss", tmp_path, mode="min")
    assert checkpoint.tie_margin == 0
    assert fit(tmp_path, checkpoint, [0.5, 0.4, 0.4001, 0.4, 0.4], acc=[0.8, 0.8, 0.9, 0.7, 0.6]) == {1}


@pytest.mark.parametrize(
    ("asr", "acc", "epoch"),
    [
        ([0.0, 0.3, 0.2], [0.1, 0.90, 0.90], 2),  # a constant network has a success rate of 0
        ([0.0, 0.200, 0.203, 0.204], [0.1, 0.89, 0.90, 0.87], 2),  # ties among candidates
        ([0.200, 0.204, 0.208], [0.88, 0.89, 0.901], 2),  # the first is no candidate any more, nor its value the best
    ],
)
def test_the_guard_comes_before_ties(tmp_path, asr, acc, epoch):
    checkpoint = checkpoint_of("robustness/asr/pgd", tmp_path, guard="robustness/acc")
    assert fit(tmp_path, checkpoint, asr, acc=acc) == {epoch}
    assert checkpoint.best_model_score.item() == pytest.approx(asr[epoch])


def test_all_checkpoints_stay_with_minus_one_and_none_with_zero(tmp_path):
    every = guarded(tmp_path / "all", save_top_k=-1)
    assert fit(tmp_path / "all", every, FALLING, acc=LEARNING) == {0, 1, 2, 3, 4}
    assert every.best_model_path.endswith("epoch=3.ckpt")
    assert fit(tmp_path / "none", guarded(tmp_path / "none", save_top_k=0), FALLING, acc=LEARNING) == set()


def test_the_guard_rises_in_an_epoch_without_score(tmp_path):
    """The checkpoint stays until there is a candidate to replace it."""
    score, acc = {0: 0.9, 3: 0.5}, [0.5, 0.9, 0.9, 0.9]
    assert fit(tmp_path / "before", guarded(tmp_path / "before"), score, acc=acc, max_epochs=3) == {0}
    assert fit(tmp_path / "after", guarded(tmp_path / "after"), score, acc=acc, max_epochs=4) == {3}


def test_a_fixed_name_is_written_over(tmp_path):
    checkpoint = guarded(tmp_path, filename="best", save_last=True)
    fit(tmp_path, checkpoint, FALLING, acc=LEARNING)
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"best.ckpt", "last.ckpt"}
    assert torch.load(tmp_path / "best.ckpt", weights_only=False)["epoch"] == 3
    assert checkpoint.last_model_path == str(tmp_path / "last.ckpt")


@pytest.mark.parametrize("resumed_after", range(1, 9, 2))
def test_a_resumed_run_decides_on_ties_as_it_would_have(tmp_path, resumed_after):
    def checkpoint(path):
        return checkpoint_of(ADV_ACC, path, save_top_k=2, save_last=True)

    score = [0.500, 0.497, 0.496, 0.494, 0.4, 0.498, 0.5005, 0.497, 0.499]
    acc = [0.80, 0.83, 0.82, 0.9, 0.9] + [0.81] * 4
    whole = checkpoint(tmp_path / "whole")
    assert fit(tmp_path / "whole", whole, score, acc=acc) == {1, 2}
    path = tmp_path / "stopped"
    save = ModelCheckpoint(tmp_path / "all", save_top_k=-1, filename="{epoch}")
    fit(path, checkpoint(path), score, save, acc=acc, max_epochs=resumed_after)
    resumed = checkpoint(path)
    assert fit(path, resumed, score, acc=acc, ckpt_path=tmp_path / "all" / f"epoch={resumed_after - 1}.ckpt") == {1, 2}
    states = [one.state_dict() for one in (whole, resumed)]
    assert states[0]["evaluations"] == states[1]["evaluations"]
    kept = [{Path(path).name: value for path, value in state["guard_values"].items()} for state in states]
    assert kept[0] == kept[1]
    assert Path(resumed.best_model_path).name == Path(whole.best_model_path).name == "epoch=1.ckpt"


def test_the_best_checkpoint_is_a_place_to_resume_from(tmp_path):
    checkpoint = guarded(tmp_path)
    fit(tmp_path, checkpoint, FALLING, acc=LEARNING, max_epochs=4)
    resumed = guarded(tmp_path)
    score, acc = [*FALLING[:4], 0.8], [*LEARNING[:4], 0.7]  # far below the best accuracy, which is remembered
    assert fit(tmp_path, resumed, score, acc=acc, ckpt_path=checkpoint.best_model_path) == {3}
    assert resumed.best_model_path == checkpoint.best_model_path


def test_validate_and_test_save_nothing(tmp_path):
    checkpoint = guarded(tmp_path)
    trainer = make_trainer(
        tmp_path, Scripted(score=FALLING, acc=LEARNING), checkpoint, max_epochs=4, enable_checkpointing=True
    )
    trainer.fit(Classifier(), train_loader(size=32), val_loader(size=16))
    trainer.validate(dataloaders=val_loader(size=16), ckpt_path="best", verbose=False)
    trainer.test(dataloaders=val_loader(size=16), ckpt_path="best", verbose=False)
    assert kept(tmp_path) == {3}
    assert checkpoint.best_model_path == str(tmp_path / "epoch=3.ckpt")


@pytest.mark.filterwarnings("ignore:RobustModelCheckpoint saw")
@pytest.mark.parametrize(
    ("kwargs", "expected"), [({"every_n_epochs": 1}, {0, 2, 4}), ({"every_n_train_steps": 2}, set())]
)
def test_triggers_of_lightning(tmp_path, kwargs, expected):
    checkpoint = unguarded(tmp_path, save_top_k=3, **kwargs)
    assert fit(tmp_path, checkpoint, {0: 0.1, 2: 0.2, 4: 0.3}, max_epochs=5) == expected


@pytest.mark.parametrize("options", [{}, {"save_last": True}, {"save_last": True, "every_n_train_steps": 1}])
def test_validation_in_mid_epoch(tmp_path, options):
    """Each validation of an epoch is an evaluation of its own, also where `last.ckpt` was saved just before it."""

    class Twice(L.Callback):
        def __init__(self):
            self.scores = iter([0.5, 0.1, 0.9, 0.2])

        def on_validation_epoch_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                pl_module.log("score", next(self.scores))

    checkpoint = unguarded(tmp_path, filename="{epoch}-{step}", **options)
    trainer = make_trainer(tmp_path, Twice(), checkpoint, max_epochs=2, val_check_interval=1, enable_checkpointing=True)
    trainer.fit(Classifier(), train_loader(size=64), val_loader(size=16))
    assert Path(checkpoint.best_model_path).name == "epoch=1-step=3.ckpt"


@pytest.mark.parametrize(
    ("score", "options", "match"),
    [
        ({}, {}, "never saw 'score'.*val_acc"),
        ([0.1, 0.2], {"train_time_interval": timedelta(hours=1)}, "'score' in validation, .*`train_time_interval`"),
        ([0.1, 0.2], {"every_n_train_steps": 10**6}, "'score' in validation, .*`every_n_train_steps`"),
        ([0.1, 0.2], {"every_n_epochs": 9}, "'score' in validation, .*`every_n_epochs`"),
        ([math.nan, math.inf], {}, "never saw a finite 'score': it was NaN .* No checkpoint was kept"),
        ([0.1, math.nan], {"every_n_epochs": 2}, "'score' in validation, .* when it was finite"),
    ],
)
def test_a_run_that_keeps_nothing_gets_a_warning(tmp_path, score, options, match):
    with pytest.warns(UserWarning, match=match):
        assert fit(tmp_path, unguarded(tmp_path, **options), score, max_epochs=2) == set()


def test_a_checkpoint_of_before_a_resume_is_not_forgotten(tmp_path, recwarn):
    checkpoint = unguarded(tmp_path, every_n_epochs=2)
    assert fit(tmp_path, checkpoint, [0.1, 0.2], max_epochs=2) == {1}
    path = checkpoint.best_model_path
    assert fit(tmp_path, unguarded(tmp_path, every_n_epochs=2), [0.1] * 3, ckpt_path=path, max_epochs=3) == {1}
    assert not [warning for warning in recwarn if "No checkpoint was kept" in str(warning.message)]


def test_the_summary_names_an_epoch_that_was_kept_without_an_attack(tmp_path):
    class Swapped(Classifier):
        """Is trained in epoch 1 alone, between two attacks."""

        def on_validation_start(self):
            self.load_state_dict((good if self.trainer.current_epoch == 1 else bad).state_dict())

    good, bad = trained(), Classifier()
    monitor = RobustnessMonitor(["pgd"], attack_every_n_epochs=3, fim_samples=0, attack_samples=16)
    checkpoint = checkpoint_of("robustness/rdi", tmp_path)
    trainer = make_trainer(tmp_path, monitor, checkpoint, max_epochs=4, enable_checkpointing=True)
    trainer.fit(Swapped(), train_loader(), val_loader())
    assert kept(tmp_path) == {1}
    assert ["adv_acc/pgd" in entry for entry in monitor.history] == [True, False, False, True]
    assert re.match("epoch 1 kept, not attacked; epoch [03] most robust: ", dict(monitor.summary().lines())["verdict"])


def test_keys_that_will_not_come_are_found_in_setup(tmp_path):
    monitor = RobustnessMonitor(attacks=("pgd",), prefix="r")
    misled = RobustModelCheckpoint("score", "max", guard_tolerance=0.1)
    for checkpoint, message in (
        (RobustModelCheckpoint("r/asr/pdg"), "RobustModelCheckpoint waits for 'r/asr/pdg'"),
        (misled, r"guarded by 'robustness/acc', .* Pass guard='r/acc'"),
    ):
        trainer = make_trainer(tmp_path, monitor, checkpoint, enable_checkpointing=True)
        with pytest.raises(MisconfigurationException, match=message):
            trainer.fit(Classifier(), train_loader(), val_loader())
    for followed in (RobustModelCheckpoint("r/asr/pgd"), RobustModelCheckpoint("score", "max", guard="r/acc")):
        followed.setup(make_trainer(tmp_path, monitor, followed, enable_checkpointing=True), Classifier(), "fit")


def test_fast_dev_run_saves_nothing_and_says_nothing(tmp_path, recwarn):
    assert fit(tmp_path, guarded(tmp_path), FALLING, acc=LEARNING, fast_dev_run=True) == set()
    assert not [warning for warning in recwarn if "RobustModelCheckpoint" in str(warning.message)]


@pytest.mark.parametrize("logger", [True, False])
def test_the_last_epoch_of_a_run_that_stops_early_is_judged(tmp_path, logger):
    """All attacks run after the stop; their worst case has no value in the last validation epoch."""

    class Stop(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            trainer.should_stop = trainer.current_epoch == 2

    options = {"attack_every_n_epochs": {"fgsm": 5}, "fim_samples": 0, "attack_samples": 101, "log_figures": False}
    monitor = RobustnessMonitor(attacks=("pgd", "fgsm"), eps=0.02, **options)
    checkpoint = checkpoint_of("robustness/adv_acc/worst", tmp_path, guard_tolerance=1.0, save_top_k=2)
    options = {"logger": CSVLogger(tmp_path) if logger else False, "max_epochs": 9, "enable_checkpointing": True}
    trainer = make_trainer(tmp_path, monitor, Stop(), checkpoint, **options)
    trainer.fit(module := Classifier(), train_loader(), val_loader())
    worst = {entry["epoch"]: entry["adv_acc/worst"] for entry in monitor.history if "adv_acc/worst" in entry}
    assert worst.keys() == {0, 2}
    assert worst[2] > worst[0]
    assert checkpoint.best_model_path == str(tmp_path / "epoch=2.ckpt")
    assert checkpoint.best_model_score.item() == pytest.approx(worst[2])
    saved = torch.load(checkpoint.best_model_path, weights_only=False)["state_dict"]
    assert all(torch.equal(saved[name], value) for name, value in module.state_dict().items())
    assert {Path(path).name for path in checkpoint.best_k_models} == {"epoch=0.ckpt", "epoch=2.ckpt"}


def test_several_loaders_and_the_monitor(tmp_path):
    monitor = RobustnessMonitor(attacks=("pgd",), eps=0.02, fim_samples=0, log_figures=False, dataloader_idx=1)
    checkpoint = checkpoint_of("robustness/adv_acc/worst", tmp_path)
    stopping = RobustEarlyStopping("robustness/rdi", patience=9)
    trainer = make_trainer(tmp_path, monitor, checkpoint, stopping, max_epochs=3, enable_checkpointing=True)
    trainer.fit(Classifier(), train_loader(), [val_loader(size=40), val_loader(size=60)])
    best = max(entry["adv_acc/worst"] for entry in monitor.history)
    tied = [entry for entry in monitor.history if entry["adv_acc/worst"] >= best - 0.005]
    expected = max(tied, key=lambda entry: (entry["acc"], entry["epoch"]))
    assert checkpoint.best_model_path == str(tmp_path / f"epoch={expected['epoch']}.ckpt")


def keep_as_one_of_two(rank, path):
    """Accuracies, and the finiteness of scores, differ: the processes have to decide alike, or wait forever.

    The same with ties: on average the values are equal, and two of the accuracies.
    """
    as_torchrun_would(rank)
    acc = [value + (0.05 if rank else -0.05) for value in LEARNING]
    score = [FALLING[0], math.nan if rank else 5.0, *FALLING[2:]]
    checkpoint, tied = guarded(path / "guarded"), checkpoint_of(ADV_ACC, path / "tied", save_top_k=2)
    epochs = fit(path / "guarded", checkpoint, score, acc=acc, strategy="ddp", devices=2)
    score, acc = ([0.5, 0.5, 0.75], [0.5, 0.75, 0.625]) if rank else ([0.5, 0.5, 0.25], [0.75, 0.75, 0.625])
    fit(path / "tied", tied, score, acc=acc, strategy="ddp", devices=2)
    # Logged in one of them alone, as with `rank_zero_only=True`
    alone = unguarded(path / "alone")
    assert fit(path / "alone", alone, {} if rank else [0.1, 0.3, 0.2], max_epochs=3, strategy="ddp", devices=2) == {1}
    paths = checkpoint.best_model_path, tied.best_model_path, tied.kth_best_model_path, alone.best_model_path
    return epochs, tied.best_model_score.item(), [Path(one).name for one in paths]


def test_two_processes(tmp_path, two_processes):
    first, second = two_processes(keep_as_one_of_two, tmp_path)
    assert first == second == ({3}, 0.5, ["epoch=3.ckpt", "epoch=1.ckpt", "epoch=2.ckpt", "epoch=1.ckpt"])
    assert kept(tmp_path / "tied") == {1, 2}


def test_the_state_of_the_plain_class(tmp_path):
    plain = ModelCheckpoint(tmp_path, "{epoch}-plain", monitor="score", mode="max", save_top_k=2)
    fit(tmp_path, plain, [0.5, 0.2])
    checkpoint = unguarded(tmp_path, save_top_k=2)
    checkpoint.load_state_dict(plain.state_dict())
    assert checkpoint.best_k_models == plain.best_k_models
    fit(tmp_path, checkpoint, [0.1, 0.4, 0.3])
    assert [Path(path).name for path in checkpoint.best_k_models] == ["epoch=0-plain.ckpt", "epoch=1.ckpt"]
    assert checkpoint.best_model_score.item() == pytest.approx(0.5)
    elsewhere = guarded(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="dirpath has changed"):
        elsewhere.load_state_dict(plain.state_dict())
    assert fit(tmp_path / "elsewhere", elsewhere, [0.1, 0.4], acc=[0.9, 0.9]) == {1}


def test_lightning_cli_knows_the_arguments_of_both_classes():
    arguments = {"monitor": "robustness/rdi", "save_top_k": 2, "guard_tolerance": 0.1, "tie_margin": 0.01}
    checkpoint = from_yaml(RobustModelCheckpoint, **arguments)
    assert (checkpoint.monitor, checkpoint.save_top_k, checkpoint.mode) == ("robustness/rdi", 2, "max")
    assert checkpoint.tie_margin == 0.01


@pytest.mark.parametrize("options", [{"every_n_train_steps": 4}, {"train_time_interval": timedelta(microseconds=1)}])
def test_a_trigger_between_validations_takes_the_value_of_the_next(tmp_path, options):
    checkpoint = unguarded(tmp_path, **options)
    trainer = make_trainer(
        tmp_path, Scripted(score=[0.1, 0.2, 0.9, 0.3]), checkpoint, max_epochs=4, enable_checkpointing=True
    )
    trainer.fit(Classifier(), train_loader(size=320), val_loader(size=16))
    assert kept(tmp_path) == {2}
    assert checkpoint.best_model_score == pytest.approx(0.9)


def test_a_trigger_before_a_resume_takes_the_value_of_the_next_validation(tmp_path):
    class Killed(Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            if self.trainer.global_step == 29:  # the last trigger was at step 28, and epoch 2 ends at step 30
                raise ZeroDivisionError

    def run(module, **kwargs):
        checkpoint = unguarded(tmp_path, every_n_train_steps=4, save_last=True)
        callbacks = Scripted(score=[0.1, 0.2, 0.9, 0.3]), checkpoint
        trainer = make_trainer(tmp_path, *callbacks, max_epochs=4, enable_checkpointing=True)
        trainer.fit(module, train_loader(size=320), val_loader(size=16), **kwargs)
        return Path(checkpoint.best_model_path).name, checkpoint.best_model_score.item()

    with pytest.raises(ZeroDivisionError):
        run(Killed())
    assert run(Classifier(), ckpt_path=tmp_path / "last.ckpt") == ("epoch=2.ckpt", pytest.approx(0.9))


@pytest.mark.skipif("save_on_exception" not in signature(ModelCheckpoint).parameters, reason="older Lightning")
def test_a_checkpoint_of_an_exception_replaces_no_other(tmp_path):
    class Killed(Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            if self.trainer.global_step == 2:
                raise ZeroDivisionError

    checkpoint = unguarded(tmp_path, filename="best", save_on_exception=True)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, checkpoint, [0.9, 0.1, 0.1], module=Killed())
    steps = {path.stem: torch.load(path, weights_only=False)["global_step"] for path in tmp_path.glob("*.ckpt")}
    assert steps == {"best": 1, "best-exception": 2}
    assert checkpoint.best_model_path == str(tmp_path / "best.ckpt")


def test_the_trainer_of_the_other_package_is_refused(tmp_path):
    other, checkpoint = pytest.importorskip("pytorch_lightning"), unguarded(tmp_path)
    trainer = other.Trainer(accelerator="cpu", logger=False, callbacks=[checkpoint], enable_progress_bar=False)
    with pytest.raises(MisconfigurationException, match=r"lightning\.pytorch"):
        checkpoint.setup(trainer, Classifier(), "fit")
