import json
import math
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_robustness._measurement import plan
from lightning_robustness.attacks import PGD, Square, get_attack, run_attack
from lightning_robustness.evaluation import compare, evaluate, sweep
from lightning_robustness.functional._image_quality import image_quality
from lightning_robustness.input_space import InputSpace

COARSE = (0.03, 0.05, 0.1, 0.2)
NETWORKS = pytest.mark.parametrize("network", ["digits_network", "robust_digits_network"])


@pytest.fixture
def loader(digits):
    return list(zip(digits[0][1200:1400].split(100), digits[1][1200:1400].split(100), strict=True))


def independent(network, loader, name, eps):
    results = [(run_attack(network, get_attack(name, eps=eps), x, y), y) for x, y in loader]
    return sum((result.adv_preds == y).sum().item() for result, y in results) / sum(len(y) for _, y in results)


def linear():
    model = nn.Linear(2, 2)
    model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
    return model


@NETWORKS
@pytest.mark.parametrize("name", ["bim", "pgd", "mifgsm"])
def test_accuracy_is_at_most_a_point_above_independent_attacks(request, loader, network, name):
    network, eps = request.getfixturevalue(network), (0.1, 0.12, 0.14, 0.16, 0.18, 0.2)
    report = sweep(network, loader, [name], eps, progress=False)
    for budget, accuracy in zip(eps, report.values["accuracy"][0], strict=True):
        assert accuracy <= independent(network, loader, name, budget) + 0.01, budget


@NETWORKS
def test_accuracy_falls_and_the_worst_is_below_all(request, loader, network):
    report = sweep(request.getfixturevalue(network), loader, attack_samples=100, per_sample=True, progress=False)
    curves = torch.tensor(report.values["accuracy"])
    assert (curves.diff(dim=1) <= 0).all()
    assert (torch.tensor(report.worst) <= curves.amin(dim=0)).all()
    assert curves[:, 0].max() <= report.clean_accuracy
    assert curves[0, 0] > curves[0, -1] + 0.2
    breaking = torch.tensor(list(report.breaking_eps.values()))
    for number, eps in enumerate(report.budgets):
        torch.testing.assert_close((breaking > eps).float().mean(dim=1), curves[:, number])
        assert (breaking.amin(dim=0) > eps).double().mean().item() == pytest.approx(report.worst[number])


@settings(max_examples=8)
@given(size=st.integers(1, 40))
def test_does_not_depend_on_the_batch_size(size):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(64, 4)).double(), torch.rand(40, 1, 8, 8, dtype=torch.float64)
    loader, options = [(x, torch.arange(40) % 4)], {"attacks": ["fgsm", "mifgsm"], "budgets": COARSE, "progress": False}
    whole, parts = sweep(model, loader, **options), sweep(model, loader, batch_size=size, **options)
    assert parts.worst == whole.worst
    for name, values in whole.values.items():
        torch.testing.assert_close(torch.tensor(parts.values[name]), torch.tensor(values), rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["bim", "mifgsm"])
def test_quality_is_that_of_images_of_full_strength(loader, robust_digits_network, name):
    """At the first budget, before there is a warm start, all images are those of an attack that takes all steps."""
    report = sweep(robust_digits_network, loader, [name], [0.2, 0.21], batch_size=100, progress=False)
    attack = get_attack(name, eps=0.2, all_steps=True)
    images = torch.cat([run_attack(robust_digits_network, attack, x, y).x_adv for x, y in loader])
    expected = image_quality(images, torch.cat([x for x, _ in loader]))
    for metric, values in zip(("ssim", "psnr", "mse", "ald2"), expected, strict=True):
        assert report.values[metric][0][0] == pytest.approx(values.mean().item(), rel=1e-3)


def test_quality_counts_all_samples():
    x, y = torch.tensor([[0.75, 0.5], [1.0, 0.5], [0.25, 0.5]]), torch.tensor([0, 0, 0])
    report = sweep(linear(), [(x, y)], ["fgsm"], [0.125, 0.25, 0.375], progress=False)
    assert report.values["accuracy"][0] == pytest.approx([2 / 3, 1 / 3, 0])  # the first class wins the tie at 0.125
    # All move by eps in both coordinates, also where they are broken or wrong; the third meets the end of the range
    last = (2 * 0.375 * 2**0.5 + math.hypot(0.25, 0.375)) / 3
    assert report.values["ald2"][0] == pytest.approx([0.125 * 2**0.5, 0.25 * 2**0.5, last])
    assert report.values["mse"][0] == pytest.approx([0.125**2, 0.25**2, (5 * 0.375**2 + 0.25**2) / 6])
    assert all(math.isnan(value) for value in report.values["ssim"][0])
    assert report.clean_accuracy == pytest.approx(2 / 3)
    assert report.samples == 3
    # Of a model that is always wrong too: of four coordinates, three are at their ends
    x = torch.tensor([[1.0, 0.0], [0.75, 0.0]])
    report = sweep(linear(), [(x, torch.ones(2, dtype=torch.long))], ["fgsm"], [0.1], progress=False)
    assert (report.values["accuracy"], report.values["mse"]) == ([[0.0]], [[pytest.approx(0.1**2 / 4)]])


