import pytest
import torch
from torch import nn

from lightning_robustness.evaluation import ComparisonReport, compare, composite_scores, evaluate, sweep
from lightning_robustness.evaluation.reports.sweep_report import SWEEP_METRICS
from tests.evaluation.reports.reports import make_report


@pytest.fixture(scope="module")
def digits_comparison(digits, digits_network, robust_digits_network):
    loader = [(digits[0][1200:1500], digits[1][1200:1500])]
    models = {"natural": digits_network, "robust": robust_digits_network}
    return compare(
        models, loader, strength="paper", decision_space="pca", fim_samples=200, attack_samples=200, progress=False
    )


def test_robust_network_ranks_above_the_natural_one(digits_comparison):
    better = {"natural": 2, "robust": 1}
    for key in ("cmmr", "adv_acc", "fim"):
        assert digits_comparison.ranks[key] == better, key
    assert digits_comparison.scores["robust"] > digits_comparison.scores["natural"] + 0.01
    accuracy = digits_comparison.adversarial_accuracy
    assert accuracy["robust"] > accuracy["natural"] + 0.1


def test_has_the_attacks_and_budgets_of_the_paper(digits_comparison):
    assert digits_comparison.attacks == ["fgsm", "bim", "pgd", "mifgsm"]
    assert digits_comparison.budgets == pytest.approx([number / 100 for number in range(1, 21)])
    assert all(weight > 0 for weight in digits_comparison.weights.values())
    assert digits_comparison.concordance > 0.9
    assert digits_comparison.reports["robust"].decision_space.attack == "pgd, $\\epsilon$ = 0.11"


def test_reports_take_the_place_of_models(digits, digits_network, robust_digits_network):
    loader = [(digits[0][1200:1300], digits[1][1200:1300])]
    options = {"attacks": ["fgsm"], "budgets": [0.1, 0.2]}
    whole = compare({"a": digits_network, "b": robust_digits_network}, loader, progress=False, **options)
    saved = evaluate(digits_network, loader, (), sweep_attacks=["fgsm"], sweep_budgets=[0.1, 0.2], progress=False)
    mixed = compare({"a": saved, "b": robust_digits_network}, loader, progress=False, **options)
    alone = compare({"a": saved, "b": whole.reports["b"]})
    assert mixed.scores == alone.scores == whole.scores
    assert mixed.ranks == whole.ranks


def test_prior_and_balance_are_handed_on():
    reports = {"a": make_report(1), "b": make_report(2)}
    report = compare(reports, prior={"accuracy": 5.0}, balance=0.1)
    assert sum(report.weights.values()) == pytest.approx(0.9)
    assert report.weights["accuracy"] / report.weights["mse"] == pytest.approx(
        5 * report.entropy_weights["accuracy"] / report.entropy_weights["mse"]
    )


def test_budgets_of_l2_may_have_any_size(digits, digits_network):
    loader = [(digits[0][1200:1220], digits[1][1200:1220])]
    options = {"norm": "l2", "strength": "fast", "fim_samples": 0, "progress": False}
    report = compare({"a": digits_network}, loader, ["pgd"], [4 / 255, 8 / 255, 0.5], **options)
    assert report.budget == 8 / 255


def test_the_number_of_classes_is_that_of_the_reports(digits, digits_network):
    loader = [(digits[0][:20], digits[1][:20])]
    reports = {"a": make_report(1)}
    with pytest.raises(ValueError, match=r"number of classes .* 7 \(`num_classes`\)"):
        compare({**reports, "b": digits_network}, loader, num_classes=7)
    with pytest.raises(ValueError, match="`num_classes`"):
        compare(reports, num_classes=7)


def test_attacks_may_start_anew_at_each_budget(digits, digits_network):
    loader, budgets = [(digits[0][1200:1260], digits[1][1200:1260])], [0.05, 0.1, 0.15]
    options = {"warm_starts": False, "attack_samples": 60, "strength": "paper", "progress": False}
    report = compare({"a": digits_network}, loader, ["bim"], budgets, fim_samples=0, **options)
    expected = sweep(digits_network, loader, ["bim"], budgets, **options)
    assert report.reports["a"].sweep.values == expected.values
    assert report.reports["a"].sweep.settings["warm starts"] == "no"
    assert expected.values != sweep(digits_network, loader, ["bim"], budgets, **options | {"warm_starts": True}).values


