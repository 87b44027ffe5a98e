from types import SimpleNamespace

import pytest
import torch

from lightning_robustness._model.access import (
    are_probabilities,
    check_differentiable,
    check_finite,
    compute_logits,
    pick_entry,
)

X, Z = torch.randn(4, 2), torch.randn(4, 3)


@pytest.mark.parametrize(
    "output", [Z, SimpleNamespace(logits=Z), {"loss": X.sum(), "logits": Z}, (X.sum(), Z), [Z, Z + 1]]
)
def test_logits_are_found(output):
    assert torch.equal(compute_logits(lambda x: output, X), Z)


@pytest.mark.parametrize(
    ("output", "match"),
    [
        ({"scores": Z}, "got dict.*forward_fn"),
        ("text", r"but got str"),
        (Z[:3], r"\(4, K\).* \(3, 3\)"),
        (Z[:, :, None], r"but got \(4, 3, 1\)"),
    ],
)
def test_bad_output(output, match):
    with pytest.raises(ValueError, match=match):
        compute_logits(lambda x: output, X)


@pytest.mark.parametrize("output", [Z[:, 0], Z[:, :1], (Z[:, :1], X[0]), {"logits": Z[:, 0]}, [Z[:, 0], X.sum()]])
def test_one_logit_is_two_classes(output):
    logits = compute_logits(lambda x: output, X)
    assert torch.equal(logits, torch.stack([torch.zeros(4), Z[:, 0]], dim=1))
    assert torch.equal(logits.argmax(dim=1), (Z[:, 0] > 0).long())


def test_one_logit_of_one_sample_that_squeeze_left_without_a_dimension():
    assert torch.equal(compute_logits(lambda x: Z[0, 0], X[:1]), torch.tensor([[0.0, Z[0, 0]]]))
    with pytest.raises(ValueError, match=r"\(4, K\).* \(\)"):
        compute_logits(lambda x: Z[0, 0], X)


def test_the_entry_of_a_tuple():
    assert torch.equal(compute_logits(pick_entry(lambda x: (X, Z), 1), X), Z)
    assert pick_entry(compute_logits, None) is compute_logits


def test_finite():
    check_finite(Z)
    with pytest.raises(ValueError, match="2 of 4 samples have NaN or infinite ones"):
        check_finite(torch.tensor([[0.0, 1.0], [torch.nan, 0.0], [0.0, 1.0], [torch.inf, torch.nan]]))


def test_of_several_matrices_the_first_is_taken_with_a_warning():
    with pytest.warns(UserWarning, match=r"widths \[3, 2\].*forward_fn"):
        assert torch.equal(compute_logits(lambda x: (Z, X), X), Z)


def test_differentiable():
    check_differentiable(Z.clone().requires_grad_(), "use another model")
    with pytest.raises(ValueError, match=r"Take `detach`.* out of the model"):
        check_differentiable(Z, "use another model")


def test_probabilities():
    assert are_probabilities(Z.softmax(dim=1))
    assert not are_probabilities(Z)
    assert not are_probabilities(2 * Z.softmax(dim=1))
    assert not are_probabilities(Z[:0])
