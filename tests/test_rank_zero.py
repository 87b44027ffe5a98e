import warnings

import pytest

from lightning_robustness._processes import rank_zero_warn


def count_warnings(rank):
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        rank_zero_warn("once")
    return len(record)


def test_only_the_first_process_warns(two_processes):
    assert two_processes(count_warnings) == [1, 0]


def test_the_place_is_that_of_the_caller():
    def caller():
        rank_zero_warn("look here")

    with pytest.warns(UserWarning, match="look here") as record:
        caller()
    assert record[0].filename == __file__
