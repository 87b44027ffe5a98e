import copy
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torchattacks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_robustness.attacks import CW, PGD, Attack, Budget, Cascade, MinimumNormCW, Square, get_attack, run
from lightning_robustness.attacks.attack import Perturbation
from lightning_robustness.measurement.attack_meter import AttackMeter
from lightning_robustness.measurement.attack_names import name_attacks
from lightning_robustness.utilities.input_space import InputSpace
from tests.measurement.subjects import samples, subject


def custom(model, x, y):
    return x


def attack_all(meter, model, x, y, attacks, **options):
    for name in attacks:
        meter.update(name, subject(model, **options), samples(x, y))
    return meter.compute()


def by_hand(model, attack, x, y, batch_size, space, seed):
    """What ``run`` does to each batch, one array for each thing that it tells."""
    positions = torch.arange(len(x)).split(batch_size)
    results = [run(model, attack, x[rows], y[rows], space, seed, positions=rows) for rows in positions]
    names = ("preds", "adv_preds", "success", "l2", "linf", "x_adv")
    return {name: torch.cat([getattr(result, name) for result in results]).numpy() for name in names}


def rates(y, preds, adv_preds, l2):
    """Success rate, accuracy and distortion, sample by sample."""
    flipped = [i for i in range(len(y)) if preds[i] == y[i] and adv_preds[i] != y[i]]
    num_correct = sum(preds[i] == y[i] for i in range(len(y)))
    distortion = median_of([l2[i] for i in flipped], num_correct)
    return len(flipped) / max(num_correct, 1), np.mean([adv_preds[i] == y[i] for i in range(len(y))]), distortion


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
def test_rates_are_those_of_run(digits, digits_network, dtype, batch_size):
    number = 6 if batch_size == 1 else 50
    model, space = copy.deepcopy(digits_network).to(dtype), InputSpace()
    x, y = digits[0][1200 : 1200 + number].to(dtype), digits[1][1200 : 1200 + number]
    attacks = {"pgd": PGD(eps=0.06, steps=3), "cw": CW(steps=10, lr=0.05), "square": Square(eps=0.06, num_queries=20)}
    meter = AttackMeter(attacks, space)
    values = attack_all(meter, model, x, y, attacks, seed=3, batch_size=batch_size)
    broken, distances = [], []
    for name, attack in attacks.items():
        result = by_hand(model, attack, x, y, batch_size, space, seed=3)
        check_rates(values, name, y.numpy(), result["preds"], result["adv_preds"], result["l2"])
        for part in ("preds", "adv_preds", "success", "l2", "linf"):
            assert getattr(meter.outcomes[name], part).numpy() == pytest.approx(result[part], rel=1e-6)
        counts = result["linf"] <= 0.06001 if name == "cw" else np.ones(number, dtype=bool)
        broken.append(result["success"] & counts)
        distances.append(np.where(broken[-1], result["l2"], np.inf))
    is_broken = np.any(broken, axis=0)
    adv_preds = np.where(is_broken, -1, result["preds"])
    check_rates(values, "worst", y.numpy(), result["preds"], adv_preds, np.min(distances, axis=0))
    assert values["samples_attacks"] == number
    assert values["masking"] == 0
    assert set(meter.seconds) == set(meter.examples) == set(attacks)


def test_an_attack_without_a_budget_breaks_more_than_the_worst_case(digits, digits_network):
    """The numbers that made it necessary to look at distances."""
    x, y = digits[0][1200:1250], digits[1][1200:1250]
    attacks = {"pgd": PGD(eps=0.03), "cw": MinimumNormCW(steps=30, lr=0.05)}
    values = attack_all(AttackMeter(attacks, InputSpace()), digits_network, x, y, attacks, batch_size=50)
    assert values["asr/cw"] > 0.9
    assert values["asr/pgd"] <= values["asr/worst"] < 0.5


