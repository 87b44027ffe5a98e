import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_robustness import InputSpace
from lightning_robustness.evaluation import ComparisonReport, compare, evaluate, session, sweep
from tests.evaluation.reports.reports import make_report

OPTIONS = {"attacks": ["fgsm"], "budgets": [0.1, 0.2], "progress": False}


@pytest.fixture
def loader(digits):
    return [(digits[0][1200:1260], digits[1][1200:1260])]


class Raising(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        raise self.error


BROKEN = Raising(RuntimeError("the weights are on another planet"))
INTERRUPTED = Raising(KeyboardInterrupt())
UNTOUCHABLE = Raising(AssertionError("a model was run"))


def test_robust_network_ranks_above_the_natural_one(digits, digits_network, robust_digits_network):
    loader = [(digits[0][1200:1500], digits[1][1200:1500])]
    models = {"natural": digits_network, "robust": robust_digits_network}
    options = {"strength": "paper", "decision_space": "pca", "fim_samples": 200, "attack_samples": 200}
    report = compare(models, loader, progress=False, **options)
    assert report.attacks == ["fgsm", "bim", "pgd", "mifgsm"]
    assert report.budgets == pytest.approx([number / 100 for number in range(1, 21)])
    assert report.reports["robust"].decision_space.attack == "pgd, $\\epsilon$ = 0.11"
    assert report.concordance > 0.9
    for key in ("cmmr", "mean_robust_accuracy", "fim"):
        assert report.ranks[key] == {"natural": 2, "robust": 1}, key
    assert report.scores["robust"] > report.scores["natural"] + 0.01
    assert report.mean_robust_accuracy["robust"] > report.mean_robust_accuracy["natural"] + 0.1


def test_reports_take_the_place_of_models(loader, digits_network, robust_digits_network):
    whole = compare({"a": digits_network, "b": robust_digits_network}, loader, **OPTIONS)
    saved = evaluate(digits_network, loader, (), sweep_attacks=["fgsm"], sweep_budgets=[0.1, 0.2], progress=False)
    mixed = compare({"a": saved, "b": robust_digits_network}, loader, **OPTIONS)
    alone = compare({"a": saved, "b": whole.reports["b"]})
    assert mixed.scores == alone.scores == whole.scores
    assert mixed.ranks == whole.ranks


def test_weights_are_handed_on():
    reports, options = {"a": make_report(1), "b": make_report(2)}, {"prior": {"accuracy": 5.0}, "balance": 0.1}
    for weighting in ("entropy", "correlation"):
        report = compare(reports, weighting=weighting, **options)
        assert report.weights == ComparisonReport(reports, weighting=weighting, **options).weights
        assert sum(report.weights.values()) == pytest.approx(0.9)


def test_budgets_of_l2_may_have_any_size(loader, digits_network):
    options = {"norm": "l2", "strength": "fast", "fim_samples": 0, "progress": False}
    report = compare({"a": digits_network}, loader, ["pgd"], [4 / 255, 8 / 255, 0.5], **options)
    assert report.rank_budget == 8 / 255


def test_attacks_may_start_anew_at_each_budget(loader, digits_network):
    budgets = [0.05, 0.1, 0.15]
    options = {"warm_starts": False, "attack_samples": 60, "strength": "paper", "progress": False}
    report = compare({"a": digits_network}, loader, ["bim"], budgets, fim_samples=0, **options)
    expected = sweep(digits_network, loader, ["bim"], budgets, **options)
    assert report.reports["a"].sweep.values == expected.values
    assert report.reports["a"].sweep.settings["warm starts"] == "no"
    assert expected.values != sweep(digits_network, loader, ["bim"], budgets, **options | {"warm_starts": True}).values


def test_different_numbers_of_classes_are_found_before_the_sweep(loader, digits_network):
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 12))
    with pytest.warns(UserWarning, match=r"'b' .*left out.* 10 classes"):
        report = compare({"a": digits_network, "b": other}, loader, **OPTIONS)
    assert list(report.reports) == ["a"]
    assert list(report.failed) == ["b"]
    assert "10 classes, as `num_classes`" in report.failed["b"]
    assert f"b is left out: it could not be measured. {report.failed['b']}" in report.notes
    assert type(report).from_dict(report.to_dict()).failed == report.failed


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.embedding(x).mean(1))


@pytest.mark.filterwarnings(
    "ignore:Inputs are integers", "ignore:Only one class was predicted", "ignore:.*the network has collapsed"
)
def test_tokens_need_their_embeddings():
    model, loader = Tokens(), [(torch.arange(32).reshape(8, 4) % 4, torch.arange(8) % 2)]
    with pytest.raises(TypeError, match=r"small amounts but got integers.*`embed_fn="):
        compare({"a": model}, loader, **OPTIONS)
    with pytest.raises(TypeError, match=r"small amounts but got integers.*`embed_fn="):
        sweep(model, loader, **OPTIONS)
    remedy = {"embed_fn": lambda module, x: module.embedding(x), "input_space": InputSpace(None, None)}
    remedy["forward_fn"] = lambda module, embeddings: module.head(embeddings.mean(1))
    assert sweep(model, loader, **remedy, **OPTIONS).samples == 8
    assert list(compare({"a": model}, loader, **remedy, **OPTIONS).reports) == ["a"]


@pytest.mark.parametrize("name", [3, None, " "])
def test_names_are_strings(name):
    with pytest.raises(ValueError, match=f"not empty but got {name!r}"):
        compare({name: UNTOUCHABLE}, [], **OPTIONS)
    with pytest.raises(ValueError, match=f"not empty but got {name!r}"):
        ComparisonReport({name: make_report()})


