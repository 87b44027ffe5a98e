import pytest
import torchattacks
from torch import nn

from lightning_robustness._measurement.plan import (
    DEFAULT_ATTACKS,
    Plan,
    common_budget,
    name_attacks,
    name_final_attack,
)
from lightning_robustness.attacks import (
    CW,
    PGD,
    Budget,
    MinimumNormCW,
    Square,
    TorchattacksAdapter,
    budget_of,
    get_attack,
)
from lightning_robustness.input_space import InputSpace
from tests._measurement.subjects import make_plan, untouched


class Mine:
    def __call__(self, model, x, y):
        return x


def test_attacks_by_name():
    attacks = name_attacks(["pgd", "fgsm", "cw", "square", "pgd_l2", "torchattacks:DeepFool"], eps=0.1)
    assert attacks == {
        "pgd": get_attack("pgd", eps=0.1, strength="fast"),
        "fgsm": get_attack("fgsm", eps=0.1),
        "cw": MinimumNormCW(initial_steps=16, steps=2),
        "square": Square(eps=0.1, num_queries=100),
        "pgd_l2": get_attack("pgd_l2", eps=1.0, strength="fast"),
        "torchattacks_deepfool": TorchattacksAdapter(attack="DeepFool"),
    }
    defaults = {"pgd": get_attack("pgd", strength="fast"), "square": Square(num_queries=100)}
    assert name_attacks(["pgd", "square"]) == defaults
    assert name_attacks(DEFAULT_ATTACKS) == {**defaults, "cw": MinimumNormCW(initial_steps=16, steps=2)}
    assert name_attacks([]) == {}


def test_attacks_as_objects():
    given = [PGD(steps=100), Square(), untouched, Mine(), torchattacks.PGDL2(nn.Linear(1, 1))]
    attacks = name_attacks(given, eps=0.1)
    assert list(attacks) == ["pgd", "square", "untouched", "mine", "torchattacks_pgdl2"]
    assert list(attacks.values())[:4] == given[:4]
    assert attacks["torchattacks_pgdl2"].attack is given[4]


def test_attacks_in_a_mapping():
    attacks = name_attacks(
        {"weak": PGD(eps=0.1, steps=5), "strong": PGD(eps=0.5), "mine": untouched, "Square": "square"}, eps=0.1
    )
    assert attacks == {
        "weak": PGD(eps=0.1, steps=5),
        "strong": PGD(eps=0.5),
        "mine": untouched,
        "Square": attacks["Square"],
    }
    assert attacks["Square"] == Square(eps=0.1, num_queries=100)


def test_attacks_of_a_sweep():
    attacks = name_attacks(["pgd", "pgd_l2", "torchattacks:PGDL2"], eps=0.1, strength="paper", is_sweep=True)
    others = name_attacks(["cw", "square"], eps=0.1, strength="paper", is_sweep=True)
    assert others == {"cw": CW(), "square": Square(eps=0.1, as_published=True)}
    expected = PGD(eps=0.1), PGD(eps=0.1, norm="l2"), get_attack("torchattacks:PGDL2", eps=0.1)
    assert tuple(attacks.values()) == expected


def test_a_budget_in_another_norm_is_not_inherited():
    assert name_attacks(["torchattacks:PGDL2"], eps=0.1)["torchattacks_pgdl2"] == get_attack("torchattacks:PGDL2")
    assert name_attacks([PGD(norm="l2", eps=0.5)], eps=0.1)["pgd"].eps == 0.5