@pytest.mark.parametrize("weighting", ["entropy", "printed", "correlation"])
def test_weighting_is_that_of_composite_scores(weighting):
    reports = {"a": make_report(1), "b": make_report(2)}
    report = compare(reports, prior={"accuracy": 5.0}, weighting=weighting)
    values = torch.tensor([[own.sweep.values[name] for name in SWEEP_METRICS] for own in reports.values()])
    expected = composite_scores(
        values.double().permute(0, 2, 3, 1), list(SWEEP_METRICS.values()), [5.0, 1, 1, 1, 1], weighting=weighting
    )
    assert list(report.weights.values()) == pytest.approx(expected.weights.tolist(), abs=1e-5)
    assert ComparisonReport.from_dict(report.to_dict()).weights == report.weights
    assert ("correlation" in report.tables()[0].note) == (weighting == "correlation")


def test_an_unknown_weighting_is_refused_before_the_sweep(digits_network):
    with pytest.raises(ValueError, match="`weighting`"):
        compare({"a": digits_network}, [], weighting="mean")


def test_different_numbers_of_classes_are_found_before_the_sweep(digits, digits_network):
    loader = [(digits[0][:20], digits[1][:20])]
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 12))
    with pytest.warns(UserWarning, match=r"'b' .*left out.* 10 classes"):
        report = compare({"a": digits_network, "b": other}, loader, ["fgsm"], [0.1, 0.2], progress=False)
    assert list(report.reports) == ["a"]
    expected = (
        "ValueError: Expected 10 classes, as `num_classes` or the models before say, but the model has 12. Leave "
        "`num_classes` out, or compare models of the same classes."
    )
    assert report.failed == {"b": expected}
    assert f"b is left out: it could not be measured. {expected}" in report.notes
    assert type(report).from_dict(report.to_dict()).failed == report.failed


class Broken(nn.Module):
    def forward(self, x):
        raise RuntimeError("the weights are on another planet")


def test_a_model_that_fails_does_not_lose_the_others(digits, digits_network):
    loader, options = (
        [(digits[0][:20], digits[1][:20])],
        {"attacks": ["fgsm"], "budgets": [0.1, 0.2], "progress": False},
    )
    models = {"first": Broken(), "second": digits_network, "third": Broken()}
    with pytest.warns(UserWarning, match=r"'(first|third)' .*left out"):
        report = compare(models, loader, **options)
    assert report.scores == compare({"second": digits_network}, loader, **options).scores
    assert list(report.failed) == ["first", "third"]
    assert report.missing == report.left_out == []


@pytest.mark.filterwarnings("ignore:'.*' could not be measured")
def test_models_that_all_fail_raise_the_first_error():
    with pytest.raises(Exception, match="the weights are on another planet"):
        compare({"a": Broken(), "b": Broken()}, [(torch.rand(4, 64), torch.zeros(4).long())], progress=False)


@pytest.mark.parametrize(
    ("models", "error", "message"),
    [
        ({"a": "network.pt"}, TypeError, "'a' in `models`.* str"),
        ({"a": nn.Linear(2, 2)}, TypeError, "`dataloader`.*'a'"),
        ({}, ValueError, "at least one model"),
    ],
)
def test_errors(models, error, message):
    with pytest.raises(error, match=message):
        compare(models)


