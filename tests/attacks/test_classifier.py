import pytest
import torch
from torch import nn

from lightning_robustness.attacks.classifier import Classifier
from lightning_robustness.utilities.input_space import InputSpace

LABELS = torch.tensor([0, 1, 2])


@pytest.mark.parametrize("shape", [(3, 2), (3, 2, 5), (3, 2, 4, 5)])
@pytest.mark.parametrize(
    "space", [InputSpace(), InputSpace(mean=0.5, std=0.2), InputSpace(mean=(0.5, 0.3), std=(0.2, 4))]
)
def test_normalisation_is_that_of_the_input_space(shape, space):
    x = torch.rand(shape)
    classifier = Classifier(nn.Identity(), space, x, LABELS)
    torch.testing.assert_close(classifier.normalize(x), space.normalize(x))
    torch.testing.assert_close(classifier.unnormalize(x), space.unnormalize(x))
    expected = (space.unnormalize(x + 0.1) - space.unnormalize(x)).flatten(1)
    torch.testing.assert_close(classifier.distance(x + 0.1, x), expected)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
def test_the_model_gets_its_precision_and_attacks_at_least_single(dtype, expected):
    x, seen = torch.rand(3, 4, dtype=dtype), []

    def model(inputs):
        seen.append(inputs.dtype)
        return inputs

    classifier = Classifier(model, InputSpace(mean=0.5), x, LABELS)
    working = classifier.unnormalize(x)
    assert working.dtype == expected
    assert classifier(working).dtype == expected
    assert seen == [dtype]


def test_rows_are_counted_and_the_device_is_known_without_parameters():
    x = torch.rand(3, 4)
    classifier = Classifier(lambda inputs: inputs, InputSpace(), x, LABELS)
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
    classifier = Classifier(nn.Identity(), InputSpace(low, high), x, LABELS[:1])
    assert classifier.clamp(x)[0].tolist() == expected