def test_no_attack_with_a_budget_does_better_than_the_worst_case(digits, digits_network):
    x, y = digits[0][1200:1300], digits[1][1200:1300]
    members = PGD(eps=0.1, steps=3), PGD(eps=0.9, steps=3, norm="l2")
    attacks = {
        "weak": PGD(eps=0.02, steps=3),
        "strong": get_attack("strong_pgd", eps=0.1),
        "cascade": Cascade(attacks=members[:1]),
        "mixed": Cascade(attacks=members),
        "l2": PGD(eps=0.5, norm="l2", steps=3),
    }
    values = attack_all(AttackMeter(attacks, InputSpace()), digits_network, x, y, attacks, batch_size=50)
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


SHIFTS = st.lists(st.sampled_from([0.0, 0.125, 0.375, 0.5, 0.625]), min_size=12, max_size=12)


@settings(max_examples=25)
@given(st.lists(SHIFTS, min_size=1, max_size=4), st.lists(st.integers(0, 1), min_size=12, max_size=12))
def test_the_worst_case_is_the_union(shifts, labels):
    """Whichever attack breaks a sample; the closest one counts for the distortion."""
    attacks = {f"attack{number}": Planned(row) for number, row in enumerate(shifts)}
    x, y = line_inputs(12), torch.tensor(labels)
    values = attack_all(AttackMeter(attacks, InputSpace()), Line(), x, y, attacks, batch_size=5)
    closest = [min((row[i] for row in shifts if row[i] > 0.25), default=None) for i in range(12)]
    flipped = [closest[i] for i in range(12) if labels[i] == 0 and closest[i] is not None]
    assert values["asr/worst"] == pytest.approx(len(flipped) / max(labels.count(0), 1))
    assert values["adv_acc/worst"] == pytest.approx((labels.count(0) - len(flipped)) / 12)
    assert values.get("distortion/worst") == median_of(flipped, labels.count(0))
    for number, row in enumerate(shifts):
        broken = sum(row[i] > 0.25 for i in range(12) if labels[i] == 0)
        assert values[f"asr/attack{number}"] == pytest.approx(broken / max(labels.count(0), 1))


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
    x, y = line_inputs(3), torch.zeros(3, dtype=torch.long)
    values = attack_all(AttackMeter(attacks, InputSpace()), Line(), x, y, attacks, batch_size=3)
    assert values["asr/free"] == pytest.approx(2 / 3)
    assert values["asr/worst"] == pytest.approx(len(expected) / 3)
    assert values["adv_acc/worst"] == pytest.approx(1 - len(expected) / 3)
    distances = [math.hypot(shift, shift) for shift in expected]
    assert values.get("distortion/worst") == (pytest.approx(distances[1]) if len(expected) > 1 else None)


@pytest.mark.parametrize(
    ("budget", "num_coordinates", "size"),
    [
        (Budget("l2", 0.4), 2, 0.4),
        (Budget("l2", 0.4), 400, 0.4),
        (Budget("linf", 0.4), 2, 0.4),  # the square root of 2 is below 4
        (Budget("linf", 0.1), 256, 0.4),
        (None, 2, None),
    ],
)
def test_minimum_norm_attacks_count_within_an_l2_budget(budget, num_coordinates, size):
    """Beyond it, a sample counts as robust; the distortion is that of what was found."""
    attacks = {"free": Planned([0.375, 0.5, 0.625, 0.0], norm="l2")}
    x, y = torch.zeros(4, num_coordinates), torch.zeros(4, dtype=torch.long)
    x[:, :2] = line_inputs(4)
    meter = AttackMeter(attacks, InputSpace(), budget)
    values = attack_all(meter, Line(), x, y, attacks, batch_size=3)
    number = 3 if size is None else 1
    assert values["asr/free"] == values["asr/worst"] == pytest.approx(number / 4)
    assert values["adv_acc/free"] == values["adv_acc/worst"] == pytest.approx(1 - number / 4)
    assert values["distortion/free"] == 0.5
    assert values.get("l2_budget") == (size if size is None else pytest.approx(size))
    assert meter.outcomes["free"].success.tolist() == [True, size is None, size is None, False]
    assert meter.outcomes["free"].adv_preds.tolist() == [1, int(size is None), int(size is None), 0]
    assert meter.worst.adv_preds.tolist() == meter.outcomes["free"].adv_preds.tolist()
    assert len(meter.examples["free"].y) == number


