import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_robustness.functional import robustness_difference_index
from tests import references


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("num_classes", [2, 10, 200])
def test_equals_the_papers_loops(dtype, atol, num_classes):
    preds = torch.randint(num_classes, (400,))
    preds[preds == 1] = 0  # a class that is never predicted
    preds[0] = 1 if num_classes == 2 else num_classes - 1
    features = torch.randn(400, 5, dtype=dtype) + torch.randn(num_classes, 5, dtype=dtype)[preds]
    result = robustness_difference_index(features, preds)
    assert result.dtype == dtype
    expected = references.rdi(features, preds)
    assert result.item() == pytest.approx(expected["rdi"], abs=atol)
    parts = robustness_difference_index(features, preds, return_components=True)
    for name in ("rdi", "intra", "inter"):
        assert getattr(parts, name).item() == pytest.approx(expected[name], abs=atol)
    populated = parts.counts > 0
    assert torch.equal(parts.counts, preds.bincount())
    assert parts.distances[populated].tolist() == pytest.approx(expected["distances"], abs=atol)
    assert parts.distances[~populated].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_features_accumulate_wider(dtype):
    preds = torch.arange(5000) % 3
    features = (torch.randn(5000, 4) + 50 + 3 * preds.unsqueeze(1)).to(dtype)
    result = robustness_difference_index(features, preds)
    assert result.dtype == torch.float32
    assert result.item() == pytest.approx(references.rdi(features.double(), preds)["rdi"], abs=1e-6)


@given(
    seed=st.integers(0, 2**31),
    num_classes=st.integers(2, 12),
    width=st.integers(1, 9),
    scale=st.floats(1e-3, 1e3),
    shift=st.floats(-1e3, 1e3),
)
def test_bounded_and_unchanged_by_similarity_transforms(seed, num_classes, width, scale, shift):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(60, width, dtype=torch.float64, generator=generator)
    preds = torch.randint(num_classes, (60,), generator=generator)
    rotation = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64, generator=generator)).Q
    result = robustness_difference_index(features, preds).item()
    assert -1 <= result <= 1
    assert robustness_difference_index(features @ rotation * scale + shift, preds).item() == pytest.approx(
        result, abs=1e-8
    )


def test_higher_dimensions_are_flattened():
    features, preds = torch.randn(30, 2, 3, 4), torch.arange(30) % 3
    assert robustness_difference_index(features, preds) == robustness_difference_index(features.flatten(1), preds)


def test_gradient():
    preds = torch.tensor([0, 0, 0, 1, 1, 2])  # class 2 has one sample, at distance 0 of its centre
    features = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda f: robustness_difference_index(f, preds), features)
    robustness_difference_index(torch.zeros_like(features).requires_grad_(), preds).backward()
    with pytest.warns(UserWarning, match="RDI is -1"):
        robustness_difference_index(features, torch.zeros_like(preds)).backward()
    assert features.grad.isfinite().all()


def test_fewer_than_two_populated_classes_give_minus_one_and_one_warning():
    with pytest.warns(UserWarning, match="RDI is -1") as record:
        assert robustness_difference_index(torch.randn(5, 3), torch.full((5,), 7)) == -1
    assert len(record) == 1
    assert record[0].filename == __file__
    with pytest.warns(UserWarning, match="No class was predicted"):
        assert robustness_difference_index(torch.randn(0, 3), torch.zeros(0, dtype=torch.long)) == -1


def test_features_that_are_all_equal_give_minus_one():
    assert robustness_difference_index(torch.ones(6, 3), torch.arange(6) % 2) == -1
