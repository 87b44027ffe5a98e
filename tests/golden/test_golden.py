"""The same values as ever, bit for bit, under the same keys in the same order.

Where torch computes other last bits than when the values were written, numbers in double precision may differ by 1e-6
of their size; in single precision only keys and their order are compared, since a sample on the edge may flip. After a
change that is meant to change values, ``python -m tests.golden`` writes them and says what is different.
"""

import math

import pytest

from tests.golden.runs import RUNS, SINGLE, describe_arithmetic, differences, read_values, run


@pytest.fixture(scope="module")
def is_exact():
    return describe_arithmetic() == read_values()["arithmetic"]


def test_values_are_of_these_runs():
    assert list(read_values()["runs"]) == list(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_same_values(name, is_exact):
    tolerance = math.inf if name in SINGLE else 1e-6
    assert differences(run(name), read_values()["runs"][name], 0 if is_exact else tolerance) == []


def test_differences_are_found():
    expected = {"a": [1.0, 2], "b": {"c": None, "d": math.nan}}
    assert differences({"a": [1.0, 2], "b": {"c": None, "d": math.nan}}, expected, 0) == []
    assert differences({"a": [1 + 1e-7, 2], "b": {"c": None, "d": math.nan}}, expected, 1e-6) == []
    for changed in (
        {"a": [1 + 1e-7, 2], "b": {"c": None, "d": math.nan}},
        {"a": [1.0, 3], "b": {"c": None, "d": math.nan}},
        {"a": [1.0], "b": {"c": None, "d": math.nan}},
        {"a": [1.0, 2], "b": {"c": 0.0, "d": math.nan}},
        {"a": [1.0, 2], "b": {"c": None, "d": 0.0}},
    ):
        assert len(differences(changed, expected, 0)) == 1
    assert "keys" in differences({"b": expected["b"], "a": expected["a"]}, expected, math.inf)[0]