def test_attacks_in_l2():
    names = ["pgd", "fgsm", "square", "cw", "pgd_l2", "cascade", "torchattacks:Square"]
    attacks = name_attacks(names, eps=0.5, norm="l2")
    l2 = {name: budget_of(attack) for name, attack in attacks.items() if name != "cw"}
    assert l2 == dict.fromkeys([*l2], Budget("l2", 0.5))
    assert attacks["cw"] == MinimumNormCW(initial_steps=16, steps=2)
    plan = Plan.of(["pgd", "cw"], 0.5, InputSpace(), 16, norm="l2", **SETTINGS)
    assert plan.budget == plan.minimum_norm_budget == Budget("l2", 0.5)
    plan = Plan.of(["cw"], 0.5, InputSpace(), 16, norm="l2", **SETTINGS)
    assert plan.budget == plan.minimum_norm_budget == Budget("l2", 0.5)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"norm": "l2", "eps": None}, "`eps` with norm='l2' but got None"),
        ({"norm": "l2", "eps": 8 / 255}, "`eps` with norm='l2' but got 8/255.* 0.5"),
        ({"norm": "l2", "attacks": ["siren"]}, "'siren' to be among .* got norm"),
        ({"norm": "l2", "attacks": ["torchattacks:PGD"]}, "torchattacks' PGD.*PGDL2"),
        ({"attacks": [PGD(eps=2.0)]}, "eps.*input_space"),
    ],
)
def test_budgets_that_cannot_be_meant(options, match):
    with pytest.raises(ValueError, match=match):
        Plan.of(
            **{"attacks": ["pgd"], "eps": 0.5, "input_space": InputSpace(), "attack_samples": 4} | options, **SETTINGS
        )


def test_the_papers_count_what_cw_finds_regardless_of_its_size():
    plan = Plan.of(["pgd", "cw"], 0.3, InputSpace(), 16, "paper", **SETTINGS)
    assert (plan.attacks["cw"], plan.minimum_norm_budget) == (CW(), None)


@pytest.mark.parametrize(
    ("attack", "strength", "is_said"),
    [
        (get_attack("cw", preset="mnist"), "fast", True),
        (get_attack("cw", preset="mnist"), "paper", False),
        (MinimumNormCW(), "strong", False),
        ("cw", "strong", False),
    ],
)
def test_the_published_attack_of_carlini_and_wagner_counts_within_a_budget_and_says_so(
    attack, strength, is_said, recwarn
):
    plan = Plan.of({"mine": attack}, 0.1, InputSpace(), 16, strength, **SETTINGS)
    assert (plan.minimum_norm_budget is None) == (strength == "paper")
    messages = [str(warning.message) for warning in recwarn]
    assert ["mine" in message and "strength='paper'" in message for message in messages] == [True] * is_said


@pytest.mark.parametrize(("attack", "is_slow"), [("torchattacks:Square", True), ("torchattacks:PGD", False)])
def test_attacks_that_take_minutes_are_announced(attack, is_slow, recwarn):
    Plan.of([attack], 0.1, InputSpace(), 256, **SETTINGS)
    messages = [str(warning.message) for warning in recwarn]
    expected = "torchattacks_square takes up to 5,000 passes of each of 256 samples"
    assert [expected in message and "attack_samples" in message for message in messages] == [True] * is_slow
    Plan.of([get_attack("torchattacks:Square", n_queries=100)], 0.1, InputSpace(), 256, **SETTINGS)
    assert len(recwarn) == is_slow


def test_the_worst_case_has_its_name_for_itself():
    assert name_attacks(["cascade"], eps=0.1) == {"cascade": get_attack("cascade", eps=0.1)}
    with pytest.raises(ValueError, match="name of an attack but got 'worst'"):
        name_attacks({"mine": "worst"})
    for name in ("worst", "final", "worst of all", "clean"):
        match = rf"'pgd' other than '{name}': 'worst', 'final', .* are reserved.* Give 'pgd' another name"
        with pytest.raises(ValueError, match=match):
            name_attacks({name: "pgd"})


def test_final_attack():
    assert name_final_attack("cascade", eps=0.1) == {"final": get_attack("cascade", eps=0.1)}
    assert name_final_attack("square") == {"final": Square(num_queries=1000)}
    assert name_final_attack(untouched, eps=0.1) == {"final": untouched}


def test_attacks_are_checked():
    for name in ("", " ", 3):
        with pytest.raises(ValueError, match=rf"names of attacks in `attacks` that are not empty but got {name!r}"):
            name_attacks({name: "pgd"})
    with pytest.raises(ValueError, match=r"but got <class .* Pass `\[PGD\(\.\.\.\)\]`"):
        name_attacks(PGD)
    with pytest.raises(ValueError, match=r"but got 3. Pass a list of names, such as \['pgd'\], or \[\] for none"):
        name_attacks(3)
    with pytest.raises(TypeError, match=r"`attacks`.* int\. Pass `PGD"):
        name_attacks([3])


