"""Assisted values in monitor, evaluate and compare: the same however samples are cut, and never against the order."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_robustness import RobustModelCheckpoint, RobustnessMonitor, compare, evaluate, sweep
from lightning_robustness.evaluation.reports.robustness_report import RobustnessReport
from tests.zoo import Trained

EPS = 0.1


def data(number=600, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(number, 4, generator=generator)
    noise = 0.1 * torch.randn(number, generator=generator)
    return TensorDataset(x, (x[:, 1] + noise > x[:, 0]).long())


def linear(scale=1.0, others=0.0):
    model = nn.Linear(4, 2, bias=False)
    model.weight.data = scale * torch.tensor([[1.0, -1.0, others, -others], [-1.0, 1.0, -others, others]])
    return model


def measure(model=None, batch_size=100, **options):
    options = {"attacks": ["fgsm", "pgd"], "eps": EPS, "attack_samples": 128, "progress": False, **options}
    return evaluate(model or linear(), DataLoader(data(), batch_size=batch_size), **options)


def test_robust_accuracy_is_close_to_that_of_all_samples_and_has_a_shorter_interval():
    report, whole = measure(), measure(attack_samples=600)
    rates, truth = report.rates["pgd"], whole.rates["pgd"]["adv_acc"]
    assert report.metrics["adv_acc/pgd"] == rates["adv_acc"] != rates["adv_acc_plain"]
    assert rates["adv_acc"] == pytest.approx(truth, abs=0.02)
    assert rates["adv_acc_low"] < truth < rates["adv_acc_high"]
    assert rates["asr"] == pytest.approx(1 - rates["adv_acc"] / report.metrics["acc"])
    assert rates["asr_low"] == pytest.approx(1 - rates["adv_acc_high"] / report.metrics["acc"])
    assert whole.rates["pgd"]["adv_acc"] == whole.rates["pgd"]["adv_acc_plain"]
    # To first order a linear network is exact
    assert measure(fim_samples=600).metrics["boundary_acc"] == pytest.approx(truth)


def test_any_batch_size_gives_the_same_values():
    first, second = (measure(batch_size=size).rates for size in (600, 7))
    assert first["worst"] == pytest.approx(second["worst"], abs=1e-9, nan_ok=True)


def test_the_worst_case_is_never_above_an_attack_and_curves_never_rise():
    report = measure(linear(others=0.4), sweep_budgets=[0.02, 0.05, 0.1, 0.2, 0.3])
    assert report.rates["worst"]["adv_acc"] <= min(rate["adv_acc"] for rate in report.rates.values())
    assert report.boundary.share == sorted(report.boundary.share, reverse=True)
    curves = {name: [share.value for share in own] for name, own in report.sweep.shares.items()}
    assert all(curve == sorted(curve, reverse=True) for curve in curves.values())
    assert all(worst <= min(values) for worst, *values in zip(curves["worst"], *curves.values(), strict=True))


def test_an_attack_has_one_accuracy_in_a_report_and_in_its_sweep():
    report = measure(linear(others=0.4), strength="strong", sweep_budgets=[EPS], sweep_attacks=["pgd", "fgsm"])
    table = next(table for table in report.tables() if table.title == "Accuracy and image quality")
    shown = {row[1]: row[2] for row in table.rows}
    attacks = next(table for table in report.tables() if table.title == "Attacks")
    assert shown["pgd"] == report.metrics["adv_acc/pgd"] != report.metrics["adv_acc_plain/pgd"]
    assert {row[0]: row[4] for row in attacks.rows if row[0] in shown} == {
        name: shown[name] for name in ("fgsm", "pgd")
    }
    assert shown["worst of all"] == report.sweep.worst[0]
    assert "assisted" in table.note
    assert report.sweep.values["accuracy"][0] == [report.metrics["adv_acc_plain/pgd"]]


@pytest.mark.parametrize("warm_starts", [True, False])
def test_a_sweep_alone_has_the_accuracy_of_its_table_in_its_verdict(warm_starts):
    loader = DataLoader(data(), batch_size=100)
    report = sweep(linear(), loader, ["pgd"], [0.05, EPS, 0.2], warm_starts=warm_starts, progress=False)
    table = report.tables()[0]
    assert table.rows[1][2] == report.values["accuracy"][0][1] == report.worst[1]
    assert f"{100 * report.worst[1]:.1f} % robust accuracy" in report.verdict
    assert table.note == ""


def test_a_model_and_itself_are_not_distinguishable_and_a_weak_one_loses(tmp_path):
    loader, options = DataLoader(data(), batch_size=100), {"attacks": ["fgsm"], "attack_samples": 128}
    budgets = [0.05, 0.1, 0.15]
    same = compare({"a": linear(), "b": linear()}, loader, budgets=budgets, progress=False, **options)
    assert "not distinguishable at n = 128" in same.verdict
    assert (same.ties, same.differences["b"][0]) == (["b"], 0.0)
    other = compare({"weak": linear(others=3.0), "good": linear()}, loader, budgets=budgets, progress=False, **options)
    assert other.verdict.startswith("good is the most robust of 2 models")
    gap, low, high = other.differences["weak"]
    assert low < gap < high < 0
    for name, report in other.reports.items():
        report.to_json(tmp_path / f"{name}.json")
    saved = {name: RobustnessReport.from_json(tmp_path / f"{name}.json") for name in other.reports}
    assert compare(saved).differences["weak"] == pytest.approx([gap, low, high])


def test_a_network_that_is_seldom_right_is_measured():
    model = nn.Linear(4, 3)  # the third class wins almost everywhere
    model.weight.data = torch.cat([linear().weight.data, torch.zeros(1, 4)])
    model.bias.data = torch.tensor([0.0, 0.0, 0.9])
    report = measure(model)
    assert 0 < report.metrics["acc"] < 0.03
    assert 0 <= report.metrics["adv_acc/pgd"] <= report.metrics["acc"]


def test_an_untrained_network_of_many_classes_is_measured():
    report = measure(nn.Linear(4, 1000), num_classes=1000, fim_samples=0)
    assert report.metrics["acc"] == report.metrics["adv_acc/pgd"] == 0.0
    assert "asr/pgd" not in report.metrics  # of nothing


@pytest.mark.parametrize(("change", "outputs"), [(nn.LogSoftmax(dim=1), "log-probabilities"), (None, "constant")])
def test_outputs_are_recognised(change, outputs):
    model = linear(scale=0.0) if change is None else nn.Sequential(linear(), change)
    with pytest.warns(UserWarning, match="collapsed|log-probabilities"):
        report = measure(model, attacks=())
    assert report.settings["outputs"] == outputs
    assert {"rdi", "fim"} <= report.metrics.keys() if change else not {"rdi", "fim"} & report.metrics.keys()


def test_rdi_is_not_ranked_between_kinds_of_outputs():
    models = {"logits": linear(), "logs": nn.Sequential(linear(), nn.LogSoftmax(dim=1))}
    loader = DataLoader(data(), batch_size=100)
    with pytest.warns(UserWarning, match="log-probabilities"):
        report = compare(models, loader, ["fgsm"], [0.05, 0.1], attack_samples=64, progress=False)
    assert "rdi" not in report.ranks
    assert any("RDI is not compared" in note for note in report.notes)


def fit(path, max_epochs=4, resume=None, shuffle=False, batch_size=100):
    torch.manual_seed(0)
    monitor = RobustnessMonitor(["pgd"], EPS, attack_samples=128, fim_samples=0)
    checkpoint = RobustModelCheckpoint("robustness/adv_acc/pgd", dirpath=path, save_last=True)
    flags = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_epochs=max_epochs, callbacks=[monitor, checkpoint], **flags)
    loaders = DataLoader(data(), batch_size=200), DataLoader(data(seed=1), batch_size=batch_size, shuffle=shuffle)
    trainer.fit(Trained(linear(scale=0.1, others=1.0), lr=1.0), *loaders, ckpt_path=resume)
    return monitor


def numbers(monitor):
    return [{key: value for key, value in entry.items() if "seconds" not in key} for entry in monitor.history]


def test_resumed_or_not_the_same_epoch_is_kept_with_the_same_number(tmp_path):
    whole = fit(tmp_path / "whole")
    fit(tmp_path / "parts", max_epochs=2)
    resumed = fit(tmp_path / "parts", resume=tmp_path / "parts" / "last.ckpt")
    assert numbers(resumed) == numbers(whole)
    assert resumed.summary().lines()[0] == whole.summary().lines()[0]
    assert whole.summary().kept.is_checkpoint
    assert whole.summary().kept.is_corrected


def test_a_loader_that_shuffles_gives_plain_shares_and_one_warning(tmp_path):
    with pytest.warns(UserWarning, match="shuffle=False"):
        monitor = fit(tmp_path, max_epochs=2, shuffle=True)
    last = monitor.history[-1]
    assert last["adv_acc/pgd"] == last["adv_acc_plain/pgd"]
