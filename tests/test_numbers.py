import math

import pytest

from lightning_robustness._numbers import write_budget, write_distance, write_interval, write_share


@pytest.mark.parametrize(
    ("eps", "text"),
    [
        (8 / 255, "8/255"),
        (0.5 / 255, "0.5/255"),
        (3.1 / 255, "3.1/255"),
        (0.25 / 255, "0.25/255"),
        (0.11, "0.11"),
        (0.3, "0.3"),  # also 76.5/255
        (0.0314, "0.0314"),
        (1e-9, "1e-09"),
        (0.2, "0.2"),  # also 51/255
        (0.1, "0.1"),
        (0.0123456, "0.01235"),
        (8.0, "8"),
        (8, "8"),
        (0.0, "0"),
        (1.0, "1"),
    ],
)
def test_budgets(eps, text):
    assert write_budget(eps) == text
    assert (write_budget(eps, "linf"), write_budget(eps, "l2")) == (text, f"{text} in l2")


def test_fractions_of_255_can_be_read_back():
    budgets = [steps / 255 for steps in range(1, 255)]
    parts = [write_budget(eps).partition("/") for eps in budgets]
    assert [float(numerator) / float(denominator or 1) for numerator, _, denominator in parts] == pytest.approx(budgets)


@pytest.mark.parametrize(
    ("distance", "has_pixels", "text"),
    [
        (8 / 255, True, "8.0/255"),
        (0.0122, True, "3.1/255"),
        (-0.0122, True, "-3.1/255"),
        (0.0, True, "0.0/255"),
        (12.34, False, "12.3"),
        (0.25, False, "0.25"),
        (math.inf, True, "infinite"),
        (math.nan, False, "nan"),
    ],
)
def test_distances(distance, has_pixels, text):
    assert write_distance(distance, has_pixels) == text


def test_shares_and_intervals():
    assert (write_share(0.6129), write_share(1.0), write_share(math.nan)) == ("61.3 %", "100.0 %", "unknown")
    assert write_interval(0.5651, 0.6478) == "57-65 %"
    assert write_interval(0.6, 0.639) == "60.0-63.9 %"
