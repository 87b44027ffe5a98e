import pickle
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_robustness import InputSpace
from lightning_robustness.input_space import check_input_space, check_normalized, clip

CIFAR = InputSpace(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))


@given(st.lists(st.floats(-2, 2), min_size=3, max_size=3), st.lists(st.floats(0.01, 5), min_size=3, max_size=3))
def test_normalize_is_per_channel_and_undone_by_unnormalize(mean, std):
    space = InputSpace(mean=mean, std=std)
    x = torch.rand(2, 3, 4, 5, dtype=torch.float64)
    expected = torch.stack([(x[:, c] - mean[c]) / std[c] for c in range(3)], dim=1)
    torch.testing.assert_close(space.normalize(x), expected)
    torch.testing.assert_close(space.unnormalize(space.normalize(x)), x)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 7), (4, 3, 2, 2), (4, 3, 2, 2, 2)])
def test_any_number_of_dimensions(shape):
    x = CIFAR.normalize(torch.rand(shape))
    CIFAR.check(x)
    assert CIFAR.scale(x).expand(shape)[0, 2].unique() == torch.tensor(0.2616)


def test_a_single_number_serves_all_channels():
    space = InputSpace(low=-1, high=1, mean=0.5, std=2)
    assert space.normalize(torch.tensor([[0.5, 2.5]])).tolist() == [[0.0, 1.0]]
    assert InputSpace().normalize(torch.tensor([[0.5]])).tolist() == [[0.5]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rounding_is_not_outside(dtype):
    pixels = torch.tensor([0.0, 1.0], dtype=torch.float64).reshape(2, 1, 1, 1).expand(2, 3, 2, 2)
    CIFAR.check(CIFAR.normalize(pixels).to(dtype))


def test_equal_hashable_and_picklable():
    space = InputSpace(mean=[0.5], std=[0.5])
    assert pickle.loads(pickle.dumps(space)) == space == InputSpace(mean=(0.5,), std=(0.5,))
    assert hash(space) == hash(InputSpace(mean=(0.5,), std=(0.5,)))


@pytest.mark.parametrize("kind", [list, np.array, lambda values: torch.tensor(values, dtype=torch.float64)])
def test_statistics_of_any_kind_become_tuples(kind):
    space = InputSpace(mean=kind([0.5, 0.25]), std=kind([2.0, 1.0]))
    assert space == InputSpace(mean=(0.5, 0.25), std=(2.0, 1.0))
    assert hash(space) == hash(InputSpace(mean=(0.5, 0.25), std=(2.0, 1.0)))


def test_one_value_for_one_of_the_two():
    space, x = InputSpace(mean=(0.5, 0.25), std=2.0), torch.ones(1, 2)
    assert torch.equal(space.normalize(x), torch.tensor([[0.25, 0.375]]))
    assert torch.equal(InputSpace(mean=[0.5], std=(1.0, 2.0)).normalize(x), torch.tensor([[0.5, 0.25]]))


def test_none_is_the_default_space():
    assert check_input_space(None) == InputSpace(low=0.0, high=1.0)
    assert check_input_space(CIFAR) is CIFAR


@pytest.mark.parametrize(
    ("space", "x", "match"),
    [
        (
            InputSpace(),
            torch.tensor([[-2.1, 2.6]]),
            r"\[-2.1, 2.6\].*InputSpace\(mean=.*InputSpace\(low=None, high=None\)",
        ),
        (InputSpace(), torch.tensor([[0.0, 1.003]]), r"\[0, 1.003\].*`x.clamp\(0.0, 1.0\)`"),
        (
            InputSpace(mean=0.5, std=0.5),
            torch.tensor([[0.0, 2.0]]),
            r"\[0.5, 1.5\].* mean=0.5 and std=0.5\?",
        ),
        (InputSpace(low=None, high=None), torch.tensor([[0.0, float("inf")]]), "inputs to be finite"),
        (
            CIFAR,
            torch.zeros(2, 1, 4, 4),
            r"`std`.*\(2, 1, 4, 4\), but got 3",
        ),
    ],
)
def test_bad_batch(space, x, match):
    with pytest.raises(ValueError, match=match):
        space.check(x)


def test_data_that_is_evidently_not_normalised():
    space, x = (
        InputSpace(mean=(0.5, 0.4), std=(0.25, 0.2)),
        torch.rand(16, 2, generator=torch.Generator().manual_seed(0)),
    )
    with pytest.raises(
        ValueError, match=r"normalised with mean=\(0.5, 0.4\).*observed.*`InputSpace\(low=0.0, high=1.0\)"
    ):
        check_normalized(space, x)
    check_normalized(InputSpace(low=0.0, high=1.0), x)
    check_normalized(space, space.normalize(x))
    check_normalized(space, x[:2])  # of so few values nothing is evident
    check_normalized(InputSpace(low=None, high=None, mean=0.5, std=0.25), x)
    check_normalized(InputSpace(mean=0.0, std=0.5), 0.5 * x)


@pytest.mark.parametrize("space", [InputSpace(), InputSpace(mean=(0.5, 0.25), std=(0.25, 0.5)), InputSpace(low=None)])
def test_values_outside_of_the_range_are_clipped(space):
    values = torch.tensor([[0.5, 1.25], [-0.5, 0.75], [0.0, 1.0]])
    clipped, outside = clip(space, space.normalize(values))
    expected = torch.tensor([[0.5, 1.0], [-0.5 if space.low is None else 0.0, 0.75], [0.0, 1.0]])
    torch.testing.assert_close(space.unnormalize(clipped), expected)
    assert outside.tolist() == [[False, True], [space.low is not None, False], [False, False]]
    kept = ~outside
    assert torch.equal(clipped[kept], space.normalize(values)[kept]), "what is inside stays bit for bit"


def test_without_a_range_nothing_is_clipped():
    x = torch.tensor([[-5.0, 1e6]])
    clipped, outside = clip(InputSpace(low=None, high=None), x)
    assert clipped is x
    assert not outside.any()


@pytest.mark.parametrize(
    ("space", "low", "high", "expected"),
    [
        (InputSpace(), 0.0, 1.0, True),
        (InputSpace(), -1e-7, 1.0 + 1e-7, True),
        (InputSpace(), -1e-3, 1.0, False),
        (InputSpace(), 0.0, 1.001, False),
        (InputSpace(mean=0.5, std=0.25), -2.0, 2.0, True),
        (InputSpace(mean=0.5, std=0.25), -2.0, 2.1, False),
        (InputSpace(low=None), -100.0, 1.0, True),
        (InputSpace(high=None), 0.0, 1e6, True),
        (InputSpace(low=None, high=None), -1e6, 1e6, True),
        (InputSpace(low=None, high=None), -torch.inf, 0.0, False),
        (InputSpace(low=None, high=None), torch.nan, 0.0, False),
    ],
)
def test_range(space, low, high, expected):
    with nullcontext() if expected else pytest.raises(ValueError, match="Expected inputs"):
        space.check(torch.tensor([[low, 0.0], [0.5, high]]))
    space.check(torch.empty(0, 2))
