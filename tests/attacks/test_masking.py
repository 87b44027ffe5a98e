from dataclasses import dataclass, replace

import pytest
import torch
from scipy import stats
from torch import nn

from lightning_robustness.attacks import PGD, AttackResult, Square, get_attack, masking_signs, run_attack
from lightning_robustness.attacks.masking import LEVEL, binomial_tail, is_higher_rate, is_more_often, is_more_than
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
    assert names([run_attack(network, attack, *batch) for attack in attacks]) == []


@pytest.fixture
def rounded(digits_network):
    """A network whose gradients are hidden by rounding."""
    return lambda images: digits_network((images * 4).round() / 4)


def test_rounding_hides_gradients_from_white_box_attacks(batch, rounded):
    results = [run_attack(rounded, attack, *batch) for attack in (PGD(eps=0.2), Square(eps=0.2, num_queries=100))]
    signs = masking_signs(results)
    assert [sign.name for sign in signs] == ["black_box_beats_white_box", "zero_gradients"]
    assert "Square succeeds on" in signs[0].evidence
    assert "PGD on" in signs[0].evidence
    assert "PGD finds a gradient of zero for 100.0% of the samples" in signs[1].evidence
    # another budget is another question
    assert names([run_attack(rounded, Square(eps=0.1, num_queries=5), *batch), results[0]]) == ["zero_gradients"]


@pytest.mark.parametrize("scale", [30, 1000])
def test_confident_logits_hide_gradients_from_an_attack_that_underflows(digits, digits_network, scale):
    x, y = digits[0][:300], digits[1][:300]
    attacks = get_attack("torchattacks:PGD", eps=0.2, alpha=0.05, steps=10), Square(eps=0.2, num_queries=100)
    assert names([run_attack(digits_network, attack, x, y) for attack in attacks]) == []
    results = [run_attack(lambda images: scale * digits_network(images), attack, x, y) for attack in attacks]
    assert names(results) == ["black_box_beats_white_box"]


def test_a_filter_that_stops_gradients(batch, digits_network):
    def filtered(images):
        smooth = nn.functional.avg_pool2d(images, 3, 1, 1)
        return digits_network(smooth.detach() + 1e-3 * (images - images.detach()).flip(3))

    results = [run_attack(filtered, attack, *batch) for attack in (PGD(eps=0.2), Square(eps=0.2, num_queries=200))]
    assert "black_box_beats_white_box" in names(results)


class Saturating(nn.Module):
    """An activation that is flat almost everywhere, without a gradient of exactly zero."""

    def forward(self, x):
        return torch.sigmoid(200 * x)


@pytest.fixture(scope="module")
def saturating_network(digits):
    """A network that learned with a saturating first layer, as people train them."""
    images, labels = digits[0][:1200], digits[1][:1200]
    torch.manual_seed(0)
    first = nn.Conv2d(1, 16, 3, padding=1), Saturating(), nn.Flatten()
    network = nn.Sequential(*first, nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(8):
        for rows in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images[rows]), labels[rows]).backward()
            optimizer.step()
    return network.eval().requires_grad_(False)


def test_a_trained_network_on_which_fast_pgd_misses_some_points(digits, saturating_network):
    x, y = digits[0][1200:], digits[1][1200:]
    pgd, square = (
        run_attack(saturating_network, attack, x, y)
        for attack in (get_attack("pgd", eps=0.1, strength="fast"), Square(eps=0.1, num_queries=1000))
    )
    assert (pgd.preds == y).double().mean() > 0.9
    missed = (square.success & ~pgd.success).double().mean()
    assert 0.02 < missed < 0.1
    assert names([pgd, square]) == ["black_box_beats_white_box"]


