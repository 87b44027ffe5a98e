import pickle
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from lightning_robustness.attacks import (
    CW,
    DDN,
    PGD,
    Cascade,
    FisherStep,
    MinimumNormCW,
    SirenAttack,
    Square,
    TorchattacksAdapter,
    budget_of,
    get_attack,
    run_attack,
)
from lightning_robustness.attacks.registry import ATTACK_NAMES
from tests.attacks.linear import closest_boundary, random_linear

# Budget, step size and steps of gradient attacks, steps and weight of C&W, queries of Square
PRESETS = {
    "mnist": (0.3, 0.01, 40, 50, 1.0, 5000),
    "cifar10": (0.1, 0.0025, 10, 10, 0.5, 200),
    "cifar100": (0.01, 0.001, 10, 10, 0.1, 200),
    "fisher": (8 / 255, 2 / 255, 20, 20, 1.0, 5000),
}
KINDS = (CW, DDN, PGD, MinimumNormCW, Cascade, FisherStep, SirenAttack, Square, TorchattacksAdapter)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset):
    eps, alpha, steps, cw_steps, c, num_queries = PRESETS[preset]
    pgd = PGD(eps=eps, alpha=alpha, steps=steps)
    expected = {
        "pgd": pgd,
        "rfgsm": replace(pgd, start="sign"),
        "bim": replace(pgd, start="clean"),
        "mifgsm": replace(pgd, start="clean", momentum=1.0),
        "fgsm": PGD(eps=eps, steps=1, start="clean"),
        "pgd_l2": PGD(eps=1.0, steps=steps, norm="l2"),
        "cw": CW(steps=cw_steps, lr=0.01, c=c),
        "square": Square(eps=eps, num_queries=num_queries, as_published=True),
    }
    assert {name: get_attack(name, preset=preset) for name in expected} == expected


@pytest.mark.parametrize(
    ("preset", "same"), [("fashion-mnist", "mnist"), ("tiny-imagenet", "cifar100"), ("imagenet", "fisher")]
)
def test_presets_of_several_data_sets(preset, same):
    for name in ("fgsm", "rfgsm", "bim", "pgd", "pgd_l2", "mifgsm", "cw", "square", "cascade", "ensemble"):
        assert get_attack(name, preset=preset) == get_attack(name, preset=same)


def test_preset_of_speech():
    expected = SirenAttack(eps=0.5, steps=50, alpha=0.05, gradient_steps=50)
    assert get_attack("siren", preset="speech") == expected


def test_eps_and_options_override_the_preset():
    assert get_attack("pgd", eps=0.1, preset="mnist") == PGD(eps=0.1, alpha=0.01, steps=40)
    assert get_attack("pgd", eps=0.1, preset="mnist", steps=5, loss="margin") == PGD(
        eps=0.1, alpha=0.01, steps=5, loss="margin"
    )
    assert get_attack("cw", eps=0.1, preset="mnist") == CW(steps=50, lr=0.01, c=1.0)


@pytest.mark.parametrize("name", ["ddn", "fisher", "autoattack"])
def test_presets_are_of_attacks_in_the_papers(name):
    with pytest.raises(ValueError, match=f"no preset for '{name}'.*Leave it out"):
        get_attack(name, preset="mnist")


FAST = {"steps": 8, "loss": ("cross_entropy", "margin"), "schedule": "shrinking"}
STRONG = {"steps": 20, "loss": ("cross_entropy", "margin", *["rivals"] * 9), "schedule": "adaptive"}


@pytest.mark.parametrize(
    ("name", "fast", "strong", "paper"),
    [
        ("pgd", PGD(eps=0.1, **FAST), PGD(eps=0.1, **STRONG), PGD(eps=0.1)),
        ("pgd_l2", *(PGD(eps=0.1, norm="l2", **options) for options in (FAST, STRONG, {}))),
        ("cw", MinimumNormCW(initial_steps=16, steps=2), MinimumNormCW(initial_steps=50, steps=50), CW()),
        ("square", *(Square(eps=0.1, num_queries=n, as_published=n == 5000) for n in (100, 1000, 5000))),
        ("bim", *[PGD(eps=0.1, start="clean")] * 3),
    ],
)
def test_strengths(name, fast, strong, paper):
    assert get_attack(name, eps=0.1, strength="fast") == fast
    assert get_attack(name, eps=0.1, strength="strong") == strong
    assert get_attack(name, eps=0.1, strength="paper") == get_attack(name, eps=0.1) == paper