def test_one_of_each_cannot_be_compared():
    with pytest.raises(ValueError, match=r"several models, attacks or budgets .* one of each\. Pass more budgets"):
        compare({"a": UNTOUCHABLE}, [], ["fgsm"], [0.1], progress=False)


def test_numbers_of_numpy_can_be_written():
    weight = np.float32(0.5)
    report = compare({"a": make_report()}, prior={"accuracy": weight}, balance=weight, rank_budget=np.float64(0.1))
    assert ComparisonReport.from_dict(json.loads(report.to_json())).to_dict() == report.to_dict()


def test_a_model_that_fails_does_not_lose_the_others(loader, digits_network):
    models = {"first": BROKEN, "second": digits_network, "third": BROKEN}
    with pytest.warns(UserWarning, match=r"'(first|third)' .*left out"):
        report = compare(models, loader, **OPTIONS)
    assert report.scores == compare({"second": digits_network}, loader, **OPTIONS).scores
    assert list(report.failed) == ["first", "third"]
    assert report.missing == report.left_out == []


@pytest.mark.filterwarnings("ignore:'.*' could not be measured")
def test_models_that_all_fail_raise_the_first_error(loader):
    with pytest.raises(Exception, match="the weights are on another planet"):
        compare({"a": BROKEN, "b": BROKEN}, loader, **OPTIONS)


@pytest.mark.filterwarnings("ignore:The evaluation was interrupted while it measured the features")
def test_interruption_returns_the_models_that_are_finished(loader, digits_network):
    report = compare({"first": digits_network, "second": INTERRUPTED, "third": digits_network}, loader, **OPTIONS)
    assert list(report.reports) == ["first"]
    assert report.missing == ["second", "third"]
    with pytest.raises(KeyboardInterrupt):
        compare({"first": INTERRUPTED}, loader, **OPTIONS)


@pytest.mark.filterwarnings("ignore:.* could not be measured")
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prior": {"acc": 2.0}}, ValueError, "`prior`.*'acc'"),
        ({"rank_budget": 0.3}, ValueError, r"`rank_budget`.* 0.1, 0.2, .* 0.3"),
        ({"budgets": 0.1}, TypeError, "`budgets`.* 0.1"),
        ({"dataloader": None}, TypeError, "`dataloader`.*'first'"),
        ({"second": "net.pt"}, TypeError, "'second' in `models`"),
        ({"second": make_report(sweep=None)}, ValueError, r"'second' has none.*`evaluate\(\.\.\., sweep_budgets="),
        ({"second": make_report()}, ValueError, r"fgsm, pgd \(second\), fgsm \(this"),
        ({"second": make_report(), "num_classes": 7}, ValueError, r"number of classes .* 7 \(`num_classes`\)"),
        ({"second": make_report(), "attacks": ["fgsm", "pgd"]}, ValueError, r"0.2, 0.3 \(second\), 0.1, 0.2 \(this"),
        ({"dataloader": iter([])}, TypeError, "2 models .*list_iterator"),
        ({"attack_samples": 0}, ValueError, "`attack_samples`"),
        ({"device": "abacus"}, ValueError, "`device`.*'abacus'"),
        ({"dataloader": TensorDataset(torch.zeros(2, 3))}, TypeError, r"`dataloader`.*Pass `DataLoader\("),
        ({"fim_method": "best"}, ValueError, "`fim_method`.*'best'"),
        ({"forward_fn": "logits"}, TypeError, "`forward_fn`.*'logits'"),
        ({"decision_space": "umap"}, ValueError, "'umap'"),
        ({"per_sample": 1}, TypeError, "`per_sample`"),
    ],
)
@pytest.mark.filterwarnings("error")  # of a model that is left out
def test_arguments_are_checked_before_the_first_model(arguments, error, message):
    arguments = {"dataloader": [], "attacks": ["fgsm"], "budgets": [0.1, 0.2], **arguments}
    models = {"first": UNTOUCHABLE, "second": arguments.pop("second", UNTOUCHABLE)}
    with pytest.raises(error, match=message):
        compare(models, progress=False, **arguments)


def test_model_that_is_always_wrong_is_left_out(loader, digits_network):
    wrong = nn.Sequential(digits_network, nn.Linear(10, 10))
    wrong[1].weight.data, wrong[1].bias.data = torch.eye(10).roll(1, dims=0), torch.zeros(10)
    loader = [(x, digits_network(x).argmax(1)) for x, _ in loader]
    with pytest.warns(UserWarning, match=r"no correct prediction from 'b'.*left"):
        report = compare({"a": digits_network, "b": wrong, "c": digits_network}, loader, **OPTIONS)
    assert (list(report.reports), report.left_out, report.missing) == (["a", "c"], ["b"], [])
    assert report.ranks["cmmr"] == {"a": 1, "c": 1}
    with (
        pytest.warns(UserWarning, match="It is left out"),
        pytest.raises(ValueError, match="no correct prediction from 'b'"),
    ):
        compare({"b": wrong}, loader, **OPTIONS)


def test_comparison_knows_where_it_comes_from(loader, digits_network, monkeypatch):
    monkeypatch.setattr(session, "describe_run", lambda device: {"machine": f"the {device} of the model"})
    report = compare({"a": digits_network}, loader, **OPTIONS, rank_budget=0.1, seed=3)
    assert report.rank_budget == 0.1
    expected = {"data": "list", "seed": "3", "machine": "the cpu of the model"}
    assert report.reports["a"].provenance == expected
    assert expected.items() <= report.provenance.items()
    assert "date" in report.provenance
    assert report.facts["attacks"].startswith("fgsm (1 step")
    assert report.facts["inputs"] == "images with values in [0, 1]"
