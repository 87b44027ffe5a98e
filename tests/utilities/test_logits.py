from types import SimpleNamespace

import pytest
import torch

from lightning_robustness.utilities.logits import are_probabilities, check_differentiable, check_finite, compute_logits

X, Z = torch.randn(4, 2), torch.randn(4, 3)


@pytest.mark.parametrize(
    "output", [Z, SimpleNamespace(logits=Z), {"loss": X.sum(), "logits": Z}, (X.sum(), Z), [Z, Z + 1]]
)
def test_logits_are_found(output):
    assert torch.equal(compute_logits(lambda x: output, X), Z)


@pytest.mark.parametrize(
    ("output", "match"),
    [
        ({"scores": Z}, r"logits of shape \(N, K\), or something.* but got dict. If they are elsewhere.*forward_fn"),
        ("text", r"but got str"),
        (Z[:3], r"logits of shape \(4, K\), one row per input, but got \(3, 3\)"),
        (Z[:, :, None], r"but got \(4, 3, 1\)"),
        (Z[:, :1], r"at least 2 classes but got 1.*torch.cat"),
    ],
)
def test_bad_output(output, match):
    with pytest.raises(ValueError, match=match):
        compute_logits(lambda x: output, X)


def test_finite():
    check_finite(Z)
    with pytest.raises(ValueError, match="2 of 4 samples have NaN or infinite ones"):
        check_finite(torch.tensor([[0.0, 1.0], [torch.nan, 0.0], [0.0, 1.0], [torch.inf, torch.nan]]))


def test_of_several_matrices_the_first_is_taken_with_a_warning():
    with pytest.warns(UserWarning, match=r"matrices of widths \[3, 2\]; the first is used as logits.*forward_fn"):
        assert torch.equal(compute_logits(lambda x: (Z, X), X), Z)


def test_differentiable():
    check_differentiable(Z.clone().requires_grad_(), "use another model")
    with pytest.raises(
        ValueError, match=r"without a gradient\. Take `detach`.* out of the model, or use another model"
    ):
        check_differentiable(Z, "use another model")


def test_probabilities():
    assert are_probabilities(Z.softmax(dim=1))
    assert not are_probabilities(Z)
    assert not are_probabilities(2 * Z.softmax(dim=1))
    assert not are_probabilities(Z[:0])
