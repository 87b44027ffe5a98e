"""A new value takes one meter and its keys, and then exists everywhere: here the norm of the loss's input gradient."""

import json
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from scipy.stats import kendalltau
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_robustness import RobustnessMonitor
from lightning_robustness._isolation.sandbox import sandbox
from lightning_robustness._measurement import keys, plan
from lightning_robustness._measurement.keys import Key
from lightning_robustness._measurement.meters import Meter
from lightning_robustness._measurement.statistics import MIN_EVALUATIONS
from lightning_robustness._model.access import compute_logits
from lightning_robustness.attacks import PGD
from lightning_robustness.evaluation import compare, evaluate
from tests._measurement.test_keys import markdown_table
from tests.callbacks.modules import make_trainer
from tests.golden.runs import read_events
from tests.zoo import Trained

NUM_SAMPLES, NUM_MEASURED = 37, 11
NUM_EPOCHS = MIN_EVALUATIONS


# ---- all that a new value takes ----


@dataclass(frozen=True)
class GradientMeter(Meter):
    """Measure the l2 norm of the gradient of the cross-entropy of the predicted class."""

    size: int

    name = "gradient"
    title = "input gradient"
    label = "the input gradient"
    per_sample = {"gradient_norm": "norm"}  # noqa: RUF012

    def measure(self, subject, batch):
        forward = subject.logits_of(batch)
        with sandbox(forward, batch.x, seed=subject.seed) as (x,):
            logits = compute_logits(forward, x.requires_grad_())
            loss = nn.functional.cross_entropy(logits, logits.argmax(dim=1), reduction="sum")
            (gradient,) = torch.autograd.grad(loss, x)
        return {"norm": gradient.flatten(1).norm(dim=1)}

    def values(self, rows):
        return {"gradient_norm": rows["norm"].mean().item(), "samples_gradient": len(rows)} if len(rows) else {}

    def histograms(self, rows):
        return {"gradient_norms": rows["norm"]} if len(rows) else {}


NEW_KEYS = (
    Key("gradient_norm", "fim", "input gradient", "1/input", False, "Input gradient", "mean size of the gradient"),
    Key("samples_gradient", "fim", "samples, gradient", "samples", None, None, "number of samples", "bookkeeping"),
)


def make_meter(settings):
    return GradientMeter(settings.fim_samples)


def register(patch):
    """Do what two lines in the package would."""
    patch.setattr(plan, "METERS", (*plan.METERS, make_meter))
    before = keys.KEYS
    for name, module in list(sys.modules.items()):  # some have imported the table
        if name.startswith("lightning_robustness") and getattr(module, "KEYS", None) is before:
            patch.setattr(module, "KEYS", (*before, *NEW_KEYS))


# ---- everything that it then has ----


@pytest.fixture
def registered(monkeypatch):
    register(monkeypatch)


