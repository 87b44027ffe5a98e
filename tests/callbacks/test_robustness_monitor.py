"""Values of the monitor, the samples they come from, and when they are logged."""

import html

import lightning as L
import numpy as np
import pytest
import scipy.stats
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from sklearn.metrics import accuracy_score
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, IterableDataset

from lightning_robustness import InputSpace, RobustnessMonitor, evaluate
from lightning_robustness._measurement.keys import tag
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
from tests.callbacks.monitors import (
    ALWAYS,
    FEATURES,
    FISHER,
    attack_keys,
    fit,
    fit_without_noise,
    logged,
    small_monitor,
    validated,
)


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


def test_the_progress_bar_shows_the_attack_that_runs_most_often(tmp_path):
    trainer = fit(tmp_path, small_monitor(attacks=["square", "fgsm"]), max_epochs=1)
    shown = {key for key in trainer.progress_bar_metrics if key.startswith("robustness/adv_acc/")}
    assert shown == {"robustness/adv_acc/fgsm"}


@pytest.mark.parametrize(
    ("epochs", "every", "kwargs", "expected"),
    [
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


@pytest.mark.filterwarnings("ignore:.*the validation loader shuffles")
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
