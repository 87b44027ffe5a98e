import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_robustness.attacks.objective import loss_gradient, margin, margin_gradient

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
def test_gradients_are_those_of_autograd_up_to_a_power_of_two(seed, num_classes):
    logits, y = draw(seed, num_classes)
    logits.requires_grad_()
    (expected,) = torch.autograd.grad(-margin(logits, y).sum(), logits)
    assert torch.equal(margin_gradient(logits.detach(), y), expected)
    assert torch.equal(loss_gradient(logits.detach(), y, "margin"), expected)
    reference, log_p = draw(seed + 1, num_classes)[0].softmax(dim=1), logits.log_softmax(dim=1)
    for target, value in (
        (y, torch.nn.functional.nll_loss(log_p, y, reduction="sum")),
        (reference, torch.nn.functional.kl_div(log_p, reference, reduction="sum")),
    ):
        (expected,) = torch.autograd.grad(value, logits, retain_graph=True)
        result = loss_gradient(logits.detach(), target, "cross_entropy")
        factor = result.abs().amax(1, keepdim=True) / expected.abs().amax(1, keepdim=True)
        torch.testing.assert_close(result, expected * factor)
        torch.testing.assert_close(factor.log2(), factor.log2().round())
        assert ((result.abs().amax(1) >= 0.5) & (result.abs().amax(1) <= 1)).all()


def test_gradient_of_a_confident_sample_does_not_underflow():
    gradient = loss_gradient(torch.tensor([[60.0, 0.0]]), torch.tensor([0]), "cross_entropy")
    assert gradient[0, 1] >= 0.5
    assert not loss_gradient(torch.tensor([[300.0, 0.0]]), torch.tensor([0]), "cross_entropy").any()
