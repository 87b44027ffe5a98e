import pytest
import torchattacks
from torch import nn

from lightning_robustness.attacks import CW, PGD, Square, TorchattacksAdapter, get_attack
from lightning_robustness.measurement.attack_names import name_attacks


def custom(model, x, y):
    return x


class Mine:
    def __call__(self, model, x, y):
        return x


def test_attacks_by_name():
    attacks = name_attacks(["pgd", "fgsm", "cw", "square", "pgd_l2", "torchattacks:DeepFool"], eps=0.1)
    assert attacks == {
        "pgd": PGD(eps=0.1),
        "fgsm": get_attack("fgsm", eps=0.1),
        "cw": CW(),
        "square": Square(eps=0.1, num_queries=200),
        "pgd_l2": PGD(eps=0.1, norm="l2"),
        "deepfool": TorchattacksAdapter(attack="DeepFool"),
    }
    assert name_attacks(["pgd", "square"]) == {"pgd": PGD(), "square": Square(num_queries=200)}
    assert name_attacks([]) == {}


def test_attacks_as_objects():
    given = [PGD(steps=100), Square(), custom, Mine(), torchattacks.PGDL2(nn.Linear(1, 1))]
    attacks = name_attacks(given, eps=0.1)
    assert list(attacks) == ["pgd", "square", "custom", "mine", "pgdl2"]
    assert list(attacks.values())[:4] == given[:4]
    assert attacks["pgdl2"].attack is given[4]


def test_attacks_in_a_mapping():
    attacks = name_attacks({"weak": "pgd", "strong": PGD(eps=0.5), "mine": custom, "Square": "square"}, eps=0.1)
    assert attacks == {"weak": PGD(eps=0.1), "strong": PGD(eps=0.5), "mine": custom, "Square": attacks["Square"]}
    assert attacks["Square"] == Square(eps=0.1, num_queries=200)


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