def test_meters_in_their_order():
    plan = make_plan({"pgd": PGD(), "cw": CW()}, fim_samples=8, clever_samples=2, attack_samples=5)
    assert [(meter.name, meter.size) for meter in plan.meters()] == [("fim", 8), ("clever", 2)]
    assert plan.parts == ["features", "fim", "clever"]
    assert [(meter.name, meter.size) for meter in plan.attack_meters()] == [("attack pgd", 5), ("attack cw", 5)]
    assert [meter.attack for meter in plan.attack_meters(["cw"])] == [CW()]
    assert make_plan().parts == ["features"]


@pytest.mark.parametrize(
    ("attacks", "eps", "expected"),
    [
        ([PGD(eps=0.1), PGD(eps=0.2), PGD(eps=2.0, norm="l2"), CW()], 0.5, Budget("linf", 0.2)),
        ([PGD(eps=2.0, norm="l2"), CW()], 0.5, Budget("l2", 2.0)),
        ([CW()], 0.5, Budget("linf", 0.5)),
        ([lambda model, x, y: x], 0.5, Budget("linf", 0.5)),
        ([], None, None),
    ],
)
def test_budget_of_values_without_attacks(attacks, eps, expected):
    assert common_budget(attacks, eps) == expected
    budget = "" if expected is None else f", eps {expected.eps:.4g}"
    norm = "linf" if expected is None else expected.norm
    (fisher,) = make_plan(fim_samples=256, budget=expected).meters()
    assert fisher.describe() == f"at most 256 samples, method 'auto', boundary in {norm}{budget}"


SETTINGS = {
    **{"fim_samples": 4, "fim_method": "auto", "clever_samples": 0, "clever_radius": 2.0},
    **{"storage": "exact", "batch_size": 8, "seed": 0},
}


def test_a_plan_has_the_budgets_of_its_attacks():
    attacks = {"pgd": PGD(eps=0.1), "l2": PGD(eps=0.5, norm="l2"), "cw": "cw"}
    plan = Plan.of(attacks, 0.3, InputSpace(), 16, **SETTINGS)
    assert plan.attacks == {**attacks, "cw": MinimumNormCW(initial_steps=16, steps=2)}
    assert (plan.budget, plan.minimum_norm_budget) == (Budget("linf", 0.1), Budget("l2", 0.5))
    assert [meter.budget for meter in plan.attack_meters()] == [Budget("l2", 0.5)] * 3
    # Without attacks, that of a sweep; without any samples, no attack
    plan = Plan.of(["cw"], 0.3, InputSpace(), 0, boundary_eps=0.2, **SETTINGS)
    assert (plan.attacks, plan.budget, plan.minimum_norm_budget) == ({}, Budget("linf", 0.2), Budget("linf", 0.3))


def test_everything_that_values_depend_on_is_described():
    plan = make_plan(
        {"mine": Square(eps=0.1)},
        input_space=InputSpace(mean=0.5),
        attack_samples=32,
        fim_samples=64,
        fim_method="lanczos",
        budget=Budget("linf", 0.1),
        seed=3,
    )
    assert plan.describe() == {
        "attacks": "mine: Square(eps=0.1, num_queries=5000, norm='linf', p=0.8, loss='margin', as_published=False)",
        "attacked": "at most 32 samples",
        "Fisher information": "at most 64 samples, method 'lanczos', boundary in linf, eps 0.1",
        "CLEVER": "none",
        "RDI and ROBY": "all samples, storage 'exact'",
        "input space": "InputSpace(low=0.0, high=1.0, mean=0.5, std=None)",
        "seed": "3",
    }
    assert make_plan().describe()["attacked"] == make_plan().describe()["attacks"] == "none"
    assert "0x" not in make_plan({"own": lambda model, x, y: x}).describe()["attacks"]
