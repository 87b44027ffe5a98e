import pytest
import torch
from torch import nn

from lightning_robustness import InputSpace
from lightning_robustness.functional import mart_loss, trades_loss
from lightning_robustness.functional.inner_maximization import maximize
from tests.utilities.test_sandbox import assert_same, snapshot, trained_once

OPTIONS = {"eps": 0.1, "alpha": 0.03, "steps": 5, "input_space": None, "seed": 0}


def by_hand(network, x, start, objective):
    """The published loop, from a given start."""
    x_adv = start
    for _ in range(OPTIONS["steps"]):
        x_adv.requires_grad_()
        (gradient,) = torch.autograd.grad(objective(network(x_adv)), x_adv)
        x_adv = x_adv.detach() + OPTIONS["alpha"] * gradient.sign()
        x_adv = torch.min(torch.max(x_adv, x - OPTIONS["eps"]), x + OPTIONS["eps"]).clamp(0, 1)
    return x_adv


def noise(monkeypatch, like):
    drawn = torch.randn_like(like)
    monkeypatch.setattr(torch, "randn_like", lambda tensor: drawn)
    return drawn


def assert_nearly_equal(x_adv, expected):
    """Rounding decides the sign of gradients that are nearly zero."""
    assert ((x_adv - expected).abs() > 1e-6).float().mean() < 1e-3


def test_cross_entropy_by_hand(digits, digits_network, monkeypatch):
    x, y = digits[0][:100], digits[1][:100]
    start = (x + 0.001 * noise(monkeypatch, x)).clamp(0, 1)
    expected = by_hand(digits_network, x, start, lambda logits: nn.functional.cross_entropy(logits, y))
    assert_nearly_equal(maximize(digits_network, x, y, **OPTIONS), expected)


def test_divergence_by_hand(digits, digits_network, monkeypatch):
    x = digits[0][:100]
    start = (x + 0.001 * noise(monkeypatch, x)).clamp(0, 1)
    p = digits_network(x).softmax(dim=1)
    expected = by_hand(
        digits_network,
        x,
        start,
        lambda logits: nn.functional.kl_div(logits.log_softmax(dim=1), p, reduction="sum"),
    )
    x_adv = maximize(digits_network, x, **OPTIONS)
    assert_nearly_equal(x_adv, expected)
    assert 0.09 < (x_adv - x).abs().max() <= 0.1 + 1e-6


def test_normalised_inputs_move_by_the_same_pixels(digits, digits_network):
    x, y = digits[0][:50], digits[1][:50]
    space = InputSpace(mean=0.25, std=0.5)
    expected = maximize(digits_network, x, y, **OPTIONS)
    normalised = maximize(
        lambda t: digits_network(space.unnormalize(t)), space.normalize(x), y, **OPTIONS | {"input_space": space}
    )
    torch.testing.assert_close(space.unnormalize(normalised), expected, atol=1e-5, rtol=0)


def test_no_range(digits_network):
    x = 3 * torch.randn(10, 1, 8, 8)
    x_adv = maximize(digits_network, x, **OPTIONS | {"input_space": InputSpace(low=None, high=None)})
    assert (x_adv - x).abs().max() <= 0.1 + 1e-6
    assert (x_adv.abs() > 1).float().mean() > 0.5


def test_no_trace():
    network, x = trained_once(), torch.rand(5, 4)
    before = snapshot(network)
    maximize(network, x, **OPTIONS)
    assert_same(before, snapshot(network))


def test_start_comes_from_the_seed_or_the_random_state(digits, digits_network):
    x = digits[0][:20]

    def run(seed):
        return maximize(digits_network, x, **OPTIONS | {"seed": seed, "steps": 1})

    assert torch.equal(run(3), run(3))
    assert not torch.equal(run(3), run(4))
    torch.manual_seed(5)
    first, second = run(None), run(None)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(run(None), first)


def test_half_precision(digits, digits_network):
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).to(torch.bfloat16)
    x_adv = maximize(network, digits[0][:10].to(torch.bfloat16), **OPTIONS)
    assert x_adv.dtype == torch.bfloat16
    assert (x_adv.float() - digits[0][:10]).abs().max() == pytest.approx(0.1, abs=0.005)


@pytest.mark.parametrize("loss", [trades_loss, mart_loss])
def test_a_model_without_a_graph(loss):
    layer, x, y = nn.Linear(2, 2), torch.ones(1, 2), torch.zeros(1).long()
    with pytest.raises(ValueError, match=r"differentiate with respect to the inputs .*`detach`.* or pass `x_adv=`"):
        loss(lambda inputs: layer(inputs.detach()).detach(), x, y)
    loss(layer, x, y, x_adv=x).backward()
    assert layer.weight.grad.any()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"eps": -1.0}, "`eps` to be non-negative but got -1.0"),
        ({"alpha": float("nan")}, "`alpha` to be non-negative but got nan"),
        ({"steps": 0}, "`steps` to be an integer of at least 1 but got 0"),
        ({"steps": True}, "`steps` to be an integer of at least 1 but got True"),
        ({"input_space": InputSpace(high=0.5)}, r"inputs in the range \[0.0, 0.5\] but observed"),
    ],
)
def test_bad_input(options, match):
    with pytest.raises(ValueError, match=match):
        maximize(nn.Linear(2, 2), torch.ones(1, 2), **OPTIONS | options)