def make_data():
    x = torch.rand(NUM_SAMPLES, 1, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(x, (10 * x.flatten(1).sum(dim=1)).long() % 3)


def make_loader():
    return DataLoader(make_data(), batch_size=8)


def make_network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double()


def norms_by_hand(network, positions):
    """The gradient of a linear network is its weights times the difference of probabilities and prediction."""
    weight, bias = (parameter.detach().numpy() for parameter in network.parameters())
    x = make_data().tensors[0].flatten(1).numpy()[positions]
    logits = x @ weight.T + bias
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return np.linalg.norm((p - np.eye(3)[logits.argmax(axis=1)]) @ weight, axis=1)


def evaluate_some(network=None, **options):
    settings = {"attacks": {"pgd": PGD(eps=0.1, steps=2)}, "fim_samples": NUM_MEASURED, "attack_samples": 8}
    settings |= {"batch_size": 4, "per_sample": True, "progress": False}
    return evaluate(network or make_network(), make_loader(), **settings | options)


def without_times(report):
    def clean(value):
        if isinstance(value, dict):
            return {key: clean(entry) for key, entry in value.items() if "seconds" not in key and key != "date"}
        return [clean(entry) for entry in value] if isinstance(value, list) else value

    return clean(json.loads(report.to_json()))


def test_evaluate_and_its_page(registered):
    report = evaluate_some()
    columns = report.per_sample
    assert columns["gradient_norm_index"] == columns["fim_index"]
    expected = norms_by_hand(make_network(), columns["fim_index"])
    assert columns["gradient_norm"] == pytest.approx(expected.tolist())
    assert report.metrics["gradient_norm"] == pytest.approx(expected.mean())
    assert report.metrics["samples_gradient"] == NUM_MEASURED
    assert report.metrics["seconds/gradient"] > 0
    assert report.settings["input gradient"] == f"at most {NUM_MEASURED} samples"
    row = next(line for line in str(report).splitlines() if "input gradient" in line)
    assert f"{expected.mean():.4f}" in row
    assert "lower" in row
    assert "input gradient" in report.to_html()
    assert type(report).from_dict(json.loads(report.to_json())).metrics == report.metrics


def test_without_samples_it_is_not_measured(registered):
    report = evaluate_some(fim_samples=0)
    assert not any("gradient" in name for name in report.metrics)
    assert report.settings["input gradient"] == "none"


def test_compare(registered):
    models = {"a": make_network(), "b": make_network(1), "c": make_network(2)}
    options = {"fim_samples": NUM_MEASURED, "attack_samples": 16, "per_sample": True, "progress": False}
    report = compare(models, make_loader(), ["fgsm"], [0.02, 0.1], **options)
    positions = report.reports["a"].per_sample["fim_index"]
    expected = {name: norms_by_hand(network, positions).mean() for name, network in models.items()}
    assert {name: own.metrics["gradient_norm"] for name, own in report.reports.items()} == pytest.approx(expected)
    assert sorted(expected, key=expected.get) == sorted(expected, key=report.ranks["gradient_norm"].get)
    assert "gradient_norm" in report.correlations
    assert "input gradient" in report.to_html()


class Interrupting(GradientMeter):
    """Is interrupted in its second batch."""

    def measure(self, subject, batch):
        if batch.positions.min() > 5:
            raise KeyboardInterrupt
        return super().measure(subject, batch)


def test_resume(registered, tmp_path, monkeypatch):
    expected = without_times(evaluate_some())
    with monkeypatch.context() as patch:
        patch.setattr(plan, "METERS", (*plan.METERS[:-1], lambda settings: Interrupting(settings.fim_samples)))
        with pytest.warns(UserWarning, match="interrupted while it measured the input gradient"):
            report = evaluate_some(resume=tmp_path)
    assert 0 < report.metrics["samples_gradient"] < NUM_MEASURED
    finished = report.per_sample["gradient_norm_index"]
    measured, measure = [], GradientMeter.measure
    monkeypatch.setattr(
        GradientMeter,
        "measure",
        lambda self, subject, batch: measured.extend(batch.positions.tolist()) or measure(self, subject, batch),
    )
    assert without_times(evaluate_some(resume=tmp_path)) == expected
    assert sorted([*finished, *measured]) == expected["per_sample"]["gradient_norm_index"]


def evaluate_in_two(rank):
    with pytest.MonkeyPatch.context() as patch:
        register(patch)
        return without_times(evaluate_some())


def test_two_processes(two_processes):
    expected = evaluate_in_two(0)
    for report in two_processes(evaluate_in_two):
        assert report["metrics"]["gradient_norm"] == pytest.approx(expected["metrics"]["gradient_norm"], rel=1e-12)
        assert report["metrics"].keys() == expected["metrics"].keys()
        assert report["per_sample"]["gradient_norm_index"] == expected["per_sample"]["gradient_norm_index"]
        assert report["per_sample"]["gradient_norm"] == pytest.approx(expected["per_sample"]["gradient_norm"])


def test_monitor_and_its_page(registered, tmp_path):
    module, attacks = Trained(make_network(), lr=1.0), {"pgd": PGD(eps=0.05, steps=2)}
    monitor = RobustnessMonitor(attacks=attacks, fim_samples=NUM_MEASURED, attack_samples=NUM_SAMPLES)
    trainer = make_trainer(tmp_path, monitor, max_epochs=NUM_EPOCHS, logger=TensorBoardLogger(tmp_path))
    trainer.fit(module, make_loader(), make_loader())
    assert {"robustness/gradient_norm", "robustness_trust/gradient_norm"} <= set(monitor.keys)
    values = [entry["gradient_norm"] for entry in monitor.history]
    assert len(set(values)) == NUM_EPOCHS
    assert all(entry["samples_gradient"] == NUM_MEASURED for entry in monitor.history)
    # The network is as it was at the last validation, and the samples are those of evaluate
    report = evaluate_some(module.network)
    expected = norms_by_hand(module.network, report.per_sample["fim_index"]).mean()
    assert values[-1] == pytest.approx(expected)
    assert values[-1] == pytest.approx(report.metrics["gradient_norm"], rel=1e-12)
    events = read_events(tmp_path)
    assert [value for _, value in events["scalars"]["robustness/gradient_norm"]] == pytest.approx(values, rel=1e-6)
    assert "robustness_details/samples_gradient" in events["scalars"]
    assert "robustness_details/seconds/gradient" in events["scalars"]
    assert "robustness/gradient_norms" in events["others"]
    page = monitor.to_html()
    assert "gradient_norm" in page
    assert "mean size of the gradient" in page
    choice = monitor.summary().choices["gradient_norm"]
    assert choice.epoch == int(np.argmin(values))
    accuracies = [entry["adv_acc/worst"] for entry in monitor.history]
    expected = -kendalltau(values, accuracies).statistic  # lower is more robust
    assert monitor.history[-1]["trust/gradient_norm"] == pytest.approx(expected)


def test_tables_of_the_docs(registered):
    lines = markdown_table(keys.KEYS).splitlines()
    assert "| `robustness/gradient_norm` | mean size of the gradient | 1/input | lower | fim |" in lines
    assert "| `robustness_details/samples_gradient` | number of samples | samples |  | fim |" in lines
