import math

import pytest

from lightning_robustness import InputSpace
from lightning_robustness.measurement.distance_text import describe_distance


@pytest.mark.parametrize(
    ("distance", "space", "text"),
    [
        (8 / 255, None, "8.0/255"),
        (-0.5 / 255, InputSpace(mean=0.5, std=0.25), "-0.5/255"),
        (0.0, None, "0.0/255"),
        (12.34, InputSpace(high=255), "12.3"),
        (0.25, InputSpace(low=None, high=None), "0.25"),
        (math.inf, None, "infinite"),
        (math.nan, None, "nan"),
    ],
)
def test_distances_as_texts(distance, space, text):
    assert describe_distance(distance, space) == text