def result_of(attack, success, eligible=None):
    """A result in which an attack broke given samples."""
    success = torch.as_tensor(success)
    zeros = torch.zeros(len(success))
    return AttackResult(
        attack=attack,
        x_adv=zeros,
        preds=zeros.long(),
        adv_preds=success.long(),
        eligible=torch.ones_like(success) if eligible is None else eligible,
        success=success,
        l2=zeros,
        linf=zeros,
        queries=zeros.long(),
        zero_gradients=None,
        probabilities=False,
        deterministic=True,
    )


def broken(number, *ranges):
    """Samples of which ranges are broken."""
    success = torch.zeros(number, dtype=torch.bool)
    for start, stop in ranges:
        success[start:stop] = True
    return success


def test_white_box_that_misses_four_points():
    """Although the black box breaks fewer samples in total."""
    white, black = broken(500, (0, 100)), broken(500, (40, 120))
    signs = masking_signs([result_of(PGD(), white), result_of(Square(), black)])
    assert [sign.name for sign in signs] == ["black_box_beats_white_box"]
    assert signs[0].evidence == (
        "Square succeeds on 16.0%, PGD on 20.0%; 20 of 500 samples are broken by the first and by no attack with "
        "gradients."
    )
    assert names([result_of(PGD(), white), result_of(PGD(steps=20), black), result_of(Square(), black)]) == []


@pytest.mark.parametrize("number", [3, 5, 10, 100, 1000])
def test_three_samples_never_make_a_sign(number):
    """Whichever attack breaks three more than the other."""
    more, none = broken(number, (0, 3)), broken(number)
    for first, second in ((more, none), (none, more)):
        results = [
            result_of(attack, success)
            for attacks, success in (((Square(), PGD(steps=1), PGD(eps=0.01)), first), ((PGD(), PGD(eps=0.02)), second))
            for attack in attacks
        ]
        assert names(results) == []


def test_samples_that_cannot_be_paired_are_compared_by_rates():
    white = result_of(PGD(), broken(300, (0, 60)))
    for number, expected in ((160, ["black_box_beats_white_box"]), (90, [])):
        assert names([white, result_of(Square(), broken(400, (0, number)))]) == expected


def test_honest_attacks_rarely_make_a_sign():
    """White box and black box break the same share at random, and the white box misses one sample in a hundred."""
    generator, alarms = torch.Generator().manual_seed(0), 0
    for _ in range(1000):
        white = torch.rand(300, generator=generator) < 0.5
        missed = ~white & (torch.rand(300, generator=generator) < 0.02)
        black = missed | (white & (torch.rand(300, generator=generator) < 0.9))
        one = white & (torch.rand(300, generator=generator) < 0.9) | missed
        alarms += bool(names([result_of(PGD(), white), result_of(Square(), black), result_of(PGD(steps=1), one)]))
    assert alarms <= 20


def test_one_step_that_beats_many():
    """Steps that are too small to arrive."""
    model = linear([[-1.0], [0.0]], [0.6, 0.0])
    x, y = torch.full((20, 1), 0.5), torch.zeros(20, dtype=torch.long)
    one = run_attack(model, get_attack("fgsm", eps=0.2), x, y)
    many = run_attack(model, PGD(eps=0.2, alpha=0.01, steps=3, start="clean"), x, y)
    assert one.success_rate == 1
    assert many.success_rate == 0
    signs = masking_signs([one, many])
    assert [sign.name for sign in signs] == ["one_step_beats_many"]
    assert signs[0].evidence == "PGD with one step succeeds on 100.0%, PGD with 3 steps on 0.0%."


def test_success_that_does_not_rise_with_eps(batch, digits_network):
    weak = [run_attack(digits_network, PGD(eps=eps, alpha=0.02, steps=3, start="clean"), *batch) for eps in (0.06, 0.2)]
    assert 0 < weak[0].success_rate < 1
    signs = masking_signs(weak)
    assert [sign.name for sign in signs] == ["not_rising_with_eps"]
    assert "with eps=0.06 and on" in signs[0].evidence
    assert names([run_attack(digits_network, PGD(eps=eps), *batch) for eps in (0.01, 0.02, 0.1)]) == []