def test_the_worst_case_counts_minimum_norm_attacks_within_the_budget_of_others():
    """The ball of the l2 budget and that of the others overlap: each value counts within its own."""
    attacks = {"free": Planned([0.3, 0.375, 0.5], norm="l2"), "bounded": Planned([0.0, 0.0, 0.0], 0.4, "linf")}
    x, y = line_inputs(3), torch.zeros(3, dtype=torch.long)
    meter = AttackMeter(attacks, InputSpace(), Budget("l2", 0.31))
    values = attack_all(meter, Line(), x, y, attacks, batch_size=3)
    assert values["asr/free"] == pytest.approx(1 / 3)
    assert values["asr/worst"] == pytest.approx(2 / 3)
    assert values["distortion/free"] == values["distortion/worst"] == 0.375
    assert values["masking"] == 0


@pytest.mark.parametrize("name", ["torchattacks:CW", "torchattacks:DeepFool", "ddn", "cw"])
def test_which_attacks_minimise_the_l2_norm(digits, digits_network, name):
    x, y = digits[0][1200:1230], digits[1][1200:1230]
    attacks = name_attacks([name], eps=0.1)
    meter = AttackMeter(attacks, InputSpace(), Budget("linf", 0.1))
    values = attack_all(meter, digits_network, x, y, attacks, batch_size=30)
    ((key, attack),) = attacks.items()
    result = by_hand(digits_network, attack, x, y, 30, InputSpace(), 0)
    counted = result["success"] & (result["l2"] <= 0.2)  # 8 * 0.1 / 4
    assert values["l2_budget"] == pytest.approx(0.2)
    assert values[f"asr/{key}"] == pytest.approx(counted.sum() / (result["preds"] == y.numpy()).sum())


def test_attacks_with_a_budget_count_beside_smaller_ones():
    attacks = {"small": Planned([0.0, 0.0], 0.1, "linf"), "large": Planned([0.375, 0.0], 0.5, "linf")}
    attacks["only eps"] = Planned([0.0, 0.625], 0.625)
    x, y = line_inputs(2), torch.zeros(2, dtype=torch.long)
    values = attack_all(AttackMeter(attacks, InputSpace()), Line(), x, y, attacks, batch_size=2)
    assert values["asr/worst"] == 1


def test_budgets_are_in_units_of_the_input_space():
    """An instance of torchattacks has its own in units of [0, 1]."""
    fgsm = torchattacks.FGSM(nn.Linear(1, 1), eps=0.375)
    attacks = name_attacks({"free": Planned([70.0, 100.0]), "fgsm": fgsm})
    x, y = torch.tensor([[64.0, 0.0], [64.0, 0.01]]), torch.zeros(2, dtype=torch.long)
    meter = AttackMeter(attacks, InputSpace(high=256.0))
    values = attack_all(meter, lambda x: Line()(x / 256), x, y, attacks)
    assert values["distortion/fgsm"] == 96
    assert values["distortion/free"] == 70
    assert values["distortion/worst"] == 70


def test_foreign_attacks_without_a_budget(digits, digits_network):
    x, y = digits[0][1200:1210], digits[1][1200:1210]
    attacks = name_attacks(["pgd", "torchattacks:CW"], eps=0.05)
    values = attack_all(AttackMeter(attacks, InputSpace()), digits_network, x, y, attacks, batch_size=10)
    results = [by_hand(digits_network, attack, x, y, 10, InputSpace(), 0) for attack in attacks.values()]
    broken = results[0]["success"] | (results[1]["success"] & (results[1]["linf"] <= 0.050005))
    assert values["asr/worst"] == pytest.approx(broken.sum() / (results[0]["preds"] == y.numpy()).sum())


@dataclass(frozen=True, kw_only=True, repr=False)
class Healing(Attack):
    """Puts everything where class 0 is, also what was wrong before."""

    def perturb(self, model, x, y, active):
        x_adv = x.clone()
        x_adv[active, 0] = 0.25
        return Perturbation(x_adv, torch.zeros_like(y))


