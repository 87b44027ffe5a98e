import pytest

from lightning_robustness.attacks import CW, PGD, Budget
from lightning_robustness.measurement.sample_meters import common_budget, make_sample_meters
from lightning_robustness.utilities.input_space import InputSpace


def test_meters_in_their_order():
    meters = make_sample_meters(InputSpace(), fim_samples=8, clever_samples=2)
    assert [(meter.name, meter.size) for meter in meters] == [("fim", 8), ("clever", 2)]


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
    fisher, _ = make_sample_meters(InputSpace(), budget=expected)
    assert fisher.describe() == f"at most 256 samples, method 'auto', boundary in {norm}{budget}"
