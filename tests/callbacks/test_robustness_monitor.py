import copy
import gc
import html
import pickle
import warnings
from contextlib import nullcontext

import lightning as L
import numpy as np
import pytest
import scipy.stats
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from sklearn.metrics import accuracy_score
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from lightning_robustness import InputSpace, RobustEarlyStopping, RobustnessMonitor, evaluate
from lightning_robustness._lightning import record, run
from lightning_robustness._lightning.trainer import takes_any_key
from lightning_robustness._measurement.keys import name_of, tag
from lightning_robustness._measurement.samples import spread_indices
from lightning_robustness.attacks import PGD, MinimumNormCW, Square, get_attack, run_attack
from lightning_robustness.functional import (
    boundary_distance,
    clever_score,
    fisher_spectral_norm,
    lipschitz_constant,
    robustness_difference_index,
    roby,
)
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


def by_hand(module, x, y, attacks, batch_size, seed=0):
    """Every value, from the weights and the data alone."""
    module.eval()
    with torch.no_grad():
        embedding = module.net[:-1](x)
        logits = module.net[-1](embedding)
    preds = logits.argmax(dim=1)
    norms = fisher_spectral_norm(module, x, input_space=InputSpace())
    to_boundary = boundary_distance(module, x, y).numpy()
    centers = np.stack([logits[preds == k].mean(dim=0) for k in preds.unique()])
    intra = [
        torch.linalg.vector_norm(logits[preds == k] - logits[preds == k].mean(0), dim=1).mean() for k in preds.unique()
    ]
    values = {
        "rdi": robustness_difference_index(logits, preds),
        "rdi_intra": np.mean(intra),
        "rdi_inter": np.linalg.norm(centers - centers.mean(axis=0), axis=1).mean(),
        "rdi_embedding": robustness_difference_index(embedding, preds),
        "roby": roby(embedding, preds),
        "fsa": roby(embedding, preds, return_components=True).fsa,
        "fsd": roby(embedding, preds, return_components=True).fsd,
        "acc": accuracy_score(y, preds),
        "samples": len(x),
        "fim": norms.mean(),
        "fim_inverse": (1 / norms).mean(),
        "fim_geometric": norms.log().mean().exp(),
        "lipschitz": lipschitz_constant(module, x).mean(),
        "boundary": np.median(to_boundary),
        "boundary_acc": (to_boundary > 0.1).mean(),
        "samples_fim": len(x),
        "samples_attacks": len(x),
        "skipped": 0,
    }
    broken, clean = {}, (preds == y).numpy()
    for name, attack in attacks.items():
        parts = torch.arange(len(x)).split(batch_size)
        results = [
            run_attack(module, attack, x[rows], y[rows], input_space=InputSpace(), seed=seed, positions=rows)
            for rows in parts
        ]
        adv_preds = torch.cat([result.adv_preds for result in results])
        distances = {norm: torch.cat([getattr(result, norm) for result in results]).numpy() for norm in ("l2", "linf")}
        flipped = clean & (adv_preds != y).numpy()
        within = distances["linf"] <= 0.1 + 1e-5 if name == "cw" else True
        broken[name] = np.where(flipped & within, distances["l2"], np.inf)
        values |= rates(name, flipped, clean, distances["l2"])
        if name == "cw":  # it counts within an l2 budget, at any distance for the distortion
            size = max(0.1, 0.1 * np.sqrt(x[0].numel()) / 4)
            counted = rates(name, flipped & (distances["l2"] <= size), clean, distances["l2"])
            values |= {key: counted[key] for key in ("asr/cw", "adv_acc/cw")} | {"l2_budget": size}
    closest = np.min(list(broken.values()), axis=0)
    return values | rates("worst", np.isfinite(closest), clean, closest)


