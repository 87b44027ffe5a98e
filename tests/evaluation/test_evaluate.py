import sys
import warnings

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_robustness import InputSpace, RobustnessMonitor
from lightning_robustness.attacks import PGD, Square, run_attack
from lightning_robustness.evaluation import evaluate, loading, sweep
from lightning_robustness.functional import (
    boundary_distance,
    fisher_spectral_norm,
    lipschitz_constant,
    robustness_difference_index,
    roby,
)
from tests.zoo import Trained


@pytest.fixture
def data(digits):
    return TensorDataset(digits[0][1200:1500], digits[1][1200:1500])


@pytest.fixture
def loader(data):
    return DataLoader(data, batch_size=64)


def sizes(number):
    return {"fim_samples": number, "attack_samples": number}


def linear(num_classes=2):
    model = nn.Linear(2, num_classes)
    model.weight.data, model.bias.data = torch.eye(num_classes, 2), torch.zeros(num_classes)
    return model


def batch(number=8):
    torch.manual_seed(0)
    x = torch.rand(number, 2)
    return x, x.argmax(dim=1)


@pytest.mark.parametrize("storage", ["exact", "streaming"])
def test_agrees_with_the_monitor_key_by_key(digits, digits_network, storage):
    space = InputSpace(mean=0.3, std=0.4)
    data = TensorDataset(space.normalize(digits[0][1200:1500]), digits[1][1200:1500])
    module = Trained(digits_network)
    settings = {"attacks": ("fgsm", "pgd", "square"), "eps": 0.05, "input_space": space, "storage": storage}
    settings |= {"fim_samples": 70, "attack_samples": 90, "batch_size": 40, "seed": 3}
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", callbacks=[RobustnessMonitor(**settings)], **options)
    (logged,) = trainer.validate(module, DataLoader(data, batch_size=64), verbose=False)
    report = evaluate(module, DataLoader(data, batch_size=100), progress=False, strength="fast", **settings)
    logged = {key.partition("/")[2]: value for key, value in logged.items()}
    assert logged.pop("skipped") == 0
    assert {"rdi", "roby", "fim", "asr/worst", "masking"} < report.metrics.keys()
    times = {key for key in report.metrics.keys() | logged.keys() if key.startswith("seconds/")}
    assert report.metrics.keys() - times == logged.keys() - times
    assert report.metrics["samples"] == 300
    assert (report.metrics["samples_fim"], report.metrics["samples_attacks"]) == (70, 90)
    for key in logged.keys() - times:
        assert report.metrics[key] == pytest.approx(logged[key], rel=1e-5, abs=1e-6), key


def test_equals_metrics_by_hand(data, loader, digits_network):
    x, y = data.tensors
    options = {"batch_size": 300, "per_sample": True, "progress": False}
    report = evaluate(digits_network, loader, [PGD(eps=0.1)], **sizes(300), **options)
    logits = digits_network(x)
    preds, embedding = logits.argmax(1), digits_network[:-1](x)
    metrics = report.metrics
    assert metrics["acc"] == pytest.approx((preds == y).double().mean().item())
    assert metrics["rdi"] == pytest.approx(robustness_difference_index(logits, preds).item(), abs=1e-5)
    assert metrics["rdi_embedding"] == pytest.approx(robustness_difference_index(embedding, preds).item(), abs=1e-5)
    assert metrics["roby"] == pytest.approx(roby(embedding, preds).item(), abs=1e-5)
    lambdas = fisher_spectral_norm(digits_network, x)
    assert metrics["fim"] == pytest.approx(lambdas.mean().item(), rel=1e-4)
    assert report.per_sample["fim"] == pytest.approx(lambdas.tolist(), rel=1e-3)
    assert metrics["lipschitz"] == pytest.approx(lipschitz_constant(digits_network, x).mean().item(), rel=1e-4)
    distances = boundary_distance(digits_network, x, y)
    assert report.per_sample["boundary"] == pytest.approx(distances.tolist(), rel=1e-3)
    assert metrics["boundary"] == pytest.approx(np.median(distances.numpy()), rel=1e-4)
    assert metrics["boundary_acc"] == pytest.approx((distances > 0.1).double().mean().item())
    assert report.boundary.share[::8] == pytest.approx(
        [(distances > eps).double().mean().item() for eps in (0.0, 0.1, 0.2, 0.3, 0.4)]
    )
    result = run_attack(digits_network, PGD(eps=0.1), x, y)
    assert metrics["asr/pgd"] == metrics["asr/worst"] == pytest.approx(result.success_rate)
    assert report.per_sample["adv_preds/pgd"] == result.adv_preds.tolist()
    assert report.per_sample["l2/pgd"] == pytest.approx(result.l2.tolist(), rel=1e-5)
    assert report.per_sample["linf/pgd"] == pytest.approx(result.linf.tolist(), rel=1e-5)
    assert (report.per_sample["y"], report.per_sample["preds"]) == (y.tolist(), preds.tolist())
    assert report.rates["pgd"]["correct"] == (preds == y).sum()
    assert report.rates["pgd"]["asr_low"] < metrics["asr/pgd"] < report.rates["pgd"]["asr_high"]


