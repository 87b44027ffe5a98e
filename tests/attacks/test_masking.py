import pytest
import torch
from torch import nn

from lightning_robustness.attacks import PGD, Square, get_attack, masking_signs, run
from tests.attacks.linear import linear


def names(results, **options):
    return [sign.name for sign in masking_signs(results, **options)]


@pytest.fixture
def batch(digits):
    return digits[0][:150], digits[1][:150]


@pytest.mark.parametrize("network", ["digits_network", "robust_digits_network"])
def test_no_sign_where_nothing_is_masked(batch, request, network):
    network = request.getfixturevalue(network)
    attacks = [get_attack("fgsm", eps=eps) for eps in (0.05, 0.1)]
    attacks += [PGD(eps=eps) for eps in (0.05, 0.1)] + [Square(eps=eps, num_queries=50) for eps in (0.05, 0.1)]
    assert names([run(network, attack, *batch) for attack in attacks]) == []


def test_rounding_hides_gradients_from_white_box_attacks(batch, digits_network):
    def rounded(images):
        return digits_network((images * 4).round() / 4)

    results = [run(rounded, attack, *batch) for attack in (PGD(eps=0.2), Square(eps=0.2, num_queries=100))]
    signs = masking_signs(results)
    assert [sign.name for sign in signs] == ["black_box_beats_white_box", "zero_gradients"]
    assert "Square succeeds on" in signs[0].evidence
    assert "PGD on" in signs[0].evidence
    assert "PGD finds a gradient of zero for 100.0% of the samples" in signs[1].evidence
    # another budget is another question
    assert names([run(rounded, Square(eps=0.1, num_queries=5), *batch), results[0]]) == ["zero_gradients"]


def test_saturated_loss(batch, digits_network):
    """The gradient of cross-entropy does not underflow here, so that nothing is masked from it."""
    for loss in ("cross_entropy", "margin"):
        attack = PGD(eps=0.2, start="clean", loss=loss)
        assert names([run(lambda images: 1e4 * digits_network(images), attack, *batch)]) == []


def test_one_step_that_beats_many():
    """Steps that are too small to arrive."""
    model = linear([[-1.0], [0.0]], [0.6, 0.0])
    x, y = torch.full((20, 1), 0.5), torch.zeros(20, dtype=torch.long)
    one = run(model, get_attack("fgsm", eps=0.2), x, y)
    many = run(model, PGD(eps=0.2, alpha=0.01, steps=3, start="clean"), x, y)
    assert one.success_rate == 1
    assert many.success_rate == 0
    signs = masking_signs([one, many])
    assert [sign.name for sign in signs] == ["one_step_beats_many"]
    assert signs[0].evidence == "PGD with one step succeeds on 100.0%, PGD with 3 steps on 0.0%."


def test_success_that_does_not_rise_with_eps(batch, digits_network):
    weak = [run(digits_network, PGD(eps=eps, alpha=0.02, steps=3, start="clean"), *batch) for eps in (0.06, 0.2)]
    assert 0 < weak[0].success_rate < 1
    signs = masking_signs(weak)
    assert [sign.name for sign in signs] == ["not_rising_with_eps"]
    assert "with eps=0.06 and on" in signs[0].evidence
    assert names([run(digits_network, PGD(eps=eps), *batch) for eps in (0.01, 0.02, 0.1)]) == []


def test_probabilities(batch, digits_network):
    results = [run(nn.Sequential(digits_network, nn.Softmax(dim=1)), PGD(eps=0.1), *batch)]
    assert "probabilities" in names(results)
    assert names([run(nn.Sequential(digits_network, nn.LogSoftmax(dim=1)), PGD(eps=0.1), *batch)]) == []


def test_random_outputs(batch, digits_network):
    def noisy(images):
        return digits_network(images + 0.1 * torch.randn_like(images))

    assert names([run(noisy, PGD(eps=0.1), *batch)]) == ["random_outputs"]


def test_batches_of_one_attack_are_taken_together(batch, digits_network):
    def rounded(images):
        return digits_network((images * 4).round() / 4)

    attacks = PGD(eps=0.2), Square(eps=0.2, num_queries=50)
    batches = list(zip(batch[0].split(50), batch[1].split(50), strict=True))
    results = [run(rounded, attack, *part, index=i) for attack in attacks for i, part in enumerate(batches)]
    assert names(results) == ["black_box_beats_white_box", "zero_gradients"]
    assert names(results, tolerance=1.0) == []


def test_every_sign_explains_itself(batch, digits_network):
    for sign in masking_signs([run(nn.Sequential(digits_network, nn.Softmax(dim=1)), PGD(eps=0.1), *batch)]):
        assert all(text.endswith(".") for text in sign[1:])


def test_nothing_to_look_at():
    assert masking_signs([]) == []
