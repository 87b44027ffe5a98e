import copy
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torchattacks
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import recall_score
from torch import nn

from lightning_robustness._measurement.feature_pass import Features
from lightning_robustness._measurement.findings import class_accuracies, conclude
from lightning_robustness._measurement.plan import name_attacks
from lightning_robustness._measurement.rows import Rows
from lightning_robustness.attacks import CW, PGD, Attack, Budget, Cascade, Square, get_attack
from lightning_robustness.attacks.attack import Perturbation
from lightning_robustness.functional import boundary_distance
from lightning_robustness.input_space import InputSpace
from tests._measurement.subjects import attack_by_hand, findings_of, make_plan, rows_of, untouched


def rates(y, preds, adv_preds, l2):
    """Success rate, accuracy and distortion, sample by sample."""
    flipped = [i for i in range(len(y)) if preds[i] == y[i] and adv_preds[i] != y[i]]
    num_correct = sum(preds[i] == y[i] for i in range(len(y)))
    distortion = median_of([l2[i] for i in flipped], num_correct)
    return len(flipped) / num_correct, np.mean([adv_preds[i] == y[i] for i in range(len(y))]), distortion


def median_of(distances, number):
    """The lower median of a number of samples, of which those without a distance are infinitely far; None there."""
    return sorted(distances)[(number - 1) // 2] if len(distances) > (number - 1) // 2 and number else None


def check_rates(values, name, y, preds, adv_preds, l2):
    asr, adv_acc, distortion = rates(y, preds, adv_preds, l2)
    assert values[f"asr/{name}"] == pytest.approx(asr, abs=1e-6)
    assert values[f"adv_acc/{name}"] == pytest.approx(adv_acc, abs=1e-6)
    assert values.get(f"distortion/{name}") == (None if distortion is None else pytest.approx(distortion, rel=1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch_size", [1, 16])
def test_rates_are_those_of_the_samples(digits, digits_network, dtype, batch_size):
    number = 6 if batch_size == 1 else 50
    model = copy.deepcopy(digits_network).to(dtype)
    x, y = digits[0][1200 : 1200 + number].to(dtype), digits[1][1200 : 1200 + number]
    attacks = {"pgd": PGD(eps=0.06, steps=3), "cw": CW(steps=10, lr=0.05), "square": Square(eps=0.06, num_queries=20)}
    findings = findings_of(make_plan(attacks), model, x, y, seed=3, batch_size=batch_size)
    values = findings.values
    broken, distances = [], []
    for name, attack in attacks.items():
        result = attack_by_hand(model, attack, x, y, batch_size, seed=3)
        check_rates(values, name, y.numpy(), result["preds"], result["adv_preds"], result["l2"])
        counts = result["linf"] <= 0.06001 if name == "cw" else np.ones(number, dtype=bool)
        broken.append(result["success"] & counts)
        distances.append(np.where(broken[-1], result["l2"], np.inf))
    is_broken = np.any(broken, axis=0)
    adv_preds = np.where(is_broken, -1, result["preds"])
    check_rates(values, "worst", y.numpy(), result["preds"], adv_preds, np.min(distances, axis=0))
    assert values["samples_attacks"] == number
    assert values["masking"] == 0
    assert all(values[f"seconds/{name}"] > 0 for name in attacks)
    assert list(findings.rates) == [*attacks, "worst"]


def test_no_attack_with_a_budget_does_better_than_the_worst_case(digits, digits_network):
    x, y = digits[0][1200:1300], digits[1][1200:1300]
    members = PGD(eps=0.1, steps=3), PGD(eps=0.9, steps=3, norm="l2")
    attacks = {
        "weak": PGD(eps=0.02, steps=3),
        "strong": get_attack("pgd", eps=0.1, strength="fast"),
        "cascade": Cascade(attacks=members[:1]),
        "mixed": Cascade(attacks=members),
        "l2": PGD(eps=0.5, norm="l2", steps=3),
    }
    values = findings_of(make_plan(attacks), digits_network, x, y, batch_size=50).values
    assert values["asr/weak"] < values["asr/strong"] < values["asr/mixed"]
    assert values["asr/worst"] >= max(values[f"asr/{name}"] for name in attacks)
    assert values["adv_acc/worst"] <= min(values[f"adv_acc/{name}"] for name in attacks)


class Line(nn.Module):
    """Class 0 below one half in the first coordinate, class 1 above; the second one says which sample it is."""

    def forward(self, x):
        return torch.stack([0.5 - x[:, 0], x[:, 0] - 0.5], dim=1)


class Planned:
    """An attack of which is known what it does to each sample: how far it moves its first coordinates."""

    def __init__(self, shifts, eps=None, norm=None, num_coordinates=1):
        self.shifts = torch.tensor(shifts).unsqueeze(1)
        self.num_coordinates = num_coordinates
        if eps is not None:
            self.eps = eps
        if norm is not None:
            self.norm = norm

    def __call__(self, model, x, y):
        x_adv = x.clone()
        x_adv[:, : self.num_coordinates] += self.shifts[(100 * x[:, 1]).round().long()]
        return x_adv


def line_inputs(number):
    """One quarter below the boundary."""
    return torch.stack([torch.full((number,), 0.25), torch.arange(number) / 100], dim=1)


def zeros(number):
    return torch.zeros(number, dtype=torch.long)


SHIFTS = st.lists(st.sampled_from([0.0, 0.125, 0.375, 0.5, 0.625]), min_size=12, max_size=12)


@settings(max_examples=25)
@given(st.lists(SHIFTS, min_size=1, max_size=4), st.lists(st.integers(0, 1), min_size=12, max_size=12))
def test_the_worst_case_is_the_union(shifts, labels):
    """Whichever attack breaks a sample; the closest one counts for the distortion."""
    attacks = {f"attack{number}": Planned(row) for number, row in enumerate(shifts)}
    values = findings_of(make_plan(attacks), Line(), line_inputs(12), torch.tensor(labels), batch_size=5).values
    closest = [min((row[i] for row in shifts if row[i] > 0.25), default=None) for i in range(12)]
    flipped = [closest[i] for i in range(12) if labels[i] == 0 and closest[i] is not None]
    number = labels.count(0)
    assert values.get("asr/worst") == (pytest.approx(len(flipped) / number) if number else None)
    assert values["adv_acc/worst"] == pytest.approx((number - len(flipped)) / 12)
    assert values.get("distortion/worst") == median_of(flipped, number)
    for index, row in enumerate(shifts):
        broken = sum(row[i] > 0.25 for i in range(12) if labels[i] == 0)
        assert values.get(f"asr/attack{index}") == (pytest.approx(broken / number) if number else None)


@pytest.mark.parametrize(
    ("budgets", "expected"),
    [
        ([], [0.375, 0.5]),  # nothing to compare with: everything counts
        ([("linf", 0.375)], [0.375]),
        ([("linf", 0.375), ("linf", 0.1)], [0.375]),
        ([("linf", 0.5)], [0.375, 0.5]),
        ([("linf", 0.1)], []),
        ([("l2", 0.375)], []),  # both coordinates move
        ([("l2", 0.54)], [0.375]),
        ([("l2", 0.1), ("linf", 0.4)], [0.375]),
        ([("l2", 0.54), ("linf", 0.1)], [0.375]),
        ([("unknown", 0.6)], []),
        ([(None, 0.6)], []),
    ],
)
def test_attacks_without_a_budget_count_within_that_of_others(budgets, expected):
    attacks = {"free": Planned([0.375, 0.5, 0.0], num_coordinates=2)}
    attacks |= {f"bounded{i}": Planned([0.0, 0.0, 0.0], eps, norm) for i, (norm, eps) in enumerate(budgets)}
    values = findings_of(make_plan(attacks), Line(), line_inputs(3), zeros(3)).values
    assert values["asr/free"] == pytest.approx(2 / 3)
    assert values["asr/worst"] == pytest.approx(len(expected) / 3)
    assert values["adv_acc/worst"] == pytest.approx(1 - len(expected) / 3)
    distances = [math.hypot(shift, shift) for shift in expected]
    assert values.get("distortion/worst") == (pytest.approx(distances[1]) if len(expected) > 1 else None)


def test_a_cascade_has_the_budgets_of_all_its_members():
    members = Planned([0.0] * 3, 0.1, "linf"), Planned([0.0] * 3, 0.54, "l2")
    attacks = {"free": Planned([0.375, 0.5, 0.0], num_coordinates=2), "bounded": Cascade(attacks=members)}
    assert findings_of(make_plan(attacks), Line(), line_inputs(3), zeros(3)).values["asr/worst"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("budget", "num_coordinates", "size"),
    [
        (Budget("l2", 0.4), 2, 0.4),
        (Budget("linf", 0.4), 2, 0.4),  # the square root of 2 is below 4
        (Budget("linf", 0.1), 256, 0.4),
        (None, 2, None),
    ],
)
def test_minimum_norm_attacks_count_within_an_l2_budget(budget, num_coordinates, size):
    """Beyond it, a sample counts as robust; the distortion is that of what was found."""
    x = torch.zeros(4, num_coordinates)
    x[:, :2] = line_inputs(4)
    plan = make_plan({"free": Planned([0.375, 0.5, 0.625, 0.0], norm="l2")}, minimum_norm_budget=budget)
    findings = findings_of(plan, Line(), x, zeros(4), batch_size=3)
    values, number = findings.values, 3 if size is None else 1
    assert values["asr/free"] == values["asr/worst"] == pytest.approx(number / 4)
    assert values["adv_acc/free"] == values["adv_acc/worst"] == pytest.approx(1 - number / 4)
    assert values["distortion/free"] == 0.5
    assert values.get("l2_budget") == findings.l2_budget == (size if size is None else pytest.approx(size))
    assert findings.attacks["free"]["success"].tolist() == [True, size is None, size is None, False]
    assert findings.attacks["free"]["adv_preds"].tolist() == [1, int(size is None), int(size is None), 0]
    assert findings.worst["adv_preds"].tolist() == findings.attacks["free"]["adv_preds"].tolist()


def test_the_worst_case_counts_minimum_norm_attacks_within_the_budget_of_others():
    """The ball of the l2 budget and that of the others overlap: each value counts within its own."""
    attacks = {"free": Planned([0.3, 0.375, 0.5], norm="l2"), "bounded": Planned([0.0, 0.0, 0.0], 0.4, "linf")}
    plan = make_plan(attacks, minimum_norm_budget=Budget("l2", 0.31))
    values = findings_of(plan, Line(), line_inputs(3), zeros(3)).values
    assert values["asr/free"] == pytest.approx(1 / 3)
    assert values["asr/worst"] == pytest.approx(2 / 3)
    assert values["distortion/free"] == values["distortion/worst"] == 0.375
    assert values["masking"] == 0


def test_attacks_with_a_budget_count_beside_smaller_ones():
    attacks = {"small": Planned([0.0, 0.0], 0.1, "linf"), "large": Planned([0.375, 0.0], 0.5, "linf")}
    attacks["only eps"] = Planned([0.0, 0.625], 0.625)
    assert findings_of(make_plan(attacks), Line(), line_inputs(2), zeros(2)).values["asr/worst"] == 1


def test_budgets_are_in_units_of_the_input_space():
    """An instance of torchattacks has its own in units of [0, 1]."""
    fgsm = torchattacks.FGSM(nn.Linear(1, 1), eps=0.375)
    plan = make_plan(name_attacks({"free": Planned([70.0, 100.0]), "fgsm": fgsm}), input_space=InputSpace(high=256.0))
    x = torch.tensor([[64.0, 0.0], [64.0, 0.01]])
    values = findings_of(plan, lambda x: Line()(x / 256), x, zeros(2)).values
    assert values["distortion/fgsm"] == 96
    assert values["distortion/free"] == 70
    assert values["distortion/worst"] == 70


@dataclass(frozen=True, kw_only=True, repr=False)
class Healing(Attack):
    """Puts everything where class 0 is, also what was wrong before."""

    def perturb(self, model, x, y):
        x_adv = x.clone()
        x_adv[:, 0] = 0.25
        return Perturbation(x_adv, torch.zeros_like(y))


def test_the_worst_case_is_never_better_than_an_attack():
    """Attacks that go through all steps may make samples right that were wrong."""
    x = line_inputs(4)
    x[2:, 0] = 0.75
    plan = make_plan({"healing": Healing(all_steps=True), "nothing": untouched})
    values = findings_of(plan, Line(), x, zeros(4)).values
    assert values["adv_acc/healing"] == 1
    assert values["adv_acc/nothing"] == values["adv_acc/worst"] == 0.5


def without_seconds(values):
    return {name: value for name, value in values.items() if not name.startswith("seconds/")}


def test_normalised_inputs(digits, digits_network):
    """The same network behind a normalisation gives the same rates and distances."""
    x, y = digits[0][1200:1230], digits[1][1200:1230]
    space = InputSpace(mean=0.3, std=0.25)
    attacks = {"bim": get_attack("bim", eps=0.1), "cw": CW(steps=10, lr=0.05)}

    def normalised(x):
        return digits_network(space.unnormalize(x))

    expected = findings_of(make_plan(attacks), digits_network, x, y).values
    values = findings_of(make_plan(attacks, input_space=space), normalised, space.normalize(x), y).values
    assert without_seconds(values) == pytest.approx(without_seconds(expected), rel=1e-3)


def test_signs_of_masking(digits, digits_network):
    x, y = digits[0][1200:1230], digits[1][1200:1230]
    plan = make_plan({"pgd": PGD(eps=0.1, steps=3)})
    findings = findings_of(plan, digits_network, x, y)
    assert (findings.values["masking"], findings.signs) == (0, [])
    findings = findings_of(plan, nn.Sequential(digits_network, nn.Softmax(dim=1)), x, y)
    assert findings.values["masking"] == 1
    assert "probabilities" in [sign.name for sign in findings.signs]


def test_signs_of_masking_from_outputs_that_are_random(digits, digits_network):
    x, y = digits[0][1200:1230], digits[1][1200:1230]
    plan = make_plan({"nothing": untouched})
    findings = findings_of(plan, lambda x: digits_network(x + 0.1 * torch.randn_like(x)), x, y)
    assert findings.values["masking"] == 1
    assert [sign.name for sign in findings.signs] == ["random_outputs"]
    assert not findings.attacks["nothing"]["tells_gradients"].any()


def test_zero_gradients_show_although_there_is_nothing_to_do_in_a_batch(digits, digits_network):
    def rounded(x):
        return digits_network((4 * x).round() / 4)

    x, y = digits[0][1200:1210], digits[1][1200:1210].clone()
    y[8:] = (y[8:] + 1) % 10  # wrong before the attack
    findings = findings_of(make_plan({"pgd": PGD(eps=0.1, steps=3)}), rounded, x, y, batch_size=8)
    assert findings.values["masking"] == 1
    assert [sign.name for sign in findings.signs] == ["zero_gradients"]
    assert "100.0% of the samples" in findings.signs[0].evidence
    assert findings.attacks["pgd"]["zero_gradients"].tolist() == [True] * 8 + [False] * 2


def test_attacks_that_are_left_out(digits, digits_network):
    x, y = digits[0][1200:1210], digits[1][1200:1210]
    plan = make_plan({"pgd": PGD(eps=0.1, steps=3), "fgsm": get_attack("fgsm", eps=0.1)})
    rows = {meter.name: rows_of(meter, digits_network, x, y) for meter in plan.attack_meters()}
    expected = conclude(plan, None, rows).values
    findings = conclude(plan, None, {"attack pgd": rows["attack pgd"]})
    left_out = {name for name in expected if "fgsm" in name or "worst" in name} | {"masking"}
    assert findings.values == {name: value for name, value in expected.items() if name not in left_out}
    assert (list(findings.attacks), list(findings.rates), findings.worst) == (["pgd"], ["pgd"], None)


def test_a_sign_of_masking_counts_although_attacks_are_left_out(digits, digits_network):
    x, y = digits[0][1200:1210], digits[1][1200:1210]
    plan = make_plan({"pgd": PGD(eps=0.1, steps=3), "fgsm": get_attack("fgsm", eps=0.1)})
    (meter,) = plan.attack_meters(["pgd"])
    rows = rows_of(meter, nn.Sequential(digits_network, nn.Softmax(dim=1)), x, y)
    assert conclude(plan, None, {meter.name: rows}).values["masking"] == 1


def test_nothing_is_said_without_rows():
    for attacks in ({}, {"pgd": PGD()}):
        plan = make_plan(attacks, fim_samples=8)
        empty = {meter.name: rows_of(meter, Line(), torch.zeros(0, 0), zeros(0)) for meter in plan.attack_meters()}
        for rows in ({}, empty):
            findings = conclude(plan, None, rows)
            assert (findings.values, findings.rates, findings.worst, findings.curve) == ({}, {}, None, None)


def test_all_parts_come_together(digits, digits_network):
    """Features, values of the sample and attacks, each with the seconds it took, in the order of the plan."""
    x, y = digits[0][1200:1210], digits[1][1200:1210]
    attacks = {"pgd": PGD(eps=0.1, steps=3)}
    plan = make_plan(attacks, fim_samples=8, clever_samples=1, clever_radius=0.1, budget=Budget("linf", 0.1))
    features = Features({"rdi": 0.5}, {"rdi": torch.tensor([1.0, 2.0])}, Rows(torch.arange(0), {}), 3.0)
    measured = [meter for meter in plan.meters() + plan.attack_meters() if meter.name != "clever"]
    rows = {meter.name: rows_of(meter, digits_network, x, y) for meter in measured}
    rows["clever"] = Rows(torch.arange(1), {"score": torch.tensor([0.05])})
    findings = conclude(plan, features, rows)
    assert (findings.values["rdi"], findings.values["seconds/features"]) == (0.5, 3.0)
    seconds = [name for name in findings.values if name.startswith("seconds/")]
    assert seconds == ["seconds/features", "seconds/fim", "seconds/clever", "seconds/pgd"]
    assert list(findings.rows) == ["fim", "clever"]
    assert list(findings.histograms) == ["distances/rdi", "lambda_log10", "boundary_distance"]
    share = (boundary_distance(digits_network, x, y) > 0.1).double().mean().item()
    assert findings.values["boundary_acc"] == findings.curve.share[8] == pytest.approx(share)


def test_meters_without_samples_have_no_values():
    plan = make_plan(fim_samples=4, clever_samples=2, budget=Budget("linf", 0.1))
    rows = {meter.name: rows_of(meter, Line(), torch.zeros(0, 2)) for meter in plan.meters()}
    findings = conclude(plan, None, rows)
    assert findings.values == {"seconds/fim": 0, "seconds/clever": 0}
    assert (findings.histograms, findings.curve) == ({}, None)


def test_class_accuracies_are_recalls():
    generator = torch.Generator().manual_seed(0)
    y, preds, adv_preds = torch.randint(0, 5, (3, 200), generator=generator)
    found = class_accuracies(Rows(torch.arange(200), {"y": y, "preds": preds, "adv_preds": adv_preds}))
    assert [accuracy.label for accuracy in found] == [0, 1, 2, 3, 4]
    assert [accuracy.samples for accuracy in found] == y.bincount().tolist()
    for name, labels in {"clean": preds, "robust": adv_preds}.items():
        assert [getattr(accuracy, name) for accuracy in found] == recall_score(y, labels, average=None).tolist()


ATTACKS = {"bim": get_attack("bim", eps=0.06), "cw": CW(steps=10, lr=0.05), "mine": untouched}


def conclude_from_share(rank, sizes, model, x, y):
    plan = make_plan(ATTACKS, minimum_norm_budget=Budget("linf", 0.06))
    x, y = x.split(sizes)[rank], y.split(sizes)[rank]
    findings = findings_of(plan, model, x if len(x) else torch.zeros(0, 0), y, first=sum(sizes[:rank]), batch_size=8)
    return without_seconds(findings.values), [sign.name for sign in findings.signs], findings.rates


@pytest.mark.parametrize(("sizes", "masked"), [([11, 29], False), ([40, 0], True), ([0, 40], False)])
def test_findings_of_two_processes_equal_those_of_one(two_processes, digits, digits_network, sizes, masked):
    x, y = digits[0][1200:1240], digits[1][1200:1240]
    model = nn.Sequential(digits_network, nn.Softmax(dim=1)) if masked else digits_network
    values, signs, expected = conclude_from_share(0, [40], model, x, y)
    assert values["masking"] == masked
    for result in two_processes(conclude_from_share, sizes, model, x, y):
        assert result[0] == pytest.approx(values, rel=1e-4)
        assert result[1] == signs
        for name, parts in expected.items():
            assert result[2][name] == pytest.approx(parts, rel=1e-4, nan_ok=True)