def test_sweep_is_that_of_the_same_samples(loader, robust_digits_network):
    network, options = robust_digits_network, {"attack_samples": 100, "batch_size": 50, "seed": 2, "progress": False}
    budgets = {"sweep_budgets": (0.1, 0.2), "sweep_attacks": ["fgsm"]}
    report = evaluate(network, loader, (), fim_samples=0, **budgets, **options)
    alone = sweep(network, loader, ["fgsm"], (0.1, 0.2), **options)
    assert report.sweep.values == alone.values
    assert (report.sweep.breaking_eps, alone.breaking_eps, alone.index) == (None, None, None)
    assert report.rates == {}


def test_time_of_the_features_is_that_of_the_pass(loader, digits_network, monkeypatch):
    clock = []  # which a forward pass moves, and nothing else

    def forward(model, x):
        clock.append(1.0)
        return model(x)

    monkeypatch.setattr(loading, "perf_counter", lambda: sum(clock))
    report = evaluate(digits_network, loader, (), fim_samples=0, forward_fn=forward, progress=False)
    assert report.metrics["seconds/features"] == sum(clock) >= len(loader)


def test_plain_forward_head_and_batches(digits, digits_network):
    x, y = digits[0][1200:1260], digits[1][1200:1260]
    options = {"attacks": ["fgsm"], "eps": 0.1, "progress": False}
    plain = evaluate(digits_network, [(x, y)], **options)
    functions = {
        "forward_fn": lambda model, inputs: model["network"](inputs),
        "batch_fn": lambda batch: (batch["picture"], batch["kind"]),
    }
    wrapped, batches = nn.ModuleDict({"network": digits_network}), [{"picture": x, "kind": y}]
    other = evaluate(wrapped, batches, head="network.9", num_classes=10, **functions, **options)
    assert other.settings["head"] == "network.9"
    for key, value in plain.metrics.items():
        assert key.startswith("seconds/") or other.metrics[key] == pytest.approx(value)
    with pytest.raises(ValueError, match=r"labels.*`attacks=\(\)`"):
        evaluate(digits_network, [x], progress=False)
    unlabelled = evaluate(digits_network, [x], attacks=(), progress=False).metrics
    assert {"rdi", "roby", "fim"} < unlabelled.keys() - {"acc"} == unlabelled.keys()


def test_leaves_no_trace(digits):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 10)).train()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    loader = DataLoader(TensorDataset(digits[0][:64], digits[1][:64]), shuffle=True, batch_size=32)
    evaluate(model, loader, ["pgd", "square"], **sizes(32), sweep_budgets=[0.1], decision_space="pca", progress=False)
    sweep(model, loader, ["pgd"], [0.1, 0.2], progress=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training and not module._forward_hooks for module in model.modules())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_leaves_no_trace_when_it_fails():
    x, y = batch()
    model, state = linear().train(), torch.get_rng_state()
    with pytest.raises(ValueError, match="Expected inputs in the range") as error_info:
        evaluate(model, [(x + 1, y)], progress=False)
    assert error_info.tb is not None  # what the traceback holds has not been collected
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_probabilities_are_noticed():
    model = nn.Sequential(linear(), nn.Softmax(dim=1))
    with pytest.warns(UserWarning, match="Sequential look like probabilities"):
        report = evaluate(model, [batch()], ["fgsm"], progress=False)
    assert [sign.name for sign in report.signs] == ["probabilities"]
    assert "masked (probabilities)" in report.notes[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fim_method": "best"}, "`fim_method`"),
        ({"decision_space": "umap"}, "`decision_space`"),
        ({"decision_space": "tsne"}, "scikit-learn"),  # which is not installed here
        ({"sweep_budgets": 0.1}, "`sweep_budgets`"),
        ({"num_examples": -1}, "`num_examples`"),
        ({"dataloader": TensorDataset(*batch())}, "`dataloader`"),
        ({"attack_samples": 0, "sweep_budgets": [0.1]}, "`attack_samples`"),
        ({"attack_samples": 0, "decision_space": "pca"}, "`attack_samples`"),
        ({"sweep_attacks": ["square"]}, "`sweep_budgets` with `sweep_attacks`"),
    ],
)
def test_arguments_are_checked_before_the_data(monkeypatch, arguments, message):
    def batches():
        raise AssertionError("the data was touched")
        yield

    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    with pytest.raises((TypeError, ValueError, ModuleNotFoundError), match=message):
        evaluate(**{"model": linear(), "dataloader": batches(), "progress": False, **arguments})