def test_normalisation_changes_nothing(digits, robust_digits_network):
    x, y = digits[0][1200:1300], digits[1][1200:1300]
    space = InputSpace(mean=0.3, std=0.4)

    def forward(model, inputs):
        return model(space.unnormalize(inputs))

    options = {"attacks": ["bim"], "budgets": COARSE, "progress": False}
    plain = sweep(robust_digits_network, [(x, y)], **options)
    seen = sweep(robust_digits_network, [(space.normalize(x), y)], input_space=space, forward_fn=forward, **options)
    torch.testing.assert_close(
        torch.tensor(seen.values["accuracy"]), torch.tensor(plain.values["accuracy"]), atol=0.011, rtol=0
    )
    torch.testing.assert_close(torch.tensor(seen.values["psnr"]), torch.tensor(plain.values["psnr"]), atol=0.2, rtol=0)


def test_attack_objects_with_names_of_their_own(digits, robust_digits_network):
    loader = [(digits[0][1200:1250], digits[1][1200:1250])]
    attacks = {"few": PGD(steps=1, alpha=0.02), "many": PGD(steps=10), "black_box": Square(num_queries=20)}
    report = sweep(robust_digits_network, loader, attacks, [0.05, 0.15], progress=False)
    assert report.attacks == ["few", "many", "black_box"]
    few, many, black_box = (curve[1] for curve in report.values["accuracy"])
    assert many < min(few, black_box)
    cascade = sweep(robust_digits_network, loader, ["cascade"], [0.5, 0.6], progress=False).values
    assert cascade["accuracy"] == [[0.0, 0.0]]
    assert cascade["ald2"][0][1] > cascade["ald2"][0][0] > 0.5


@pytest.mark.parametrize("eps", [np.array([0.125, 0.25], dtype=np.float32), torch.tensor([0.125, 0.25])])
def test_budgets_may_be_arrays_and_attacks_an_iterator(eps):
    data = [(torch.tensor([[0.75, 0.5]]), torch.tensor([0]))]
    report = sweep(linear(), data, iter(["fgsm"]), eps, progress=False)
    assert json.loads(report.to_json())["budgets"] == [0.125, 0.25]
    assert report.values["accuracy"] == [[1.0, 0.0]]  # the first class wins the tie at 0.125


def test_counts_may_be_integers_of_numpy():
    data, counts = [(torch.rand(5, 2), torch.tensor([0, 1, 0, 1, 0]))], {"batch_size": np.int64(2), "seed": np.int64(1)}
    options = {"attacks": ["fgsm"], "attack_samples": np.int64(4), "progress": False, **counts}
    assert sweep(linear(), data, **options).samples == 4
    assert evaluate(linear(), data, fim_samples=np.int64(3), **options).metrics["samples_fim"] == 3


def test_settings_say_what_was_run():
    x, y = torch.tensor([[0.75, 0.25], [0.25, 0.5]]), torch.tensor([0, 1])
    space = InputSpace(high=255.0, std=255)
    attacks = {"short": PGD(steps=3), "long": PGD(steps=30)}
    report = sweep(linear(), [(x, y)], attacks, [10.0, 20.0], input_space=space, seed=4, progress=False)
    assert report.settings == {
        "short at eps = 10": repr(PGD(eps=10.0, steps=3)),
        "long at eps = 10": repr(PGD(eps=10.0, steps=30)),
        "attacked samples": "2",
        "input range": "0 to 255",
        "normalisation": "mean None, std 255",
        "seed": "4",
        "checksum of the labels": f"{zlib.crc32(np.array([0, 1]).tobytes()):08x}",
    }


def test_budgets_must_increase_inputs_have_labels_and_be_in_the_range_and_logits_be_finite():
    x, y = torch.rand(4, 2), torch.zeros(4, dtype=torch.long)
    for budgets in ([0.1, 0.1], [0.0, 0.1], [1e-30, 0.1]):
        with pytest.raises(ValueError, match="`budgets`") as error:
            sweep(linear(), [], budgets=budgets)
        assert "attacks=()" not in str(error.value)  # which a sweep refuses
    with pytest.raises(ValueError, match=r"`budgets`.*1e-30.*Pass larger ones"):
        compare({"a": linear()}, [], budgets=[1e-30, 0.1])
    with pytest.raises(ValueError, match=r"`sweep_budgets`.*1e-30"):
        evaluate(linear(), [], (), sweep_budgets=[1e-30, 0.1])
    with pytest.raises(ValueError, match=r"\[0.0, 1.0\] but observed"):
        sweep(linear(), [(x + 1, y)], progress=False)
    model = linear()
    with pytest.raises(ValueError, match=r"Expected batches with labels, for attacks, but got none. Pass `batch_fn="):
        sweep(model, [x], progress=False)
    model.bias.data[:] = torch.nan
    with pytest.raises(ValueError, match="Expected finite logits but 3 of 3 samples"):
        sweep(model, [(x, y)], progress=False)