def rates(name, flipped, clean, distances):
    values = {f"asr/{name}": flipped.sum() / clean.sum(), f"adv_acc/{name}": (clean & ~flipped).mean()}
    middle = np.sort(np.where(flipped, distances, np.inf)[clean])[(clean.sum() - 1) // 2]
    return {**values, **({f"distortion/{name}": middle} if np.isfinite(middle) else {})}


ATTACKS = {
    "pgd": PGD(eps=0.1),
    "cw": MinimumNormCW(steps=20, initial_steps=20),
    "square": Square(eps=0.1, num_queries=50),
}


def test_logged_values_are_those_computed_by_hand(tmp_path):
    module, monitor = Classifier(), RobustnessMonitor(attacks=ATTACKS, eps=None, batch_size=40)
    trainer = fit(tmp_path, monitor, max_epochs=2, module=module)
    x, y = val_loader().dataset.tensors
    expected = by_hand(module, x, y, ATTACKS, batch_size=40)
    values = logged(trainer)
    assert values.keys() == FEATURES | FISHER | ALWAYS | attack_keys(*ATTACKS) | {"l2_budget"}
    for key, value in values.items():
        if key in expected:
            assert value == pytest.approx(float(expected[key]), rel=2e-5), key
    ends = {key for key in values if key.startswith(("adv_acc_", "boundary_acc_"))}
    assert {key for key in values if key not in expected} == {"masking", *(k for k in values if "seconds" in k)} | ends
    assert all(values[key] > 0 for key in values if key.startswith("seconds/") and key != "seconds/figures")
    assert monitor.history[-1].keys() - {"epoch", "step"} == values.keys()
    assert [entry["epoch"] for entry in monitor.history] == [0, 1]
    assert "C&amp;W from a DDN start, 20 + 20 steps, l2 &lt;= 0.2" in monitor.to_html()


def test_a_final_verdict(tmp_path):
    attack = PGD(eps=0.1, steps=20, loss="margin")
    monitor = small_monitor(attack_samples=101, final_attack=attack)
    module, loader = Classifier(), val_loader()
    trainer = fit(tmp_path, monitor, max_epochs=2, module=module, loader=loader)
    first, last = monitor.history
    assert "adv_acc/final" not in first
    x, y = loader.dataset.tensors
    result = run_attack(module.eval(), attack, x, y)
    assert last["adv_acc/final"] == pytest.approx((result.adv_preds == y).float().mean().item())
    assert last["asr/final"] == pytest.approx(result.success_rate)
    assert logged(trainer)["adv_acc/final"] == pytest.approx(last["adv_acc/final"])
    assert last["adv_acc/worst"] == last["adv_acc/fgsm"], "the worst of those that run on the way"


class Clipped(Classifier):
    """Clips its weights, as no optimizer would."""

    def forward(self, x):
        self.net[-1].weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


def test_what_forward_passes_change_for_good_is_named(tmp_path):
    with pytest.warns(UserWarning, match=r"forward passes change net\.9\.weight, which cannot .*is_sandboxed"):
        fit(tmp_path, small_monitor(), module=Clipped())


def test_clever_on_request(tmp_path):
    monitor = small_monitor(attacks=(), fim_samples=0, clever_samples=1, clever_radius=0.5)
    assert monitor.keys[-1] == "robustness/clever"
    module, loader = Classifier(), val_loader()
    fit(tmp_path, monitor, module=module, loader=loader)
    (entry,) = monitor.history
    x = spread(loader.dataset.tensors, 1)[0]
    assert entry["clever"] == pytest.approx(clever_score(module.eval(), x, 0.5).mean().item(), rel=1e-4)
    assert entry["samples_clever"] == 1
    assert entry["seconds/clever"] > 0


def spread(tensors, size):
    """The sample that the monitor draws."""
    return [tensor[spread_indices(size, len(tensor))] for tensor in tensors]


def test_validate_and_test_log_the_same_as_fit(tmp_path):
    module, monitor = Classifier(), small_monitor()
    trainer = fit(tmp_path, monitor, module=module)
    fitted = logged(trainer)
    x, y = spread(val_loader().dataset.tensors, 16)
    assert fitted["fim"] == pytest.approx(fisher_spectral_norm(module.eval(), x).mean().item(), rel=1e-4)
    broken = run_attack(module, get_attack("fgsm", eps=0.1), x, y).adv_preds != y
    assert fitted["adv_acc_plain/fgsm"] == pytest.approx(1 - broken.float().mean().item())
    trainer.validate(module, val_loader(), verbose=False)
    again = logged(trainer)
    trainer.test(module, val_loader(), verbose=False)
    tested = logged(trainer, "test_robustness")
    assert fitted.keys() == again.keys() == tested.keys()
    for key in fitted:
        if not key.startswith("seconds/"):
            assert fitted[key] == again[key] == tested[key], key


def test_evaluate_reproduces_the_numbers_of_the_monitor(tmp_path):
    """With its strength, on the same loader, seed and samples; attacks of torchattacks run beside ours."""
    square = get_attack("torchattacks:Square", eps=0.1, n_queries=20)
    attacks = ["pgd", "cw", "square", "torchattacks:PGD", "torchattacks:CW", square]
    options = {"attacks": attacks, "eps": 0.1, "fim_samples": 16, "attack_samples": 40, "batch_size": 16, "seed": 3}
    module, monitor = Classifier(), RobustnessMonitor(**options, log_figures=False)
    fit(tmp_path, monitor, max_epochs=1, module=module)
    report = evaluate(module, val_loader(), strength="fast", **options, progress=False, num_examples=0)
    expected = {key: value for key, value in monitor.history[-1].items() if not key.startswith("seconds/")}
    assert {f"adv_acc/torchattacks_{name}" for name in ("pgd", "cw", "square")} <= expected.keys()
    assert {key: report.metrics[key] for key in expected if key in report.metrics} == pytest.approx(
        {key: value for key, value in expected.items() if key not in ("epoch", "step", "skipped")}, rel=1e-6
    )
    text = "C&W from a DDN start, 16 + 2 steps, l2 <= 0.2"
    assert text in report.threat_model.describe()["attacks"]
    assert text in html.unescape(monitor.to_html())


@pytest.mark.parametrize("storage", ["exact", "streaming"])
def test_attack_free_values_do_not_depend_on_the_batch_size(tmp_path, storage):
    module, values = Classifier(), []
    make_trainer(tmp_path).fit(module, train_loader())
    for batch_size in (1, 7, 101):
        monitor = small_monitor(attacks=(), fim_samples=20, storage=storage)
        values.append(validated(tmp_path, module, monitor, val_loader(batch_size)))
    for other in values[1:]:
        for key in (FEATURES | FISHER) - {"seconds/features", "seconds/fim"}:
            assert other[key] == pytest.approx(values[0][key], rel=1e-5), key


def test_every_key_is_in_the_event_file_at_its_steps(tmp_path):
    logger, monitor = TensorBoardLogger(tmp_path), small_monitor(attack_every_n_epochs=2, log_figures=True)
    trainer = fit(tmp_path, monitor, max_epochs=4, logger=logger)
    events = EventAccumulator(logger.log_dir, size_guidance={"scalars": 0, "images": 0}).Reload()
    steps = [9, 19, 29, 39]
    for key in FEATURES | FISHER | ALWAYS:
        assert [event.step for event in events.Scalars(tag("robustness", key))] == steps, key
    for key in attack_keys("fgsm"):
        if not key.startswith("distortion/"):  # absent where most samples withstand
            assert [event.step for event in events.Scalars(tag("robustness", key))] == [9, 29, 39], key
    for name in ("fgsm", "worst"):
        low, value, high = (
            [event.value for event in events.Scalars(f"robustness{key}/{name}")]
            for key in ("_details/adv_acc_low", "/adv_acc", "_details/adv_acc_high")
        )
        intervals = [scipy.stats.binomtest(round(16 * v), 16).proportion_ci(method="wilson") for v in value]
        assert low == pytest.approx([interval.low for interval in intervals], abs=1e-6)
        assert high == pytest.approx([interval.high for interval in intervals], abs=1e-6)
    values = [event.value for event in events.Scalars("robustness/rdi")]
    assert values == pytest.approx([entry["rdi"] for entry in monitor.history])
    ends = {f"robustness_details/adv_acc_{end}/{name}" for end in ("low", "high") for name in ("fgsm", "worst")}
    keys = {tag("robustness", key) for key in logged(trainer)}
    assert set(events.Tags()["scalars"]) == {"val_acc", "epoch", *keys, *ends}


@pytest.mark.parametrize(
    ("epochs", "every", "kwargs", "expected"),
    [
        (7, 3, {}, [0, 3, 6]),
        (6, 4, {}, [0, 4, 5]),
        (8, 3, {"check_val_every_n_epoch": 2}, [1, 5, 7]),
        (3, 2, {"val_check_interval": 5}, [0, 2, 2]),
        (-1, 100, {"max_steps": 35}, [0, 3]),
    ],
)
def test_attacks_run_when_they_are_due(tmp_path, epochs, every, kwargs, expected):
    monitor = small_monitor(attack_every_n_epochs=every)
    fit(tmp_path, monitor, max_epochs=epochs, **kwargs)
    assert [entry["epoch"] for entry in monitor.history if "asr/fgsm" in entry] == expected


def test_attacks_run_at_the_end_of_a_run_that_stops_early(tmp_path):
    class Stop(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            trainer.should_stop = trainer.current_epoch == 1

    monitor, logger = small_monitor(), CSVLogger(tmp_path)
    module = Classifier()
    trainer = fit(tmp_path, monitor, Stop(), max_epochs=9, logger=logger, module=module)
    # The last evaluation is one with that of validation, which saw the same weights
    assert [("asr/fgsm" in entry, "rdi" in entry) for entry in monitor.history] == [(True, True), (True, True)]
    assert trainer.callback_metrics["robustness/asr/fgsm"].item() == pytest.approx(monitor.history[-1]["asr/fgsm"])
    at_the_end = validated(tmp_path, module, small_monitor())
    assert at_the_end["asr/fgsm"] == pytest.approx(monitor.history[-1]["asr/fgsm"])
    rows = np.genfromtxt(f"{logger.log_dir}/metrics.csv", delimiter=",", names=True, deletechars="")
    assert np.isfinite(rows["robustness/asr/fgsm"]).sum() == 2


@pytest.mark.gpu_like
def test_early_stopping_and_checkpoints_see_the_values(tmp_path):
    monitor = small_monitor()
    best = ModelCheckpoint(tmp_path, monitor="robustness/adv_acc/fgsm", mode="max", filename="{epoch}")
    stop = EarlyStopping("robustness/rdi", mode="max", stopping_threshold=-2.0)
    fit(tmp_path, monitor, best, stop, max_epochs=3, enable_checkpointing=True)
    assert len(monitor.history) == 1
    assert best.best_model_score.item() == pytest.approx(monitor.history[0]["adv_acc/fgsm"])


class Constant(Classifier):
    def on_train_batch_start(self, batch, batch_idx):
        self.eval()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.filterwarnings("ignore:The samples were predicted as")
def test_shuffled_loaders_and_streams_get_one_sample_for_the_whole_run(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            yield from digits_data(1200, 1301)

    for loader in (val_loader(shuffle=True), DataLoader(Stream(), batch_size=32)):
        monitor = small_monitor(attack_every_n_epochs=1)
        fit(tmp_path, monitor, max_epochs=2, module=Constant(), loader=loader)
        first, second = monitor.history
        assert first["samples_fim"] == first["samples_attacks"] == 16
        assert first["fim"] == second["fim"]
        assert first["rdi"] == pytest.approx(second["rdi"], rel=1e-5)


def test_prefix_several_loaders_and_two_monitors(tmp_path):
    first, second = small_monitor(), small_monitor(dataloader_idx=1, prefix="other", attacks=())
    module = Classifier()
    trainer = fit(tmp_path, first, second, module=module, loader=[val_loader(size=60), val_loader(size=40)])
    assert logged(trainer)["samples"] == 60
    assert logged(trainer, "other")["samples"] == 40
    assert not [key for key in trainer.callback_metrics if "dataloader_idx" in key and "other" in key]
    alone = validated(tmp_path, module, small_monitor(attacks=()), val_loader(size=40))
    assert alone["rdi"] == pytest.approx(logged(trainer, "other")["rdi"])
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `RobustnessMonitor`"):
        make_trainer(tmp_path, small_monitor(), small_monitor())


@pytest.mark.parametrize(
    ("kwargs", "samples"),
    [
        ({"limit_val_batches": 2}, 64),
        ({"fast_dev_run": True}, 32),
        ({"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}, 101),
        ({"precision": "bf16-mixed"}, 101),
        ({"precision": "64-true"}, 101),
        ({"precision": "bf16-true"}, 101),
        ({"overfit_batches": 2}, 64),
        ({"inference_mode": False}, 101),
    ],
)
def test_settings_of_the_trainer(tmp_path, kwargs, samples):
    trainer = fit(tmp_path, monitor := small_monitor(), **kwargs)
    values = logged(trainer)
    keys = FEATURES | FISHER | ALWAYS | attack_keys("fgsm")
    # After few steps a network may be right nowhere, or predict two classes only
    rare = {f"{rate}/{name}" for rate in ("asr", "distortion") for name in ("fgsm", "worst")} | {"roby", "fsa", "fsd"}
    assert keys - rare <= values.keys() <= keys
    assert values["samples"] == samples
    assert all(np.isfinite(value) for value in values.values())
    assert len(monitor.history) == 1


@pytest.mark.filterwarnings("ignore:The samples were predicted as")
def test_precision_of_the_network_does_not_matter_for_a_double_one(tmp_path):
    module = Classifier()
    values = [
        validated(tmp_path, module, small_monitor(attacks=()), precision=precision)
        for precision in ("32-true", "64-true")
    ]
    for key in (FEATURES | FISHER) - {"seconds/features", "seconds/fim"}:
        assert values[0][key] == pytest.approx(values[1][key], rel=1e-4), key


def compiled_network(module):
    module.net = torch.compile(module.net, backend="eager")
    return module


def compiled_in_place(module):
    module.compile(backend="eager")
    return module


@pytest.mark.filterwarnings("ignore:The samples were predicted as")
@pytest.mark.parametrize("compiled", [compiled_network, compiled_in_place, lambda m: torch.compile(m, backend="eager")])
def test_compiled_networks(tmp_path, compiled):
    module = Classifier()
    plain = validated(tmp_path, module, small_monitor())
    values = validated(tmp_path, compiled(module), small_monitor())
    for key, value in plain.items():
        assert "seconds" in key or values[key] == pytest.approx(value, rel=1e-5), key
    torch._dynamo.reset()


def test_modules_and_trainers_of_the_other_package(tmp_path):
    import pytorch_lightning
    from pytorch_lightning.loggers import TensorBoardLogger as OtherLogger

    class Other(pytorch_lightning.LightningModule):
        forward, validation_step = Classifier.forward, Classifier.validation_step
        training_step, configure_optimizers = Classifier.training_step, Classifier.configure_optimizers

        def __init__(self):
            super().__init__()
            self.net = Classifier().net

    monitor, logger = small_monitor(log_figures=True), OtherLogger(tmp_path)
    stopping = RobustEarlyStopping("robustness/rdi", mode="max", stopping_threshold=-2.0)
    trainer = pytorch_lightning.Trainer(
        callbacks=[monitor, stopping],
        logger=logger,
        max_epochs=3,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module := Other(), train_loader(), val_loader())
    assert len(monitor.history) == 1
    x, y = val_loader().dataset.tensors
    assert monitor.history[0]["acc"] == pytest.approx(accuracy_score(y, module.eval()(x).argmax(dim=1)))
    events = EventAccumulator(logger.log_dir).Reload()
    assert {"robustness/rdi", "robustness/asr/fgsm"} <= set(events.Tags()["scalars"])
    assert events.Tags()["histograms"], "its TensorBoard logger gets more than scalars too"


class Unusual(Classifier):
    """Runs the network on noise, on the batch and on noise again, and returns a mapping."""

    def forward(self, x):
        return {"logits": self.net(2 * x - 1)}

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0])["logits"], batch[1])

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        for x in (torch.rand_like(batch[0]), batch[0], 1 - batch[0]):
            self(x)


class Absent(Unusual):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.net(batch[0].flip(0))


def test_the_call_on_the_batch_itself_counts(tmp_path):
    module = Unusual()
    values = [validated(tmp_path, module, small_monitor())]
    module.__class__ = Absent
    with pytest.raises(MisconfigurationException, match=r"runs it on other inputs and gets other logits.*module\(x\)"):
        validated(tmp_path, module, small_monitor())
    assert count_hooks(module) == 0
    with pytest.warns(UserWarning, match="RDI and ROBY take another forward pass"):
        values.append(validated(tmp_path, module, small_monitor(forward_fn=lambda module, x: module(x))))
    x, y = val_loader().dataset.tensors
    with torch.no_grad():
        logits = module.eval()(x)["logits"]
    for value in values:
        assert value["rdi"] == pytest.approx(robustness_difference_index(logits, logits.argmax(dim=1)).item(), rel=1e-5)
        assert value["acc"] == pytest.approx(accuracy_score(y, logits.argmax(dim=1)))


def test_forward_fn_batch_fn_head_and_input_space(tmp_path):
    space = InputSpace(mean=0.5, std=0.25)
    x, y = digits_data(1200, 1260).tensors
    data = [{"pixels": space.normalize(x[i]), "class": y[i]} for i in range(len(x))]

    class Dictionary(Classifier):
        forward = None

        def on_train_batch_start(self, batch, batch_idx):
            pass

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.net(batch["pixels"]), batch["class"])

        validation_step = training_step

    module = Dictionary()
    monitor = small_monitor(
        forward_fn=lambda module, x: module.net(x),
        batch_fn=lambda batch: (batch["pixels"], batch["class"]),
        head=module.net[9],
        input_space=space,
        num_classes=10,
        fim_samples=60,
        attack_samples=60,
    )
    loaders = {"data": DataLoader(data, batch_size=20), "loader": DataLoader(data, batch_size=25)}
    values = logged(fit(tmp_path, monitor, module=module, **loaders))
    raw = nn.Sequential(Normalize(space), module.net).eval()
    assert values["fim"] == pytest.approx(fisher_spectral_norm(raw, x).mean().item(), rel=1e-4)
    result = run_attack(raw, PGD(eps=0.1, steps=1, start="clean"), x, y)
    assert values["asr/fgsm"] == pytest.approx(result.success_rate, abs=0.02)


class Normalize(nn.Module):
    def __init__(self, space):
        super().__init__()
        self.space = space

    def forward(self, x):
        return self.space.normalize(x)


class Kill(L.Callback):
    """Ends a run in the middle of an epoch."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 35:
            raise RuntimeError("killed")


def fit_without_noise(path, *callbacks, **kwargs):
    """No random numbers are drawn in training, so that a resumed run is the same apart from the monitor."""
    L.seed_everything(1, verbose=False)
    module = Classifier()
    module.net[5] = nn.Identity()
    return fit(path, *callbacks, module=module, data=DataLoader(digits_data(0, 320), batch_size=32), **kwargs)


def test_resumed_run_logs_the_same_curve(tmp_path):
    def history(path, *callbacks, ckpt_path=None):
        monitor = small_monitor(attack_every_n_epochs=2, attacks=["pgd"])
        callbacks = monitor, ModelCheckpoint(path, save_last=True), *callbacks
        with pytest.raises(RuntimeError, match="killed") if len(callbacks) > 2 else nullcontext():
            fit_without_noise(path, *callbacks, max_epochs=5, enable_checkpointing=True, ckpt_path=ckpt_path)
        return [{key: value for key, value in entry.items() if "seconds" not in key} for entry in monitor.history]

    whole = history(tmp_path / "whole")
    killed = history(tmp_path / "killed", Kill())
    resumed = history(tmp_path / "killed", ckpt_path=tmp_path / "killed" / "last.ckpt")
    assert [entry["epoch"] for entry in resumed] == [0, 1, 2, 3, 4]
    assert resumed[:3] == killed
    assert ["asr/pgd" in entry for entry in whole] == [True, False, True, False, True]
    assert resumed == whole


def test_epochs_of_a_run_resumed_after_the_last_step_of_one(tmp_path):
    def steps_of_epochs(ckpt_path=None):
        monitor = small_monitor()
        save = ModelCheckpoint(tmp_path, every_n_train_steps=10, save_top_k=-1, filename="{step}")
        fit(tmp_path, monitor, save, max_epochs=4, enable_checkpointing=True, ckpt_path=ckpt_path)
        return {entry["epoch"]: entry["step"] for entry in monitor.history}

    steps = steps_of_epochs()
    resumed = steps_of_epochs(tmp_path / "step=20.ckpt")
    assert steps.keys() == {0, 1, 2, 3}
    assert resumed.items() <= steps.items()
    assert {2, 3} <= resumed.keys()


def test_evaluating_a_checkpoint_leaves_the_history(tmp_path):
    monitor, save = small_monitor(), ModelCheckpoint(tmp_path, monitor="robustness/rdi", mode="min", filename="{epoch}")
    trainer = fit(tmp_path, monitor, save, max_epochs=3, enable_checkpointing=True)
    history = list(monitor.history)
    trainer.validate(dataloaders=val_loader(), ckpt_path="best", verbose=False)
    assert monitor.history == history
    assert len(history) == 3
    assert logged(trainer)["rdi"] == pytest.approx(min(entry["rdi"] for entry in history), rel=1e-6)


def count_hooks(module):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


def test_hooks_are_gone_after_an_exception(tmp_path):
    class Failing(Classifier):
        def validation_step(self, batch, batch_idx):
            assert count_hooks(self) > 0
            raise RuntimeError("validation failed")

    module = Failing()
    with pytest.raises(RuntimeError, match="validation failed"):
        fit(tmp_path, small_monitor(), module=module)
    assert count_hooks(module) == 0


def test_hooks_are_there_during_validation_alone(tmp_path):
    class Counting(Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            assert count_hooks(self) == 0

    module = Counting()
    fit(tmp_path, small_monitor(), max_epochs=2, module=module)
    assert count_hooks(module) == 0


def test_memory_does_not_grow(tmp_path):
    counts = []

    class Tensors(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch < 5:  # trust is logged from the fifth evaluation on
                return
            gc.collect()
            tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
            sizes = [tensor.numel() for tensor in tensors]
            counts.append((len(tensors), sum(size for size in sizes if isinstance(size, int))))

    fit(tmp_path, small_monitor(attack_every_n_epochs=1), Tensors(), max_epochs=8)
    assert len(counts) == 3
    assert counts == sorted(counts, reverse=True)  # what other tests have left may be freed


def test_monitor_can_be_copied_and_pickled(tmp_path):
    monitor = small_monitor()
    fit(tmp_path, monitor)
    for other in (pickle.loads(pickle.dumps(monitor)), copy.deepcopy(monitor)):
        assert other.history == monitor.history
        assert other.state_key == monitor.state_key
        assert other.keys == monitor.keys


class Diverging(Classifier):
    def on_validation_start(self):
        if self.trainer.current_epoch == 1:
            self.kept = self.net[9].bias.detach().clone()
            self.net[9].bias.data.fill_(torch.nan)

    def on_validation_end(self):
        if self.trainer.current_epoch == 1:
            self.net[9].bias.data.copy_(self.kept)


def test_epochs_with_nan_are_marked_and_left_out(tmp_path):
    logger, monitor = CSVLogger(tmp_path), small_monitor(attack_every_n_epochs=1)
    with pytest.warns(UserWarning, match="left epoch 1 out: .* some samples are NaN"):
        fit(tmp_path, monitor, max_epochs=3, logger=logger, module=Diverging())
    assert [entry["epoch"] for entry in monitor.history] == [0, 2]
    rows = np.genfromtxt(f"{logger.log_dir}/metrics.csv", delimiter=",", names=True, deletechars="")
    skipped = rows["robustness_details/skipped"]
    assert skipped[np.isfinite(skipped)].tolist() == [0, 1, 0]
    assert np.isfinite(rows["robustness/rdi"]).sum() == 2


class Fails:
    """A part of the monitor that goes well a few times and then fails."""

    def __init__(self, function, number):
        self.function, self.number = function, number

    def __call__(self, *args, **kwargs):
        self.number -= 1
        if self.number < 0:
            raise ZeroDivisionError("ours")
        return self.function(*args, **kwargs)


# Where a part is used, how often it goes well, and what is left out when it no longer does
PARTS = {
    "conclusions": (run, "conclude", 1, "left epoch 1 out"),
    "conclusions at the end": (run, "conclude", 3, "left epoch 2 out"),
    "classes": (run, "warn_of_few_classes", 1, "left epoch 1 out"),
    "trust": (record, "measure_trust", 1, "trust and the picture of the run are left out"),
    "kept epoch": (record, "kept_epoch", 1, "trust and the picture of the run are left out"),
    "summary": (record, "find_notes", 0, "the summary of the run is left out"),
    "attacks at the end": (run.Run, "attack_at_the_end", 0, "attacks at the end of training are left out"),
}


@pytest.mark.parametrize("name", PARTS)
def test_no_error_of_the_monitor_ends_training(tmp_path, monkeypatch, name):
    owner, function, number, consequence = PARTS[name]
    broken = Fails(getattr(owner, function), number)
    monkeypatch.setattr(owner, function, broken)
    monitor = small_monitor(attack_every_n_epochs=2, final_attack="fgsm")
    with pytest.warns(UserWarning, match=f"{consequence}: ZeroDivisionError: ours"):
        trainer = fit(tmp_path, monitor, max_epochs=3)
    assert broken.number < 0
    assert trainer.global_step == 30
    assert torch.isfinite(trainer.callback_metrics["val_acc"])


class Averaged(L.Callback):
    """Other weights during validation, as a user's own averaging has them."""

    def on_validation_epoch_start(self, trainer, pl_module):
        self.scale = 1.0 if trainer.sanity_checking else 0.5
        pl_module.net[-1].weight.data.mul_(self.scale)

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.net[-1].weight.data.div_(self.scale)


class NormalizesInPlace(Classifier):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self(batch[0].sub_(0.3).div_(0.2))


class Smoothed(Classifier):
    def forward(self, x):
        return self.net(x + 0.3 * torch.rand_like(x))


def count_sample_warnings(path, *callbacks, **options):
    """Train, and count the warnings of a sample that has other outputs than in validation."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        fit(path, *callbacks, **options)
    return sum("outputs that validation computed" in str(warning.message) for warning in record)


def test_weights_that_are_swapped_out_before_the_monitor_measures(tmp_path):
    assert count_sample_warnings(tmp_path, Averaged(), small_monitor(), max_epochs=2) == 1
    assert count_sample_warnings(tmp_path, small_monitor(), Averaged(), max_epochs=2) == 0


def test_inputs_that_validation_changes_in_place_are_refused_or_prepared_alike(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"in place.*forward_fn="):
        fit(tmp_path, small_monitor(), module=NormalizesInPlace())
    monitor = small_monitor(forward_fn=lambda module, x: module((x - 0.3) / 0.2))
    assert count_sample_warnings(tmp_path, monitor, module=NormalizesInPlace()) == 0


def test_a_random_network_cannot_be_compared(tmp_path):
    assert count_sample_warnings(tmp_path, small_monitor(), module=Smoothed()) == 0


@pytest.mark.filterwarnings("ignore:Zeros has no last layer")
@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_networks_that_make_tensors_have_them_in_the_precision_of_the_run(tmp_path, precision):
    class Zeros(Classifier):
        def forward(self, x):
            return super().forward(x) + torch.zeros(len(x), 32) @ self.net[9].weight.T

    trainer = fit(tmp_path, small_monitor(), precision=precision, module=Zeros())
    assert {"rdi", "fim", "asr/fgsm"} <= logged(trainer).keys()


class PickyLogger(CSVLogger):
    """Rejects one of our keys from the second evaluation on."""

    def log_metrics(self, metrics, step=None):
        if "robustness/rdi" in metrics and step > 10:
            raise ValueError("no such key")
        super().log_metrics(metrics, step)


def test_a_logger_that_rejects_a_key_in_mid_run_does_not_end_it(tmp_path):
    monitor, logger = small_monitor(), PickyLogger(tmp_path)
    with pytest.warns(UserWarning, match="values could not be logged by PickyLogger: ValueError: no such key"):
        trainer = fit(tmp_path, monitor, max_epochs=3, logger=logger)
    assert trainer.global_step == 30
    assert len(monitor.history) == 3
    rows = np.genfromtxt(f"{logger.log_dir}/metrics.csv", delimiter=",", names=True, deletechars="")
    assert np.isfinite(rows["robustness/rdi"]).sum() == 1
    assert np.isfinite(rows["val_acc"]).sum() == 3


@pytest.mark.parametrize(("kind", "expected"), [(CSVLogger, True), (TensorBoardLogger, True), (PickyLogger, False)])
def test_loggers_of_lightning_itself_get_values_from_the_module(tmp_path, kind, expected):
    assert takes_any_key(make_trainer(tmp_path, logger=kind(tmp_path))) is expected


def test_test_time_augmentation_gets_one_warning(tmp_path):
    class Augmenting(Classifier):
        def validation_step(self, batch, batch_idx):
            x, y = batch
            both = self(x).softmax(1) + self(x.flip(-1)).softmax(1)
            self.log("val_acc", (both.argmax(dim=1) == y).float().mean())

    with pytest.warns(UserWarning, match="test-time augmentation") as record:
        fit(tmp_path, small_monitor(), max_epochs=2, module=Augmenting())
    assert sum("test-time augmentation" in str(warning.message) for warning in record) == 1


@pytest.mark.parametrize(("step", "run_step"), [("validation_step", "fit"), ("test_step", "test")])
def test_a_step_that_fetches_its_batches_is_refused(tmp_path, step, run_step):
    module = type("Fetching", (Classifier,), {step: lambda self, dataloader_iter: None})()
    trainer = make_trainer(tmp_path, small_monitor())
    loaders = (train_loader(), val_loader()) if run_step == "fit" else (val_loader(),)
    with pytest.raises(MisconfigurationException, match=f"`{step}` to take a batch .*`dataloader_iter`.* take `batch`"):
        getattr(trainer, run_step)(module, *loaders)


def test_sorted_data_of_which_a_limit_leaves_few_classes_gets_a_warning(tmp_path):
    x, y = digits_data(1200, 1400).tensors
    order = y.argsort()
    loader = DataLoader(TensorDataset(x[order], y[order]), batch_size=20)
    number = len(y[order][:40].unique())
    with pytest.warns(UserWarning, match=rf"samples of {number} of 10 classes.*`limit_val_batches`") as record:
        fit(tmp_path, small_monitor(attacks=(), fim_samples=0), loader=loader, max_epochs=2, limit_val_batches=2)
    assert sum("of 10 classes" in str(warning.message) for warning in record) == 1


def test_a_share_of_a_single_process_gets_a_warning(tmp_path):
    data = digits_data(1200, 1300)
    loader = DataLoader(data, batch_size=20, sampler=DistributedSampler(data, num_replicas=3, rank=2))
    with pytest.warns(UserWarning, match="among 3 processes but there is only one, so all values are of one share"):
        validated(tmp_path, Classifier(), small_monitor(attacks=(), fim_samples=0), loader)


class LogsAccuracy(Classifier):
    def validation_step(self, batch, batch_idx):
        self(batch[0])
        self.log("val/acc", 0.5)


class LogsAccuracyAtTheEnd(Classifier):
    def on_validation_epoch_end(self):
        self.log("val/acc", 0.5)


@pytest.mark.parametrize("kind", [LogsAccuracy, LogsAccuracyAtTheEnd])
def test_keys_of_the_module_are_not_overwritten(tmp_path, kind):
    with pytest.raises(MisconfigurationException, match=r"alone in logging val/acc .* another `prefix` than 'val'"):
        trainer = fit(tmp_path, small_monitor(prefix="val"), module=kind())
    trainer = fit(tmp_path, small_monitor(prefix="val_robustness"), module=kind())
    assert trainer.callback_metrics["val/acc"] == 0.5


def test_keys_of_the_module_are_left_to_it_where_there_was_no_sanity_check(tmp_path):
    with pytest.warns(UserWarning, match=r"alone in logging val/acc .* Ours is left out\."):
        trainer = fit(tmp_path, small_monitor(prefix="val"), num_sanity_val_steps=0, module=LogsAccuracy())
    assert trainer.callback_metrics["val/acc"] == 0.5
    assert "val/rdi" in trainer.callback_metrics


def test_masked_gradients_are_a_key_and_a_warning_once(tmp_path):
    class Quantised(Classifier):
        def forward(self, x):
            return self.net(x) if self.training else self.net((8 * x).round() / 8)

    monitor = small_monitor(attacks=("pgd", "square"), eps=0.2, attack_samples=101, attack_every_n_epochs=1)
    with pytest.warns(UserWarning, match="gradients seem to be masked") as record:
        fit(tmp_path, monitor, max_epochs=2, module=Quantised())
    assert [entry["masking"] for entry in monitor.history] == [1, 1]
    assert sum("masked" in str(warning.message) for warning in record) == 1


class Silent(Classifier):
    forward = L.LightningModule.forward

    def validation_step(self, batch, batch_idx):
        self.net(batch[0])


def unlabelled():
    return DataLoader(TensorDataset(digits_data(1200, 1260).tensors[0]), batch_size=20)


def normalized():
    x, y = digits_data(1200, 1260).tensors
    return DataLoader(TensorDataset((x - 0.5) / 0.25, y), batch_size=20)


class Undifferentiable(Classifier):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "loader", "kwargs", "message"),
    [
        (Silent, val_loader, {}, r"`Silent\(x\)` to return logits .*\(3, 1, 8, 8\) but it failed.*forward_fn"),
        (Silent, unlabelled, {}, "Expected batches with labels, for attacks, but got none.*`attacks=\\(\\)`"),
        (Classifier, normalized, {}, r"range \[0.0, 1.0\] but observed \[-2, 2\].*InputSpace\(mean"),
        (Classifier, val_loader, {"num_classes": 7}, "Expected 7 classes, as `num_classes`.*the model has 10"),
        (Classifier, val_loader, {"dataloader_idx": 3}, "`dataloader_idx` to be below 1, .* but got 3"),
        (Classifier, val_loader, {"head": "net.6"}, "'net.6' is not, because the logits come from 'net.9'"),
        (Classifier, val_loader, {"attacks": [lambda x: x]}, "takes 1 positional argument but 3 were given"),
        (Undifferentiable, val_loader, {}, "Fisher information cannot be computed.*`fim_samples=0`.*blackbox"),
    ],
)
def test_misconfiguration_is_found_on_the_sanity_check(tmp_path, kind, loader, kwargs, message):
    class Untrained(L.Callback):
        def on_train_batch_start(self, *args):
            pytest.fail("training began")

    module = kind()
    with pytest.raises(MisconfigurationException, match=f"(?s)RobustnessMonitor: .*{message}"):
        fit(tmp_path, Untrained(), small_monitor(**kwargs), module=module, loader=loader())
    assert count_hooks(module) == 0


def test_no_validation_loop(tmp_path):
    with pytest.raises(MisconfigurationException, match="watches validation, but there is none"):
        make_trainer(tmp_path, small_monitor()).fit(Classifier(), train_loader())
    with (
        pytest.warns(UserWarning, match="nothing to watch, since `limit_val_batches` is 0"),
        pytest.warns(UserWarning, match="there was no validation epoch to watch"),
    ):
        fit(tmp_path, small_monitor(), limit_val_batches=0)


def expected_trust(history, name, reference="adv_acc/pgd"):
    sign = {"rdi": 1, "fim": -1, "roby": -1}[name]
    columns = [[entry[key] for entry in history] for key in (name, reference)]
    return sign * scipy.stats.kendalltau(*columns).statistic


def fit_for_trust(path, *callbacks, **kwargs):
    monitor = small_monitor(attacks=("pgd", "fgsm"), eps=0.03, attack_samples=101)
    return monitor, fit_without_noise(path, monitor, *callbacks, **{"max_epochs": 8, **kwargs})


def test_trust_is_logged_from_the_fifth_evaluation_on(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    monitor, trainer = fit_for_trust(tmp_path, logger=logger)
    events = EventAccumulator(logger.log_dir, size_guidance={"scalars": 0, "tensors": 0}).Reload()
    for name in ("rdi", "fim", "roby"):
        for end in range(1, 9):
            entry = monitor.history[end - 1]
            if end < 5:
                assert f"trust/{name}" not in entry
            else:
                assert entry[f"trust/{name}"] == pytest.approx(expected_trust(monitor.history[:end], name))
        shown = [event.value for event in events.Scalars(f"robustness_trust/{name}")]
        assert shown == pytest.approx([entry[f"trust/{name}"] for entry in monitor.history[4:]])
    assert logged(trainer)["trust/rdi"] == pytest.approx(monitor.history[-1]["trust/rdi"])
    text = events.Tensors("robustness/summary/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "- **verdict**:" in text
    assert f"tau {monitor.history[-1]['trust/rdi']:+.2f}" in text


def test_a_stop_on_a_value_that_contradicts_the_attacks_gets_a_warning(tmp_path):
    monitor = small_monitor(attacks=("pgd",), eps=0.03, attack_samples=101)
    stop = EarlyStopping("robustness/fim", mode="min", patience=100)
    with pytest.warns(UserWarning, match=r"EarlyStopping monitors 'robustness/fim', .* over [678] eval") as record:
        fit(tmp_path, monitor, stop, max_epochs=8)
    assert sum("EarlyStopping monitors" in str(warning.message) for warning in record) == 1
    assert expected_trust(monitor.history, "fim", "adv_acc/worst") < 0


def test_the_summary_is_logged_at_the_end(tmp_path, caplog):
    monitor = small_monitor()
    with caplog.at_level("INFO"):
        fit(tmp_path, monitor)
    [entry] = monitor.history
    [message] = [record.getMessage() for record in caplog.records if "verdict" in record.getMessage()]
    assert message == f"RobustnessMonitor:\n{monitor.summary()}"
    assert monitor.summary().accuracy == entry["adv_acc/worst"]
    assert monitor.summary().seconds["fgsm"] == entry["seconds/fgsm"]


def test_representation():
    shown = repr(RobustnessMonitor(attacks=["pgd", "square"], fim_samples=16, prefix="mine"))
    assert shown == (
        "RobustnessMonitor(attacks=['pgd', 'square'], attack_samples=256, fim_samples=16, "
        "input_space=InputSpace(low=0.0, high=1.0, mean=None, std=None), prefix='mine', 0 evaluations)"
    )


@pytest.mark.parametrize("prefix", ["a/", "/a", "a//b", "a/ /b"])
def test_a_prefix_has_a_name_around_each_slash(prefix):
    with pytest.raises(ValueError, match="`prefix` to have names around each slash"):
        RobustnessMonitor(prefix=prefix)