def test_the_worst_case_is_never_better_than_an_attack():
    """Attacks that go through all steps may make samples right that were wrong."""
    attacks = {"healing": Healing(all_steps=True), "nothing": custom}
    x, y = line_inputs(4), torch.zeros(4, dtype=torch.long)
    x[2:, 0] = 0.75
    values = attack_all(AttackMeter(attacks, InputSpace()), Line(), x, y, attacks, batch_size=4)
    assert values["adv_acc/healing"] == 1
    assert values["adv_acc/nothing"] == values["adv_acc/worst"] == 0.5


def test_normalised_inputs(digits, digits_network):
    """The same network behind a normalisation gives the same rates and distances, and examples in its own units."""
    x, y = digits[0][1200:1230], digits[1][1200:1230]
    space = InputSpace(mean=0.3, std=0.25)
    attacks = {"bim": get_attack("bim", eps=0.1), "cw": CW(steps=10, lr=0.05)}
    plain, normalised = (AttackMeter(attacks, s) for s in (InputSpace(), space))
    expected = attack_all(plain, digits_network, x, y, attacks)
    values = attack_all(normalised, lambda x: digits_network(space.unnormalize(x)), space.normalize(x), y, attacks)
    assert values == pytest.approx(expected, rel=1e-3)
    for name in attacks:
        torch.testing.assert_close(normalised.examples[name].x, space.normalize(plain.examples[name].x))
        torch.testing.assert_close(
            space.unnormalize(normalised.examples[name].x_adv), plain.examples[name].x_adv, rtol=0, atol=1e-3
        )


@pytest.mark.parametrize("num_examples", [0, 3, 8, 1000, None])
def test_examples_are_successes(digits, digits_network, num_examples):
    x, y = digits[0][1200:1240], digits[1][1200:1240]
    attack, space = PGD(eps=0.08, steps=3), InputSpace(mean=0.3, std=0.25)

    def model(x):
        return digits_network(space.unnormalize(x))

    meter = AttackMeter({"pgd": attack}, space, num_examples=num_examples)
    attack_all(meter, model, space.normalize(x), y, ["pgd"], seed=1, batch_size=16)
    result = by_hand(model, attack, space.normalize(x), y, 16, space, seed=1)
    rows = np.arange(40) if num_examples is None else np.flatnonzero(result["success"])[:num_examples]
    assert num_examples is None or num_examples > 100 or len(rows) == num_examples
    examples = meter.examples["pgd"]
    assert torch.equal(examples.x, space.normalize(x)[rows])
    assert examples.x_adv.numpy() == pytest.approx(result["x_adv"][rows])
    assert torch.equal(examples.y, y[rows])
    assert examples.preds.tolist() == result["preds"][rows].tolist()
    assert examples.adv_preds.tolist() == result["adv_preds"][rows].tolist()
    if num_examples:
        assert (examples.preds == examples.y).all()
        assert (examples.adv_preds != examples.y).all()
        assert torch.equal(model(examples.x_adv).argmax(dim=1), examples.adv_preds)
        distance = (space.unnormalize(examples.x_adv) - space.unnormalize(examples.x)).abs().amax()
        assert distance.item() == pytest.approx(0.08, abs=1e-5)


def test_signs_of_masking(digits, digits_network):
    x, y = digits[0][1200:1230], digits[1][1200:1230]
    attacks = {"pgd": PGD(eps=0.1, steps=3)}
    meter = AttackMeter(attacks, InputSpace())
    assert attack_all(meter, digits_network, x, y, attacks)["masking"] == 0
    assert meter.signs == []
    softmax = nn.Sequential(digits_network, nn.Softmax(dim=1))
    assert attack_all(meter, softmax, x, y, attacks)["masking"] == 1
    assert "probabilities" in [sign.name for sign in meter.signs]
    assert attack_all(meter, digits_network, x, y, attacks)["masking"] == 0