def test_the_logits_are_found_among_outputs():
    class FeaturesFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x):
            features = self.body(x).relu()
            return features, self.head(features)

    def one_logit(module, x):
        return module.head(module.body(x).relu())[:, :1]

    x, options = torch.rand(20, 4), {"attacks": ["pgd"], "budgets": [0.05, 0.1], "progress": False}
    model = FeaturesFirst()
    loader = [(x, model(x)[1].argmax(dim=1))]
    expected = sweep(model, loader, forward_fn=lambda module, x: module(x)[1], **options)
    found = sweep(model, loader, **options)
    assert found.values["accuracy"] == expected.values["accuracy"]
    assert found.values["accuracy"][0][0] > found.values["accuracy"][0][1]
    two = [(x, (one_logit(model, x) > 0).long().squeeze(1))]
    with pytest.raises(
        ValueError, match=r"sigmoid of one.*forward_fn=lambda module, x: module\(x\)\.logit\(eps=1e-6\)"
    ):
        sweep(model, two, forward_fn=lambda module, x: one_logit(module, x).sigmoid(), **options)
    remedied = sweep(model, two, forward_fn=lambda module, x: one_logit(module, x).sigmoid().logit(eps=1e-6), **options)
    assert remedied.values["accuracy"] == sweep(model, two, forward_fn=one_logit, **options).values["accuracy"]


def test_interruption_returns_what_is_finished(digits, digits_network):
    x, y = digits[0][:96], digits[1][:96]
    calls = []

    class Interrupted(nn.Module):
        def forward(self, inputs):
            calls.append(len(inputs))
            if sum(size == 16 for size in calls) > 1:  # the forward pass of clean inputs of the last batch
                raise KeyboardInterrupt
            return digits_network(inputs)

    options = {"attacks": ["fgsm", "bim"], "budgets": COARSE, "batch_size": 40, "progress": False}
    with pytest.warns(UserWarning, match="covers 80 of 96 samples"):
        report = sweep(Interrupted(), [(x, y)], **options)
    assert report.interrupted
    assert report.samples == 80
    assert "80 samples" in report.notes[0]
    assert report.values == sweep(digits_network, [(x[:80], y[:80])], **options).values


def test_without_warm_starts_accuracy_is_that_of_each_budget_alone():
    # Right below 0.3 and above 0.7, so that larger steps leave the adversarial region again
    class Band(nn.Module):
        def forward(self, x):
            inside = 20 * (0.2 - (x[:, :1] - 0.5).abs())
            return torch.cat([torch.zeros_like(inside), inside], dim=1)

    x = torch.linspace(0.02, 0.28, 14).unsqueeze(1)
    loader, budgets = [(x, torch.zeros(14, dtype=torch.long))], [0.11, 0.31, 0.51, 0.71]
    report = sweep(Band(), loader, ["fgsm"], budgets, warm_starts=False, progress=False)
    moved = x.double().numpy() + np.array(budgets)
    expected = (np.abs(moved.clip(0, 1) - 0.5) > 0.2).mean(axis=0)
    assert report.values["accuracy"][0] == pytest.approx(expected.tolist())
    assert expected[-1] > expected[1]
    warm = sweep(Band(), loader, ["fgsm"], budgets, progress=False).values["accuracy"][0]
    assert warm == sorted(warm, reverse=True)


@pytest.mark.parametrize("run", ["sweep", "compare"])
def test_attacks_that_take_minutes_are_announced_once(monkeypatch, recwarn, run):
    monkeypatch.setattr(plan, "_MANY_PASSES", 1000)
    data, options = [(torch.rand(4, 2), torch.tensor([0, 1, 0, 1]))], {"attack_samples": 4, "progress": False}
    attacks = [Square(num_queries=100), PGD(steps=10)]
    if run == "sweep":
        sweep(linear(), data, attacks, [0.01, 0.02, 0.03], **options)
    else:
        compare({"a": linear()}, data, attacks, [0.01, 0.02, 0.03], fim_samples=0, **options)
    messages = [str(warning.message) for warning in recwarn if "minutes" in str(warning.message)]
    assert len(messages) == 1
    assert "square takes up to 100 passes of each of 4 samples at each of 3 budgets" in messages[0]
