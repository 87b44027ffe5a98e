import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_robustness._isolation.draws import Draws
from lightning_robustness.attacks._classifier import Classifier, open_classifier
from lightning_robustness.attacks._steps import loss_gradient, loss_value, margin, margin_gradient
from lightning_robustness.input_space import InputSpace

DRAWS = Draws(torch.arange(3))


@pytest.mark.parametrize("shape", [(3, 2), (3, 2, 5), (3, 2, 4, 5)])
@pytest.mark.parametrize(
    "space", [InputSpace(), InputSpace(mean=0.5, std=0.2), InputSpace(mean=(0.5, 0.3), std=(0.2, 4))]
)
def test_normalisation_is_that_of_the_input_space(shape, space):
    x = torch.rand(shape)
    classifier = Classifier(nn.Identity(), space, x, 2, DRAWS)
    torch.testing.assert_close(classifier.normalize(x), space.normalize(x))
    torch.testing.assert_close(classifier.unnormalize(x), space.unnormalize(x))
    expected = (space.unnormalize(x + 0.1) - space.unnormalize(x)).flatten(1)
    torch.testing.assert_close(classifier.difference(x + 0.1, x), expected)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
def test_the_model_gets_its_precision_and_attacks_at_least_single(dtype, expected):
    x, seen = torch.rand(3, 4, dtype=dtype), []

    def model(inputs):
        seen.append(inputs.dtype)
        return inputs

    classifier = Classifier(model, InputSpace(mean=0.5), x, 2, DRAWS)
    working = classifier.unnormalize(x)
    assert working.dtype == expected
    assert classifier(working).dtype == expected
    assert seen == [dtype]


def test_rows_are_counted_and_the_device_is_known_without_parameters():
    x = torch.rand(3, 4)
    classifier = Classifier(lambda inputs: inputs, InputSpace(), x, 2, DRAWS)
    classifier(x)
    classifier(x[:2])
    assert classifier.num_rows == 5
    assert next(classifier.parameters()).device == x.device


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.5, 1.0]),
        (None, 1.0, [-2.0, 0.5, 1.0]),
        (0.0, None, [0.0, 0.5, 2.0]),
        (None, None, [-2.0, 0.5, 2.0]),
    ],
)
def test_clamp(low, high, expected):
    x = torch.tensor([[-2.0, 0.5, 2.0]])
    classifier = Classifier(nn.Identity(), InputSpace(low, high), x, 0, DRAWS)
    assert classifier.clamp(x)[0].tolist() == expected


@pytest.mark.parametrize("eval_mode", [True, False])
def test_a_classifier_in_a_sandbox(eval_mode):
    model, x, y = nn.Linear(2, 3), torch.rand(4, 2), torch.tensor([0, 1, 2, 0], dtype=torch.int32)
    with torch.inference_mode(), open_classifier(model, x, y, eval_mode=eval_mode) as (classifier, inner_x, inner_y):
        assert (classifier.low, classifier.high) == (0.0, 1.0)
        assert model.training != eval_mode
        assert torch.equal(inner_x, x)
        assert inner_x is not x
        assert inner_y.dtype == torch.long
        _, gradient = classifier.gradient(inner_x, torch.ones_like)
    torch.testing.assert_close(gradient, model.weight.sum(dim=0).expand(4, 2))
    assert model.training


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_infinite_gradients_count_as_steep_in_any_precision(dtype):
    """The square root of 0, in a model whose output attacks widen to at least single precision."""
    x = torch.tensor([[0.0, 0.25], [0.5, 0.25]], dtype=dtype)
    classifier = Classifier(torch.sqrt, InputSpace(), x, 1, Draws(torch.arange(2)))
    with pytest.warns(UserWarning, match="NaN or infinite"):
        _, gradient = classifier.gradient(classifier.unnormalize(x), torch.ones_like)
    assert gradient[0].tolist() == [3.0, 1.0]
    assert classifier.nonfinite.tolist() == [True, False]
