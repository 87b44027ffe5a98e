import math
from typing import Literal

import numpy as np
import pytest
import torch

from lightning_robustness._arguments import (
    check_attack,
    check_classes,
    check_device,
    check_features_and_preds,
    check_functions,
    check_head,
    check_integer,
    check_integer_tensor,
    check_labels,
    check_model,
    check_module,
    check_name,
    check_not_empty,
    check_number,
    check_option,
    check_overflow,
    check_tensor,
    is_number,
)

LABELS = torch.arange(4)


@pytest.mark.parametrize("shape", [(4, 6), (4, 2, 3), (0, 6), (0, 2, 3)])
def test_features_become_a_matrix(shape):
    features = torch.randn(shape)
    assert torch.equal(check_features_and_preds(features, LABELS[: shape[0]], 4), features.reshape(shape[0], 6))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_any_integer_labels_will_do(dtype):
    check_features_and_preds(torch.randn(4, 2), LABELS.to(dtype), 4)


@pytest.mark.parametrize(
    ("features", "preds", "error", "match"),
    [
        (torch.ones(4, 2).int(), LABELS, TypeError, r"`features`.*torch\.int32"),
        (torch.ones(4, 2), torch.ones(4, 3), TypeError, r"torch\.float32.*`logits\.argmax\(dim=1\)`"),
        (torch.ones(4, 2), LABELS.bool(), TypeError, r"`preds`.*torch\.bool"),
        (torch.ones(4), LABELS, ValueError, r"`features`.*\(4,\).*unsqueeze"),
        (torch.ones(3, 2), LABELS, ValueError, r"`preds`.*\(3,\).*\(4,\)"),
        (torch.ones(4, 2), LABELS.unsqueeze(1), ValueError, r"but got \(4, 1\)"),
        (torch.ones(4, 2), LABELS + 1, ValueError, "0 to 3, .* 1 to 4"),
        (torch.ones(4, 2), LABELS - 1, ValueError, "0 to 3, .* -1 to 2"),
        (torch.tensor([[1.0], [float("nan")], [float("inf")], [2.0]]), LABELS, ValueError, r"2 of 4 samples hold NaN"),
    ],
)
def test_bad_input(features, preds, error, match):
    with pytest.raises(error, match=match):
        check_features_and_preds(features, preds, num_classes=4)


def test_negative_labels_without_a_number_of_classes():
    with pytest.raises(ValueError, match=r"`preds`.* -1 to 2"):
        check_features_and_preds(torch.ones(4, 2), LABELS - 1)


def test_integers():
    assert type(check_integer("steps", np.int64(3), minimum=1)) is int
    for value in (0, 1.0, True, "1", None):
        with pytest.raises(ValueError, match=f"`steps`.* 1 .*{value!r}"):
            check_integer("steps", value, minimum=1)


def test_numbers():
    assert type(check_number("eps", np.float32(0.5))) is float
    assert check_number("eps", 0) == 0.0
    for value in (-1, math.nan, math.inf, True, "1", None):
        with pytest.raises(ValueError, match=f"`eps`.* 0 .*{value!r}"):
            check_number("eps", value)
    with pytest.raises(ValueError, match=r"`lr`.* above 0"):
        check_number("lr", 0, exclusive=True)
    assert check_number("ratio", 1, exclusive=True, maximum=1.0) == 1.0
    with pytest.raises(ValueError, match=r"`ratio` .* above 0 and at most 1 but got 1.5"):
        check_number("ratio", 1.5, exclusive=True, maximum=1.0)


def test_options():
    check_option("norm", "l2", Literal["linf", "l2"])
    with pytest.raises(ValueError, match=r"`norm`.*'linf', 'l2'.*'l1'"):
        check_option("norm", "l1", Literal["linf", "l2"])


def test_integer_tensors():
    check_integer_tensor("y", LABELS)
    with pytest.raises(TypeError, match=r"`y`.* list"):
        check_integer_tensor("y", [0, 1])


def test_labels():
    assert check_labels("y", LABELS, 4) == 3
    assert check_labels("y", LABELS[:0], 0) == -1
    with pytest.raises(ValueError, match=r"`y`.*\(3,\).*\(4,\)"):
        check_labels("y", LABELS, 3)
    with pytest.raises(ValueError, match=r"`y`.* -1 to 2"):
        check_labels("y", LABELS - 1, 4)
    with pytest.raises(TypeError, match=r"`positions` to be an integer tensor but got dtype torch.float32\. Pass the"):
        check_labels("positions", torch.ones(4), 4, "Pass the positions.")


def test_what_is_right_passes():
    """The messages for what is wrong are in ``tests/test_bad_input.py``."""
    check_tensor("x", torch.zeros(2, dtype=torch.bfloat16))
    check_functions(lambda model, x: x, None)
    check_head("model.fc")
    check_head(torch.nn.Identity())
    check_model(torch.nn.Identity())
    check_model(lambda x: x)
    check_module(torch.nn.Identity(), "in which the head can be found")
    check_attack(lambda model, x, y: x)
    check_device(None)
    check_device(torch.device("cpu"))
    check_classes("y", 0, 9, num_classes=10)
    check_not_empty("x", torch.zeros(1, 0))
    assert check_name("prefix", "a") == "a"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, True),
        (np.float32(0.5), True),
        (np.int64(2), True),
        (math.nan, False),
        (math.inf, False),
        (True, False),
        ("1", False),
    ],
)
def test_what_counts_as_a_number(value, expected):
    assert is_number(value) is expected


def test_overflow_is_counted_by_sample():
    values = torch.ones(3, 2)
    assert check_overflow(values) is values
    assert len(check_overflow(torch.zeros(0))) == 0
    values[1] = torch.tensor([math.inf, math.nan])
    with pytest.raises(ValueError, match="1 of 3 samples overflow"):
        check_overflow(values)