def test_samples_have_their_position_in_the_loader(data, loader, digits_network):
    settings = {"attacks": ["fgsm"], "eps": 0.1, "fim_samples": 20, "attack_samples": 50, "sweep_budgets": [0.1]}
    report = evaluate(digits_network, loader, **settings, sweep_attacks=["fgsm"], per_sample=True, progress=False)
    columns, (x, y) = report.per_sample, data.tensors
    assert (len(columns["fim_index"]), len(columns["index"])) == (20, 50)
    assert columns["boundary_index"] == columns["fim_index"]
    assert columns["y"] == y[columns["index"]].tolist()
    expected = fisher_spectral_norm(digits_network, x[columns["fim_index"]])
    assert columns["fim"] == pytest.approx(expected.tolist(), rel=1e-3)
    assert report.sweep.index == columns["index"]
    broken = [label != prediction for label, prediction in zip(columns["y"], columns["adv_preds/fgsm"], strict=True)]
    assert [eps <= 0.1 for eps in report.sweep.breaking_eps["fgsm"]] == broken


def test_interruption_returns_what_is_finished(loader, digits_network):
    def interrupt(model, x, y):
        raise KeyboardInterrupt

    attacks = {"first": PGD(eps=0.1), "second": interrupt, "third": Square(num_queries=5)}
    with pytest.warns(UserWarning, match="measured the attack second"):
        report = evaluate(digits_network, loader, attacks, **sizes(50), progress=False)
    whole = evaluate(digits_network, loader, [PGD(eps=0.1)], **sizes(50), progress=False)
    assert report.interrupted == "the attack second"
    assert list(report.rates) == list(report.threat_model.attacks) == ["first"]  # the worst of some would be too good
    assert report.classes == []
    assert report.rates["first"] == whole.rates["pgd"]
    assert report.metrics["fim"] == whole.metrics["fim"]
    assert " % accuracy under first at 0.1 (" in report.verdict
    assert "interrupted while it measured the attack second" in str(report)


def interrupt_if(condition):
    def forward(model, x):
        if condition(x):
            raise KeyboardInterrupt
        return model(x)

    return forward


def test_interruption_of_the_first_forward_pass():
    forward_fn = interrupt_if(lambda x: len(x) > 2)  # more than are needed to find the head
    with pytest.warns(UserWarning, match="measured the features"):
        report = evaluate(linear(), [batch()], forward_fn=forward_fn, progress=False)
    assert (report.metrics, report.num_classes, report.interrupted) == ({}, 0, "the features")


@pytest.mark.filterwarnings("ignore:The evaluation was interrupted")
def test_interruption_of_the_first_batch_of_the_sweep():
    options = {"forward_fn": interrupt_if(lambda x: x.requires_grad), "progress": False}
    report = evaluate(linear(), [batch()], (), fim_samples=0, sweep_budgets=[0.1], **options)
    assert (report.interrupted, report.sweep) == ("the sweep", None)
    with pytest.raises(KeyboardInterrupt):
        sweep(linear(), [batch()], budgets=[0.1], **options)


def test_report_has_threat_model_classes_examples_and_provenance(loader, digits_network):
    attacks = {"pgd": PGD(eps=16 / 255), "square": Square(eps=16 / 255, num_queries=20)}
    options = {"attacks": attacks, **sizes(100), "per_sample": True, "progress": False}
    report = evaluate(digits_network, loader, **options)
    columns = report.per_sample
    assert report.facts["budget"] == "16/255"
    assert (report.threat_model.samples, report.threat_model.is_image) == (100, True)
    assert 0 < report.threat_model.attacks["pgd"].queries <= 11
    assert report.verdict.startswith(f"{100 * report.metrics['adv_acc/worst']:.1f} % robust accuracy at 16/255 (")
    y, preds = np.array(columns["y"]), np.array(columns["preds"])
    assert [entry.label for entry in report.classes] == np.unique(y).tolist()
    broken = ((preds == y) & (np.array(columns["adv_preds/pgd"]) != y)).nonzero()[0][:8]
    labels = [(example.label, example.adversarial_prediction) for example in report.adversarial_examples]
    assert labels == [(y[row], columns["adv_preds/pgd"][row]) for row in broken]
    assert {"data": "TensorDataset, 300 samples", "seed": "0"}.items() <= report.provenance.items()
    without = evaluate(digits_network, loader, **options, num_examples=0)
    assert without.adversarial_examples == []
    assert without.rates == report.rates
    assert without.per_sample == columns


