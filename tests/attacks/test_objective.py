import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_robustness.attacks._steps import loss_gradient, loss_value, margin, margin_gradient

seeds = st.integers(0, 2**31)


def draw(seed, num_classes, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(12, num_classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(num_classes, (12,), generator=generator)


@settings(deadline=None, max_examples=50)
@given(seed=seeds, num_classes=st.integers(2, 6))
def test_margin(seed, num_classes):
    logits, y = draw(seed, num_classes)
    expected = [
        row[k] - max(v for j, v in enumerate(row) if j != k) for row, k in zip(logits.tolist(), y.tolist(), strict=True)
    ]
    assert margin(logits, y).tolist() == pytest.approx(expected)
    torch.testing.assert_close(margin(logits + 50, y), margin(logits, y))
    assert torch.equal(margin(logits, y) > 0, logits.argmax(1) == y)


@settings(deadline=None, max_examples=50)
@given(seed=seeds, num_classes=st.integers(2, 6))
def test_directions_are_those_of_autograd(seed, num_classes):
    logits, y = draw(seed, num_classes)
    logits.requires_grad_()
    (expected,) = torch.autograd.grad(-margin(logits, y).sum(), logits)
    assert torch.equal(margin_gradient(logits.detach(), y), expected)
    assert torch.equal(loss_gradient(logits.detach(), y, "margin"), expected)
    reference, log_p = draw(seed + 1, num_classes)[0].softmax(dim=1), logits.log_softmax(dim=1)
    rivals = torch.stack([y, (y + 1) % num_classes], dim=1)
    for loss, target, value in (
        ("cross_entropy", y, torch.nn.functional.nll_loss(log_p, y, reduction="sum")),
        ("kl", reference, torch.nn.functional.kl_div(log_p, reference, reduction="sum")),
        ("rivals", rivals, (logits.gather(1, rivals[:, 1:]) - logits.gather(1, rivals[:, :1])).sum()),
    ):
        (expected,) = torch.autograd.grad(value, logits, retain_graph=True)
        result = loss_gradient(logits.detach(), target, loss)
        factor = result.abs().amax(1, keepdim=True) / expected.abs().amax(1, keepdim=True)
        torch.testing.assert_close(result, expected * factor)
        assert ((result.abs().amax(1) >= 0.5) & (result.abs().amax(1) <= 1)).all()


@settings(deadline=None, max_examples=50)
@given(seed=seeds, num_classes=st.integers(2, 6))
def test_values_rise_with_the_losses(seed, num_classes):
    logits, y = draw(seed, num_classes)
    value = loss_value(logits, y, "cross_entropy")
    torch.testing.assert_close(
        torch.nn.functional.softplus(value), torch.nn.functional.cross_entropy(logits, y, reduction="none")
    )
    assert torch.equal(loss_value(logits, y, "margin"), -margin(logits, y))
    pairs = torch.stack([y, (y + 1) % num_classes], dim=1)
    expected = [row[j] - row[i] for row, (i, j) in zip(logits.tolist(), pairs.tolist(), strict=True)]
    assert loss_value(logits, pairs, "rivals").tolist() == pytest.approx(expected)
    target = draw(seed + 1, num_classes)[0].softmax(dim=1)
    divergence = torch.nn.functional.kl_div(logits.log_softmax(1), target, reduction="none").sum(dim=1)
    entropy = -(target * target.log()).sum(dim=1)
    torch.testing.assert_close(loss_value(logits, target, "kl"), divergence + entropy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("confidence", [20.0, 300.0, 6e4])
def test_cross_entropy_of_a_confident_sample_does_not_underflow(dtype, confidence):
    logits, y = torch.tensor([[confidence, 1.0, 0.0]], dtype=dtype), torch.tensor([0])
    expected = torch.tensor([[-1.0, 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))]], dtype=dtype)
    torch.testing.assert_close(loss_gradient(logits, y, "cross_entropy"), expected)
    assert loss_value(logits, y, "cross_entropy").item() == pytest.approx(-confidence + 1.3133, rel=0.01)