def test_the_cascade():
    strong = get_attack("pgd", eps=0.2, strength="fast")
    rivals = PGD(eps=0.2, steps=20, loss="rivals", restarts=9, schedule="adaptive")
    assert get_attack("cascade", eps=0.2).attacks == (strong, rivals, Square(eps=0.2, num_queries=1000))
    assert get_attack("cascade", preset="mnist") == get_attack("cascade", eps=0.3)
    assert get_attack("cascade") == get_attack("cascade", eps=8 / 255)


def test_the_ensemble_is_like_autoattack():
    settings = {"eps": 0.5, "norm": "l2"}
    first = PGD(**settings, steps=100, schedule="adaptive")
    second = PGD(**settings, steps=40, schedule="adaptive", loss="rivals", restarts=9)
    assert get_attack("ensemble", **settings).attacks == (first, second, Square(**settings, num_queries=4000))


@pytest.mark.parametrize("name", ["cascade", "ensemble"])
def test_options_of_cascades_are_those_of_their_members(name):
    cascade = get_attack(name, norm="l2", targeted=True, all_steps=True)
    assert (cascade.targeted, cascade.all_steps) == (True, True)
    for attack in cascade.attacks:
        assert (attack.eps, attack.norm, attack.targeted, attack.all_steps) == (1.0, "l2", True, True)
    assert budget_of(cascade) == ("l2", 1.0)


@pytest.mark.parametrize("name", ["cascade", "ensemble"])
def test_cascades_take_the_number_of_classes_from_the_model(name):
    """Two classes have one rival, and a linear model a closed form."""
    model = random_linear(seed=3, num_classes=2)
    x = torch.rand(64, 6, generator=torch.Generator().manual_seed(0)) / 2 + 0.25
    y = model(x).argmax(1)
    distance = closest_boundary(model, x, y, "linf")
    cascade = get_attack(name, eps=0.1)
    result = run_attack(model, Cascade(attacks=(*cascade.attacks[:2], Square(eps=0.1, num_queries=10))), x, y)
    certain = (distance - 0.1).abs() > 1e-4
    assert torch.equal(result.success[certain], (distance < 0.1)[certain])
    steps = cascade.attacks[0].num_restarts * cascade.attacks[0].steps + cascade.attacks[1].steps
    assert steps < result.queries[result.eligible & ~result.success].max() < steps + 20


@pytest.mark.parametrize(
    "name", [*(name for name in ATTACK_NAMES if name != "autoattack"), "torchattacks:PGD", "torchattacks:DeepFool"]
)
def test_attacks_are_small_frozen_picklable_and_readable(name):
    attack = get_attack(name)
    assert pickle.loads(pickle.dumps(attack)) == attack
    assert hash(pickle.loads(pickle.dumps(attack))) == hash(attack)
    assert eval(repr(attack), {kind.__name__: kind for kind in KINDS}) == attack
    with pytest.raises(FrozenInstanceError):
        attack.targeted = True


def test_what_differs_from_the_default_is_in_the_repr():
    assert repr(PGD(eps=1, targeted=True)).endswith("schedule='constant', targeted=True)")


def test_callables_come_back_as_they_are():
    def attack(model, x, y):
        return x

    assert get_attack(attack) is attack


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"attack": "pdg"}, "'pdg'. Known: fgsm, .*autoattack, .*torchattacks:"),
        ({"attack": "siren", "preset": "mnist"}, "`preset`.* speech .*'mnist'"),
        ({"attack": "pgd", "step": 3}, "steps.* got step"),
        ({"attack": "cascade", "steps": 3}, "norm, .* got steps"),
        ({"attack": "worst"}, "'worst'. Known: fgsm, .*cascade"),
        ({"attack": "pgd", "strength": "weak"}, "`strength` .*fast.* 'weak'"),
        ({"attack": "pgd", "strength": "fast", "preset": "mnist"}, "strength='paper' with `preset`.*Leave one"),
        ({"attack": "cascade", "preset": "mnist", "norm": "l2"}, "`eps` with norm='l2'"),
        ({"attack": "pgd", "preset": "mnist", "norm": "l2"}, "`eps` with norm='l2'"),
        ({"attack": "torchattacks:PGD", "preset": "mnist"}, "no preset for 'torchattacks:PGD'"),
    ],
)
def test_combinations_are_checked(arguments, match):
    with pytest.raises(ValueError, match=match):
        get_attack(**arguments)
