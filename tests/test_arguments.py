import math

import numpy as np
import pytest
import torch

from lightning_robustness._arguments import (
    check_features_and_preds,
    check_integer,
    check_labels,
    check_number,
    check_overflow,
)

LABELS = torch.arange(4)


@pytest.mark.parametrize("shape", [(4, 6), (4, 2, 3), (0, 6), (0, 2, 3)])
def test_features_become_a_matrix(shape):
    features = torch.randn(shape)
    assert torch.equal(check_features_and_preds(features, LABELS[: shape[0]], 4), features.reshape(shape[0], 6))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_any_integer_labels_will_do(dtype):
    check_features_and_preds(torch.randn(4, 2), LABELS.to(dtype), 4)


def test_numbers_of_numpy_become_those_of_python():
    assert type(check_integer("steps", np.int64(3), minimum=1)) is int
    assert type(check_number("eps", np.float32(0.5))) is float
    assert check_number("ratio", 1, exclusive=True, maximum=1.0) == 1.0
    with pytest.raises(ValueError, match=r"`ratio` .* above 0 and at most 1 but got 1.5"):
        check_number("ratio", 1.5, exclusive=True, maximum=1.0)


def test_labels():
    assert check_labels("y", LABELS, 4) == 3
    assert check_labels("y", LABELS[:0], 0) == -1
    with pytest.raises(TypeError, match=r"`positions` to be an integer tensor but got dtype torch.float32\. Pass the"):
        check_labels("positions", torch.ones(4), 4, "Pass the positions.")


def test_overflow_is_counted_by_sample():
    values = torch.ones(3, 2)
    assert check_overflow(values) is values
    assert len(check_overflow(torch.zeros(0))) == 0
    values[1] = torch.tensor([math.inf, math.nan])
    with pytest.raises(ValueError, match="1 of 3 samples overflow"):
        check_overflow(values)