def test_probabilities(batch, digits_network):
    results = [run_attack(nn.Sequential(digits_network, nn.Softmax(dim=1)), PGD(eps=0.1), *batch)]
    assert "probabilities" in names(results)
    assert names([run_attack(nn.Sequential(digits_network, nn.LogSoftmax(dim=1)), PGD(eps=0.1), *batch)]) == []


def test_random_outputs(batch, digits_network):
    def noisy(images):
        return digits_network(images + 0.1 * torch.randn_like(images))

    assert names([run_attack(noisy, PGD(eps=0.1), *batch)]) == ["random_outputs"]


def test_batches_of_one_attack_are_taken_together(batch, rounded):
    attacks = PGD(eps=0.2), Square(eps=0.2, num_queries=50)
    batches = list(zip(batch[0].split(50), batch[1].split(50), strict=True))
    results = [run_attack(rounded, attack, *part, index=i) for attack in attacks for i, part in enumerate(batches)]
    assert names(results) == ["black_box_beats_white_box", "zero_gradients"]
    assert names(results, tolerance=1.0) == []


@dataclass
class Shift:
    """An attack of a user, whose fields can be neither hashed nor, by a single comparison, compared."""

    eps: float
    direction: torch.Tensor
    norm: str = "linf"

    def __call__(self, model, x, y):
        return x + self.eps * self.direction


def test_attacks_with_any_fields():
    """Equal ones are taken together, and budgets of one kind compared."""
    attacks = [Shift(eps, torch.tensor(direction)) for eps in (0.1, 0.2) for direction in ([1.0, 0.0], [1.0, 1.0])]
    few, many = broken(50), broken(50, (0, 30))
    halves = [result_of(replace(attack), few) for attack in attacks[:2] for _ in range(2)]
    assert names([*halves, *(result_of(attack, many) for attack in attacks)]) == []
    fewer = [result_of(replace(attacks[number]), success) for number, success in ((0, many), (2, few), (2, few))]
    assert names([*fewer, result_of(attacks[0], many)]) == ["not_rising_with_eps"]


@pytest.mark.parametrize("probability", [0.0, 0.01, 0.3, 0.5, 1.0])
@pytest.mark.parametrize(("successes", "trials"), [(0, 0), (0, 5), (3, 3), (7, 500), (20, 100), (600, 1000), (5, 3)])
def test_binomial_tail(successes, trials, probability):
    expected = stats.binom.sf(successes - 1, trials, probability)
    assert binomial_tail(successes, trials, probability) == pytest.approx(expected, rel=1e-9, abs=1e-300)


@pytest.mark.parametrize(("first", "second"), [(7, 0), (6, 0), (20, 8), (20, 12), (0, 9)])
def test_more_often_is_the_exact_test_of_mcnemar(first, second):
    p_value = stats.binomtest(first, first + second, 0.5, alternative="greater").pvalue
    assert is_more_often(first, second, 100, 0.0) == (p_value < LEVEL)
    assert not is_more_often(first, second, 100_000, 0.01)


def test_more_than_a_share_and_more_than_a_handful():
    assert not is_more_than(6, 6, 0.01)
    assert is_more_than(7, 7, 0.01)
    assert not is_more_than(8, 500, 0.01)
    assert is_more_than(13, 500, 0.01)


def test_rates_of_two_samples_that_are_equal_rarely_differ():
    generator = torch.Generator().manual_seed(0)
    for rate in (0.02, 0.5):
        counts = torch.binomial(torch.full((2000, 2), 200.0), torch.full((2000, 2), rate), generator=generator)
        alarms = sum(is_higher_rate((int(a), 200), (int(b), 200), 0.0) for a, b in counts)
        assert alarms <= 2000 * 0.015
    assert is_higher_rate((60, 200), (30, 200), 0.01)
    assert not is_higher_rate((60, 200), (30, 200), 0.1)
