import pytest
import torch
from torch import nn

from lightning_robustness._isolation.draws import Draws
from lightning_robustness.attacks._classifier import Classifier, open_classifier
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


def test_both_ways_into_the_model():
    space, x = InputSpace(mean=0.5, std=0.2), torch.rand(3, 4)
    classifier = Classifier(nn.Identity(), space, space.normalize(x), 2, DRAWS)
    torch.testing.assert_close(classifier.from_normalized(space.normalize(x)), space.normalize(x))
    torch.testing.assert_close(classifier(x), space.normalize(x))


def test_labels_need_a_class():
    classifier = Classifier(nn.Identity(), InputSpace(), torch.rand(3, 4), 4, DRAWS)
    with pytest.raises(ValueError, match=r"`y` to be from 0 to 3, .* to 4"):
        classifier(torch.rand(3, 4))


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


def test_a_batch_out_of_range_is_refused():
    with (
        pytest.raises(ValueError, match=r"\[0\.0, 1\.0\] but observed"),
        open_classifier(nn.Linear(2, 2), torch.full((1, 2), 3.0), torch.tensor([0])),
    ):
        pass
