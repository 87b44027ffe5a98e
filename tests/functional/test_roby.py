import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_robustness.functional import roby
from tests import references


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("num_classes", [2, 10, 200])
@pytest.mark.parametrize("p", [1, 2.0, 3, math.inf])
def test_equals_the_papers_loops(dtype, atol, num_classes, p):
    preds = torch.randint(num_classes, (300,))
    preds[preds == 1] = 0  # a class that is never predicted
    preds[0] = 1 if num_classes == 2 else num_classes - 1
    features = torch.randn(300, 4, dtype=dtype) + torch.randn(num_classes, 4, dtype=dtype)[preds]
    for normalization in ("pairs", "all", "none"):
        expected = references.roby(features, preds, p, normalization)
        result = roby(features, preds, p=p, normalization=normalization)
        assert result.dtype == dtype
        assert result.item() == pytest.approx(expected["roby"], abs=atol)
        parts = roby(features, preds, p=p, normalization=normalization, return_components=True)
        assert torch.equal(parts.roby, result)
        assert parts.fsa.item() == pytest.approx(expected["fsa"], abs=atol)
        assert parts.fsd.item() == pytest.approx(expected["fsd"], abs=atol)
        upper = parts.pairs[tuple(torch.triu_indices(*parts.pairs.shape, offset=1))]
        assert upper.nanmean().item() == pytest.approx(expected["roby"], abs=atol)


@given(
    seed=st.integers(0, 2**31),
    num_classes=st.integers(3, 12),
    width=st.integers(2, 9),
    p=st.sampled_from([1.0, 2.0, 3.0, math.inf]),
    scale=st.floats(1e-3, 1e3),
    shift=st.floats(-1e3, 1e3),
)
def test_pairs_form_is_unchanged_by_shift_and_scale_and_for_p_2_by_rotation(seed, num_classes, width, p, scale, shift):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(60, width, dtype=torch.float64, generator=generator)
    preds = torch.cat([torch.arange(num_classes), torch.randint(num_classes, (60 - num_classes,), generator=generator)])
    result = roby(features, preds, p=p).item()
    assert 0 <= result <= 1
    assert roby(features * scale + shift, preds, p=p).item() == pytest.approx(result, abs=1e-7)
    if p == 2:
        rotation = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64, generator=generator)).Q
        assert roby(features @ rotation, preds).item() == pytest.approx(result, abs=1e-9)


def test_equal_pairs_give_zero():
    triangle = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, math.sqrt(0.75)]], dtype=torch.float64)
    assert roby(triangle, torch.arange(3)) == 0
    parts = roby(triangle, torch.arange(3), return_components=True)
    assert parts.fsd == 0
    assert parts.fsa == 1


@pytest.mark.parametrize(("normalization", "expected"), [("pairs", 1.0), ("all", 1.0), ("none", 2.0)])
def test_fewer_than_two_populated_classes_are_the_worst_and_give_one_warning(normalization, expected):
    features = torch.tensor([[0.0], [2.0]])
    with pytest.warns(UserWarning, match="FSD is 0 and ROBY is 1") as record:
        assert roby(features, torch.tensor([3, 3]), normalization=normalization) == expected
    assert len(record) == 1
    with pytest.warns(UserWarning, match="FSD is 0"):
        assert roby(features, torch.tensor([3, 3]), return_components=True).fsd == 0
    with pytest.warns(UserWarning, match="No class"):
        assert roby(features[:0], torch.zeros(0, dtype=torch.long), return_components=True).fsa == 1


@pytest.mark.parametrize("normalization", ["pairs", "all", "none"])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_gradient(normalization, p):
    preds = torch.arange(12) % 4
    features = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda f: roby(f, preds, p=p, normalization=normalization), features)


def test_gradient_with_classes_that_coincide():
    features = torch.randn(5, 3, dtype=torch.float64)
    features[1] = features[0]
    features.requires_grad_()
    roby(features, torch.arange(5), normalization="none").backward()
    assert features.grad.isfinite().all()