def test_examples_are_those_of_the_first_attack_with_a_budget_that_succeeds(loader, digits_network):
    weak = PGD(eps=0.2, alpha=1e-9, start="clean")
    attacks = {"cw": "cw", "weak": weak, "pgd": PGD(eps=0.2), "square": Square(eps=0.2, num_queries=5)}
    options = {"attack_samples": 50, "fim_samples": 0, "progress": False}
    report = evaluate(digits_network, loader, attacks, **options)
    assert {example.attack for example in report.adversarial_examples} == {"pgd"}
    without_budget = {name: attacks[name] for name in ("weak", "cw")}
    report = evaluate(digits_network, loader, without_budget, **options)
    assert {example.attack for example in report.adversarial_examples} == {"cw"}


def test_minimum_norm_attacks_count_within_an_l2_budget(loader, digits_network):
    """Everywhere in the report: rates, verdict, examples, per-sample columns and classes."""
    options = {"attack_samples": 100, "fim_samples": 0, "per_sample": True, "progress": False}
    report = evaluate(digits_network, loader, ["cw"], eps=0.15, **options)
    found = evaluate(digits_network, loader, ["cw"], eps=None, **options)
    y, preds, adv_preds, l2 = (np.array(found.per_sample[name]) for name in ("y", "preds", "adv_preds/cw", "l2/cw"))
    broken = (preds == y) & (adv_preds != y)
    counted = broken & (l2 <= 0.3)  # 8 * 0.15 / 4
    assert 0 < counted.sum() < broken.sum()
    assert report.per_sample["l2/cw"] == l2.tolist()
    assert report.per_sample["adv_preds/cw"] == np.where(counted, adv_preds, preds).tolist()
    assert report.metrics["adv_acc_plain/worst"] == pytest.approx(((preds == y) & ~counted).mean())
    assert [example.label for example in report.adversarial_examples] == y[counted][:8].tolist()
    assert report.facts["attacks"].startswith("cw (C&W from a DDN start, 50 + 50 steps, l2 <= 0.3, ")
    assert "at 0.3 in l2" in report.verdict
    assert "l2_budget" not in found.metrics
    assert "no budget" in found.facts["attacks"]


@pytest.mark.filterwarnings("ignore:Only one class was predicted")
def test_inputs_that_are_not_images_have_no_pictures():
    report = evaluate(linear(), [batch()], attacks=[PGD(eps=0.5)], progress=False)
    assert report.metrics["asr/pgd"] > 0
    assert report.adversarial_examples == []
    assert report.facts["inputs"] == "values in [0, 1]"


def test_clean_accuracy_of_a_sweep_has_the_interval_of_all_samples(loader, digits_network):
    options = {"sweep_attacks": ["fgsm"], "sweep_budgets": [0.1], "progress": False, **sizes(70)}
    report = evaluate(digits_network, loader, (), **options)
    clean, n, z = report.metrics["acc"], 300, 1.959964
    middle, spread = (clean + z**2 / (2 * n)), z * (clean * (1 - clean) / n + (z / (2 * n)) ** 2) ** 0.5  # Wilson
    expected = [clean, (middle - spread) / (1 + z**2 / n), (middle + spread) / (1 + z**2 / n), n]
    assert list(report.sweep.robust_accuracy(0)) == pytest.approx(expected)
    assert report.sweep.robust_accuracy().samples == 70
    alone = sweep(digits_network, loader, ["fgsm"], [0.1], attack_samples=70, progress=False)
    assert alone.robust_accuracy(0).samples == 70


def test_a_small_budget_is_announced_once():
    x, y = batch(40)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")  # as Python starts
        options = {"input_space": InputSpace(high=255), "batch_size": 10, "progress": False, **sizes(40)}
        evaluate(linear(), [(255 * x, y)], ["pgd"], eps=0.1, **options)
    assert sum("below one grey level" in str(warning.message) for warning in shown) == 1
