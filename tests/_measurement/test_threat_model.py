import pytest
import torch

from lightning_robustness._measurement.threat_model import ThreatModel, is_image
from lightning_robustness.attacks import CW, PGD, Cascade, MinimumNormCW, Square, get_attack
from lightning_robustness.input_space import InputSpace


def describe(attacks, **options):
    return ThreatModel.of(attacks, InputSpace(), 512, **options).describe()


def test_norm_budget_steps_and_queries():
    attacks = {
        "pgd": get_attack("pgd", eps=8 / 255, strength="fast"),
        "cw": CW(),
        "square": Square(eps=8 / 255, num_queries=200),
    }
    assert describe(attacks, is_image=True, queries={"pgd": 15.6, "square": 151.2}) == {
        "norm": "l-infinity",
        "budget": "8/255",
        "attacks": "pgd (8 shrinking steps with each of cross-entropy and the margin, 16 queries on average), "
        "cw (C&W as published, c = 1, 50 steps, no budget), "
        "square (at most 200 queries, 151 on average)",
        "samples": "512; misclassified ones need no attack",
        "inputs": "images with values in [0, 1]",
    }


def test_one_query():
    assert describe({"fgsm": get_attack("fgsm", eps=0.1)}, queries={"fgsm": 1.0})["attacks"].endswith(
        "1 query on average)"
    )


def test_minimum_norm_attacks_count_within_an_l2_budget():
    cw = MinimumNormCW(initial_steps=16, steps=2)
    facts = describe({"pgd": PGD(eps=0.1), "cw": cw, "mine": lambda model, x, y: x}, l2_budget=0.2)
    assert (facts["norm"], facts["budget"]) == ("l-infinity", "0.1")
    assert facts["attacks"] == "pgd (10 steps), cw (C&W from a DDN start, 16 + 2 steps, l2 <= 0.2), mine (no budget)"
    alone = describe({"cw": cw}, l2_budget=0.2)
    assert (alone["norm"], alone["budget"]) == ("l2", "0.2 in l2")


def test_several_norms():
    facts = describe({"pgd": PGD(eps=0.1, steps=1), "weaker": PGD(eps=0.05), "pgd_l2": PGD(eps=0.5, norm="l2")})
    assert (facts["norm"], facts["budget"]) == ("l-infinity and l2", "0.1 and 0.5 in l2")
    assert facts["attacks"] == "pgd (1 step), weaker (10 steps), pgd_l2 (10 steps)"


def test_cascades_have_the_budgets_of_their_members():
    mixed = Cascade(attacks=(PGD(eps=0.1), PGD(eps=0.5, norm="l2", steps=20)))
    facts = describe({"cascade": mixed})
    assert (facts["budget"], facts["attacks"]) == ("0.1 and 0.5 in l2", "cascade (10 steps then 20 steps)")
    assert describe({"cascade": Cascade(attacks=(PGD(eps=0.1), CW()))})["budget"] == "none"
    many = describe({"cascade": Cascade(attacks=tuple(PGD(steps=number) for number in range(1, 7)))})
    assert many["attacks"] == "cascade (1 step then 2 steps then 3 steps then 4 steps then others)"


def test_foreign_attacks_and_no_attacks():
    facts = describe({"mine": lambda model, x, y: x})
    assert (facts["norm"], facts["budget"], facts["attacks"]) == ("none", "none", "mine (no budget)")

    def bounded(model, x, y):
        return x

    bounded.eps = 0.25
    assert describe({"mine": bounded})["norm"] == "unknown"
    assert describe({"mine": bounded})["attacks"] == "mine"
    nothing = ThreatModel.of({}, InputSpace(None, None), 0)
    assert nothing.describe() == {
        **{"norm": "none", "budget": "none", "attacks": "none", "samples": "none attacked"},
        "inputs": "values in [unbounded, unbounded]",
    }
    assert nothing.describe("0.1 to 0.2")["budget"] == "0.1 to 0.2"


@pytest.mark.parametrize(
    ("space", "images", "expected"),
    [(InputSpace(), True, True), (InputSpace(), False, False), (InputSpace(0.0, 255.0), True, False)],
)
def test_pixels_are_those_of_images_from_0_to_1(space, images, expected):
    assert ThreatModel.of({}, space, 0, images).has_pixels is expected


def test_images_have_one_or_three_channels():
    shapes = [(2, 1, 4, 4), (2, 3, 4, 4), (2, 2, 4, 4), (2, 3, 4)]
    assert [is_image(torch.zeros(shape)) for shape in shapes] == [True, True, False, False]
    assert not is_image([torch.zeros(1, 4, 4)])
