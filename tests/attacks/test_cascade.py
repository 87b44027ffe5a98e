from dataclasses import replace

import pytest
import torch

from lightning_robustness.attacks import PGD, Cascade, Square, get_attack, run_attack


class Recorder:
    """An attack that notes what it sees."""

    def __init__(self, attack):
        self.attack, self.seen = attack, []

    def __call__(self, model, x, y):
        self.seen.append(len(x))
        return self.attack(model, x, y)


def test_each_attack_sees_the_survivors_of_those_before(digits, digits_network):
    x, y = digits[0][:300], digits[1][:300]
    first, second = PGD(eps=0.1, steps=2, start="clean"), Recorder(PGD(eps=0.1, steps=10))
    alone = run_attack(digits_network, first, x, y)
    result = run_attack(digits_network, Cascade(attacks=(first, second)), x, y)
    assert second.seen == [(alone.eligible & ~alone.success).sum()]
    torch.testing.assert_close(result.x_adv[alone.success], x_adv := alone.x_adv[alone.success])
    assert len(x_adv) > 0
    assert result.success_rate > alone.success_rate
    assert torch.equal(result.queries[alone.success], alone.queries[alone.success] + 1)


@pytest.mark.parametrize("network", ["digits_network", "robust_digits_network"])
def test_worst_is_at_least_each_of_its_parts(digits, request, network):
    network, x, y = request.getfixturevalue(network), digits[0][:100], digits[1][:100]
    strong, rivals, _ = get_attack("cascade", eps=0.15).attacks
    short = replace(rivals, restarts=2), Square(eps=0.15, num_queries=100)
    parts = [run_attack(network, attack, x, y) for attack in (strong, *short)]
    worst = Cascade(attacks=tuple(part.attack for part in parts))
    result = run_attack(network, worst, x, y)
    assert result.success_rate >= max(part.success_rate for part in parts)
    assert result.linf.max() <= 0.15 + 1e-6


def test_stops_when_nothing_is_left(digits, digits_network):
    never = Recorder(PGD())
    result = run_attack(digits_network, Cascade(attacks=[PGD(eps=1.0), never]), digits[0][:50], digits[1][:50])
    assert result.success_rate == 1
    assert never.seen == []


def test_budget_of_each_attack_is_checked(digits, digits_network):
    def too_far(model, x, y):
        return (x + 0.5).clamp(0, 1)

    too_far.eps, too_far.norm = 0.1, "linf"
    with pytest.raises(ValueError, match=r"too_far.*eps=0\.1 .* 0\.5 far"):
        run_attack(digits_network, Cascade(attacks=(PGD(eps=0.01), too_far)), digits[0][:20], digits[1][:20])


def test_targets_are_checked():
    with pytest.raises(ValueError, match="targeted=True"):
        Cascade(attacks=(PGD(),), targeted=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cascade", "ensemble"])
def test_as_shipped_every_member_is_reached_and_none_is_worse(digits, robust_digits_network, name):
    """Against torchattacks' APGD on all rivals with as many steps, and each member by itself."""
    x, y = digits[0][1200:1264], digits[1][1200:1264]
    attack = get_attack(name, eps=0.1)
    result = run_attack(robust_digits_network, attack, x, y)
    survivors = result.eligible & ~result.success
    assert 0 < survivors.sum() < result.eligible.sum()
    steps = sum(member.steps * member.num_restarts for member in attack.attacks[:2])
    assert result.queries[survivors].min() >= steps + attack.attacks[2].num_queries
    assert result.linf.max() <= 0.1 + 1e-6
    assert torch.equal(robust_digits_network(result.x_adv).argmax(1), result.adv_preds)
    for member in attack.attacks:
        alone = run_attack(robust_digits_network, member, x, y)
        assert (alone.success & ~result.success).sum() <= 1  # other random numbers
    rivals = {"steps": attack.attacks[1].steps, "n_restarts": 1}
    theirs = run_attack(robust_digits_network, get_attack("torchattacks:APGDT", eps=0.1, **rivals), x, y)
    assert result.success.sum() >= theirs.success.sum()