class Interrupting(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        raise KeyboardInterrupt


def test_interruption_returns_the_models_that_are_finished(digits, digits_network):
    models = {"first": digits_network, "second": Interrupting(), "third": digits_network}
    loader = [(digits[0][:50], digits[1][:50])]
    with pytest.warns(UserWarning, match="measured the features"):
        report = compare(models, loader, ["fgsm"], [0.05, 0.1], progress=False)
    assert list(report.reports) == ["first"]
    assert report.missing == ["second", "third"]


def test_interruption_before_anything_is_finished():
    with pytest.warns(UserWarning, match="interrupted"), pytest.raises(KeyboardInterrupt):
        compare({"first": Interrupting()}, [(torch.rand(4, 64), torch.zeros(4).long())], progress=False)


class Untouchable(nn.Module):
    def forward(self, x):
        raise AssertionError("a model was run")


@pytest.mark.filterwarnings("ignore:.* could not be measured")
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prior": {"acc": 2.0}}, ValueError, "`prior`.*'acc'"),
        ({"prior": {"mse": -1.0}}, ValueError, "`prior`"),
        ({"balance": 1.5}, ValueError, "`balance`.* 1.5"),
        ({"budgets": 0.1}, TypeError, "`budgets`.* 0.1"),
        ({"budgets": []}, ValueError, "`budgets`"),
        ({"second": "net.pt"}, TypeError, "'second' in `models`"),
        ({"second": make_report(sweep=None)}, ValueError, "'second'.*`sweep_budgets=`"),
        ({"second": make_report()}, ValueError, r"fgsm, pgd \(second\), fgsm \(this"),
        (
            {"second": make_report(), "attacks": ["fgsm", "pgd"]},
            ValueError,
            r"0.2, 0.3 \(second\), 0.1, 0.2 \(this",
        ),
        ({"second": Untouchable(), "dataloader": iter([])}, TypeError, "2 models .*list_iterator"),
        ({"attack_samples": 0}, ValueError, "`attack_samples`"),
    ],
)
def test_arguments_are_checked_before_the_first_model(arguments, error, message):
    arguments = {"dataloader": [], "attacks": ["fgsm"], "budgets": [0.1, 0.2], **arguments}
    models = {"first": Untouchable(), "second": arguments.pop("second", Untouchable())}
    with pytest.raises(error, match=message):
        compare(models, progress=False, **arguments)


def test_classes_of_a_report_are_those_of_the_models(digits, digits_network):
    loader, options = (
        [(digits[0][:20], digits[1][:20])],
        {"attacks": ["fgsm"], "budgets": [0.1, 0.2], "progress": False},
    )
    saved = compare({"a": digits_network}, loader, **options).reports["a"]
    saved.num_classes = 12
    with pytest.warns(UserWarning, match=r"'a' .*left out.* 12 classes"):
        report = compare({"a": digits_network, "b": saved}, loader, **options)
    assert list(report.reports) == ["b"]


def test_model_that_is_always_wrong_is_left_out(digits, digits_network):
    wrong = nn.Sequential(digits_network, nn.Linear(10, 10))
    wrong[1].weight.data, wrong[1].bias.data = torch.eye(10).roll(1, dims=0), torch.zeros(10)
    x = digits[0][1200:1260]
    loader, options = (
        [(x, digits_network(x).argmax(1))],
        {"attacks": ["fgsm"], "budgets": [0.05, 0.1], "progress": False},
    )
    with pytest.warns(UserWarning, match=r"no correct prediction from 'b'.*left"):
        report = compare({"a": digits_network, "b": wrong, "c": digits_network}, loader, **options)
    assert (list(report.reports), report.left_out, report.missing) == (["a", "c"], ["b"], [])
    assert report.ranks["cmmr"] == {"a": 1, "c": 1}
    with (
        pytest.warns(UserWarning, match="It is left out"),
        pytest.raises(ValueError, match="no correct prediction from 'b'"),
    ):
        compare({"b": wrong}, loader, **options)


def test_models_that_saw_different_samples_are_noted(digits, digits_network):
    options = {"attacks": ["fgsm"], "budgets": [0.05, 0.1], "progress": False}
    parts = {name: [(digits[0][rows], digits[1][rows])] for name, rows in (("a", slice(50)), ("b", slice(50, 100)))}
    reports = {name: compare({name: digits_network}, loader, **options).reports[name] for name, loader in parts.items()}
    note = compare(reports).notes[0]
    assert note.startswith("Models were attacked with different settings, so ranks mean little. checksum of the labels")


def test_budget_is_checked_before_the_first_sweep(digits, digits_network):
    loader = iter([(digits[0][:8], digits[1][:8])])
    with pytest.raises(ValueError, match=r"`rank_budget`.* 2/255, 4/255, .* 0.1"):
        compare({"a": digits_network}, loader, budgets=[2 / 255, 4 / 255], rank_budget=0.1)
    assert len(list(loader)) == 1


def test_comparison_knows_where_it_comes_from(digits, digits_network):
    loader = [(digits[0][:50], digits[1][:50])]
    report = compare({"a": digits_network}, loader, ["fgsm"], [0.1, 0.2, 0.3], rank_budget=0.1, seed=3, progress=False)
    assert report.budget == 0.1
    assert {"data": "list", "seed": "3"}.items() <= report.provenance.items()
    assert {"data": "list", "seed": "3"}.items() <= report.reports["a"].provenance.items()
    assert report.facts["attacks"].startswith("fgsm (1 step")
    assert report.facts["inputs"] == "images with values in [0, 1]"
