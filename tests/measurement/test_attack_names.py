import pytest
import torchattacks
from torch import nn

from lightning_robustness.attacks import CW, PGD, MinimumNormCW, Square, TorchattacksAdapter, get_attack
from lightning_robustness.measurement.attack_names import DEFAULT_ATTACKS, name_attacks, name_final_attack


def custom(model, x, y):
    return x


class Mine:
    def __call__(self, model, x, y):
        return x


def test_attacks_by_name():
    attacks = name_attacks(["pgd", "fgsm", "cw", "square", "pgd_l2", "torchattacks:DeepFool"], eps=0.1)
    assert attacks == {
        "pgd": get_attack("strong_pgd", eps=0.1),
        "fgsm": get_attack("fgsm", eps=0.1),
        "cw": MinimumNormCW(initial_steps=16, steps=2),
        "square": Square(eps=0.1, num_queries=100),
        "pgd_l2": PGD(eps=1.0, norm="l2"),
        "deepfool": TorchattacksAdapter(attack="DeepFool"),
    }
    defaults = {"pgd": get_attack("strong_pgd"), "square": Square(num_queries=100)}
    assert name_attacks(["pgd", "square"]) == defaults
    assert name_attacks(DEFAULT_ATTACKS) == {**defaults, "cw": MinimumNormCW(initial_steps=16, steps=2)}
    assert name_attacks([]) == {}


def test_attacks_as_objects():
    given = [PGD(steps=100), Square(), custom, Mine(), torchattacks.PGDL2(nn.Linear(1, 1))]
    attacks = name_attacks(given, eps=0.1)
    assert list(attacks) == ["pgd", "square", "custom", "mine", "pgdl2"]
    assert list(attacks.values())[:4] == given[:4]
    assert attacks["pgdl2"].attack is given[4]


def test_attacks_in_a_mapping():
    attacks = name_attacks(
        {"weak": PGD(eps=0.1, steps=5), "strong": PGD(eps=0.5), "mine": custom, "Square": "square"}, eps=0.1
    )
    assert attacks == {
        "weak": PGD(eps=0.1, steps=5),
        "strong": PGD(eps=0.5),
        "mine": custom,
        "Square": attacks["Square"],
    }
    assert attacks["Square"] == Square(eps=0.1, num_queries=100)


def test_attacks_as_published():
    attacks = name_attacks(["pgd", "pgd_l2", "torchattacks:PGDL2"], eps=0.1, as_published=True)
    others = name_attacks(["cw", "square"], eps=0.1, as_published=True)
    assert others == {"cw": CW(), "square": Square(eps=0.1, num_queries=200)}
    expected = PGD(eps=0.1), PGD(eps=0.1, norm="l2"), get_attack("torchattacks:PGDL2", eps=0.1)
    assert tuple(attacks.values()) == expected


def test_a_budget_in_another_norm_is_not_inherited():
    assert name_attacks(["torchattacks:PGDL2"], eps=0.1)["pgdl2"] == get_attack("torchattacks:PGDL2")
    assert name_attacks([PGD(norm="l2", eps=0.5)], eps=0.1)["pgd"].eps == 0.5


def test_the_worst_case_has_its_name_for_itself():
    assert name_attacks(["worst"], eps=0.1) == {"cascade": get_attack("worst", eps=0.1)}
    for name in ("worst", "final"):
        match = rf"a name for 'pgd' other than '{name}', .* Pass {{'cascade': \.\.\.}}, for instance"
        with pytest.raises(ValueError, match=match):
            name_attacks({name: "pgd"})


def test_final_attack():
    assert name_final_attack("worst", eps=0.1) == {"final": get_attack("worst", eps=0.1)}
    assert name_final_attack("square") == {"final": Square()}
    assert name_final_attack(custom, eps=0.1) == {"final": custom}
    with pytest.raises(ValueError, match=r"without a target but got PGD\("):
        name_final_attack(PGD(targeted=True))


def test_attacks_are_checked():
    with pytest.raises(ValueError, match=r"different names but got 'pgd' twice\. Pass a mapping, such as {'pgd_weak'"):
        name_attacks(["pgd", PGD(eps=0.5)])
    with pytest.raises(ValueError, match=r"`attacks` to be a list but got 'pgd'\. Pass \['pgd'\]"):
        name_attacks("pgd")
    with pytest.raises(ValueError, match=r"`attacks` to be a list but got PGD\(eps=0.5.*Pass \[PGD\(eps=0.5"):
        name_attacks(PGD(eps=0.5))
    with pytest.raises(
        ValueError, match=r"without a target but got CW\(.*targeted=True\)\. A data set has true labels"
    ):
        name_attacks([CW(targeted=True)])
    with pytest.raises(ValueError, match="the name of an attack but got 'gpd'"):
        name_attacks(["gpd"])
    with pytest.raises(TypeError, match="or a name, but got int"):
        name_attacks([3])