def test_signs_of_masking_from_outputs_that_are_random(digits, digits_network):
    x, y = digits[0][1200:1230], digits[1][1200:1230]
    meter = AttackMeter({"nothing": custom}, InputSpace())
    values = attack_all(meter, lambda x: digits_network(x + 0.1 * torch.randn_like(x)), x, y, ["nothing"])
    assert values["masking"] == 1
    assert [sign.name for sign in meter.signs] == ["random_outputs"]
    assert not meter.outcomes["nothing"].tells_gradients.any()


def test_zero_gradients_show_although_there_is_nothing_to_do_in_a_batch(digits, digits_network):
    def rounded(x):
        return digits_network((4 * x).round() / 4)

    x, y = digits[0][1200:1210], digits[1][1200:1210].clone()
    y[8:] = (y[8:] + 1) % 10  # wrong before the attack
    meter = AttackMeter({"pgd": PGD(eps=0.1, steps=3)}, InputSpace())
    assert attack_all(meter, rounded, x, y, ["pgd"], batch_size=8)["masking"] == 1
    assert [sign.name for sign in meter.signs] == ["zero_gradients"]
    assert "100.0% of the samples" in meter.signs[0].evidence
    assert meter.outcomes["pgd"].zero_gradients.tolist() == [True] * 8 + [False] * 2


def test_attacks_that_are_left_out(digits, digits_network):
    x, y = digits[0][1200:1210], digits[1][1200:1210]
    attacks = {"pgd": PGD(eps=0.1, steps=3), "fgsm": get_attack("fgsm", eps=0.1)}
    meter = AttackMeter(attacks, InputSpace())
    for name in attacks:
        meter.update(name, subject(digits_network), samples(x, y))
    expected = meter.compute()
    meter.drop("fgsm")
    values = meter.compute()
    left_out = {name for name in expected if "fgsm" in name or "worst" in name} | {"masking"}
    assert values == {name: value for name, value in expected.items() if name not in left_out}
    assert set(meter.outcomes) == set(meter.examples) == set(meter.seconds) == {"pgd"}
    meter.drop("pgd")
    meter.drop("pgd")
    assert meter.compute() == {}


def test_attacks_on_nothing():
    meter = AttackMeter({"pgd": PGD()}, InputSpace())
    values = attack_all(meter, Line(), torch.zeros(0, 0), torch.zeros(0, dtype=torch.long), ["pgd"])
    assert values == dict.fromkeys(["adv_acc/pgd", "adv_acc/worst", "masking", "samples_attacks"], 0)
    assert meter.examples == {}


def test_no_attack():
    assert AttackMeter({}, InputSpace()).compute() == {}


ATTACKS = {"bim": get_attack("bim", eps=0.06), "cw": CW(steps=10, lr=0.05), "mine": custom}


def measure_attacks_of_share(rank, sizes, model, x, y):
    meter = AttackMeter(ATTACKS, InputSpace(), Budget("linf", 0.06))
    x, y = x.split(sizes)[rank], y.split(sizes)[rank]
    values = attack_all(meter, model, x if len(x) else torch.zeros(0, 0), y, ATTACKS, batch_size=8)
    results = {name: (result.adv_preds, result.l2, result.zero_gradients) for name, result in meter.outcomes.items()}
    return values, results, [sign.name for sign in meter.signs], meter.rates


@pytest.mark.parametrize("sizes", [[11, 29], [40, 0], [0, 40]])
@pytest.mark.parametrize("masked", [False, True])
def test_attacks_of_two_processes_equal_those_of_one(two_processes, digits, digits_network, sizes, masked):
    x, y = digits[0][1200:1240], digits[1][1200:1240]
    model = nn.Sequential(digits_network, nn.Softmax(dim=1)) if masked else digits_network
    expected = measure_attacks_of_share(0, [40], model, x, y)
    assert expected[0]["masking"] == masked
    for result in two_processes(measure_attacks_of_share, sizes, model, x, y):
        assert result[0] == pytest.approx(expected[0], rel=1e-4)
        torch.testing.assert_close(result[1], expected[1], rtol=1e-3, atol=1e-5)
        assert result[2] == expected[2]
        for name, parts in expected[3].items():
            assert result[3][name] == pytest.approx(parts, rel=1e-4, nan_ok=True)
