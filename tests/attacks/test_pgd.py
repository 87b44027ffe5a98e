import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torchattacks
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_robustness._isolation.draws import Draws
from lightning_robustness._isolation.sandbox import sandbox
from lightning_robustness.attacks import PGD, get_attack, run_attack
from lightning_robustness.input_space import InputSpace
from tests.attacks.linear import closest_boundary, linear, random_linear

UNBOUNDED = InputSpace(low=None, high=None)


@pytest.fixture
def torch_draws(monkeypatch):
    """Let attacks draw from the global random state, as those of torchattacks do, instead of per sample."""
    draw = {
        "uniform": lambda self, _, shape, low=0.0, high=1.0, dtype=torch.float32: torch.empty(
            len(self), *shape, dtype=dtype
        ).uniform_(low, high),
        "normal": lambda self, _, shape, dtype=torch.float32: torch.randn(len(self), *shape, dtype=dtype),
        "signs": lambda self, _, shape, dtype=torch.float32: torch.randn(len(self), *shape, dtype=dtype).sign(),
    }
    for name, function in draw.items():
        monkeypatch.setattr(Draws, name, function)


def reference(network, x, y, name, **options):
    """Images of torchattacks, with the random numbers that `run_attack` would give."""
    with sandbox(network, x, y) as (x, y):
        return getattr(torchattacks, name)(network, **options)(x, y)


def success_rate(network, x, y, x_adv):
    right = network(x).argmax(1) == y
    return ((network(x_adv).argmax(1) != y) & right).sum().item() / right.sum().item()


def wide(network):
    """The same network in double precision, where no rounding turns the sign of a gradient that is almost zero."""
    return copy.deepcopy(network).double()


REFERENCES = {"fgsm": "FGSM", "bim": "BIM", "mifgsm": "MIFGSM", "rfgsm": "RFGSM", "pgd": "PGD"}


@pytest.mark.usefixtures("torch_draws")
@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("targeted", [False, True])
def test_settings_give_the_other_attacks(digits, robust_digits_network, name, targeted):
    options = {} if name == "fgsm" else {"alpha": 0.03, "steps": 6}
    network, x, y = wide(robust_digits_network), digits[0][:64].double(), digits[1][:64]
    attack = get_attack(name, eps=0.2, **options, all_steps=True, targeted=targeted)
    with sandbox(network, x, y) as (x, y):
        their = getattr(torchattacks, REFERENCES[name])(network, eps=0.2, **options)
        if targeted:
            their.set_mode_targeted_by_function(lambda images, labels: labels)
        expected = their(x, (y + 1) % 10 if targeted else y)
    result = run_attack(network, attack, x, (y + 1) % 10 if targeted else y)
    torch.testing.assert_close(result.x_adv, expected, atol=2e-6, rtol=0)


@pytest.mark.usefixtures("torch_draws")
@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize(("network", "eps"), [("digits_network", 0.1), ("robust_digits_network", 0.2)])
def test_success_rate_of_torchattacks_at_least(digits, request, name, network, eps):
    options = {} if name == "fgsm" else {"alpha": 0.02, "steps": 12}
    network, x, y = request.getfixturevalue(network), digits[0][:1150], digits[1][:1150]
    right = network(x).argmax(dim=1) == y  # the others are not attacked, and would take random numbers in theirs alone
    x, y = x[right], y[right]
    expected = success_rate(network, x, y, reference(network, x, y, REFERENCES[name], eps=eps, **options))
    result = run_attack(network, get_attack(name, eps=eps, **options), x, y)
    assert result.eligible.sum() == len(x) > 1000
    assert result.success_rate >= expected - 1.5 / len(x)  # rounding may decide one sample
    assert result.queries[result.success].float().mean() < result.attack.steps + 1e-6


def test_l2_success_rate_of_torchattacks_at_least(digits, robust_digits_network):
    x, y = digits
    expected = reference(robust_digits_network, x, y, "PGDL2", eps=1.0, alpha=0.2, steps=10)
    result = run_attack(robust_digits_network, PGD(eps=1.0, alpha=0.2, norm="l2"), x, y)
    assert result.success_rate >= success_rate(robust_digits_network, x, y, expected) - 0.005
    assert result.l2.max() <= 1.0 + 1e-5


@pytest.mark.parametrize("network", ["digits_network", "robust_digits_network"])
def test_success_is_monotone_in_eps_steps_and_restarts(digits, request, network):
    network, x, y = request.getfixturevalue(network), digits[0][:400], digits[1][:400]

    def rate(**options):
        return run_attack(network, PGD(**{"eps": 0.12, "alpha": 0.02, "steps": 8} | options), x, y).success_rate

    for name, values in (
        ("eps", (0.0, 0.03, 0.06, 0.1, 0.15, 0.25)),
        ("steps", (1, 2, 4, 9)),
        ("restarts", (1, 3)),
    ):
        rates = [rate(**{name: value}) for value in values]
        assert rates == sorted(rates), f"{name}: {rates}"
        assert rates[-1] > rates[0]


def test_a_broken_sample_keeps_its_image_and_costs_no_more(digits, digits_network):
    x, y = digits[0][:200], digits[1][:200]
    attack = PGD(eps=0.2, alpha=0.02, steps=15)
    result = run_attack(digits_network, attack, x, y)
    for steps in (1, 2, 5, 10):
        earlier = run_attack(digits_network, PGD(eps=0.2, alpha=0.02, steps=steps), x, y)
        left = earlier.success & (earlier.queries < steps)  # seen to be broken, not just after the last step
        torch.testing.assert_close(result.x_adv[left], earlier.x_adv[left])
        assert torch.equal(result.queries[left], earlier.queries[left])
    assert (result.queries[~result.eligible] == 0).all()
    assert (result.queries[result.eligible & ~result.success] == 15).all()


@pytest.mark.usefixtures("torch_draws")
def test_divergence_from_a_gaussian_start_is_that_of_torchattacks(digits, digits_network):
    """TPGD is the inner maximisation of TRADES, but for a start that it clamps: away from the ends of the range."""
    x, y = digits[0][:64].double().clamp(0.01, 0.99), digits[1][:64]
    network = copy.deepcopy(digits_network).double()  # single precision loses the gradients of small changes
    expected = reference(network, x, y, "TPGD", eps=0.1, alpha=0.03, steps=5)
    attack = PGD(eps=0.1, alpha=0.03, steps=5, start="gaussian", loss="kl", all_steps=True)
    result = run_attack(network, attack, x, y)
    torch.testing.assert_close(result.x_adv, expected, atol=1e-9, rtol=0)
    assert (result.queries == 6).all()


def test_a_sample_that_is_broken_at_a_gaussian_start_stays_in_range():
    model = linear([[1.0, 0.0], [0.0, 1.0]])
    x, y = torch.zeros(200, 2), torch.zeros(200, dtype=torch.long)
    for norm, loss in (("linf", "kl"), ("l2", "cross_entropy")):
        result = run_attack(model, PGD(eps=1e-4, start="gaussian", norm=norm, loss=loss), x, y)
        first = result.queries == (2 if loss == "kl" else 1)
        assert 20 < first.sum() < 180
        assert result.x_adv.min() == 0
        assert result.x_adv[first].max() <= 1e-4 * (1 + 1e-6)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    eps=st.floats(0.0, 0.5),
    norm=st.sampled_from(["linf", "l2"]),
    start=st.sampled_from(["uniform", "gaussian"]),
    loss=st.sampled_from(["cross_entropy", "margin", "rivals", "kl", ("cross_entropy", "margin")]),
    schedule=st.sampled_from(["constant", "shrinking", "adaptive"]),
    momentum=st.sampled_from([0.0, 0.5, 1.0]),
    num_classes=st.integers(2, 4),
    restarts=st.integers(2, 3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_budget_and_range_hold(seed, eps, norm, start, loss, schedule, momentum, num_classes, restarts, dtype):
    model = random_linear(seed, num_classes).to(dtype)
    x = torch.rand(9, 6, generator=torch.Generator().manual_seed(seed)).round(decimals=1).to(dtype)
    y = model(x).argmax(1)
    for all_steps in (False, True):
        attack = PGD(
            start=start if start == "gaussian" or loss == "kl" or not all_steps else "clean",
            eps=eps,
            steps=8 if schedule == "adaptive" else 4,
            norm=norm,
            loss=loss,
            schedule=schedule,
            momentum=0.0 if schedule == "adaptive" else momentum,
            restarts=restarts,
            all_steps=all_steps,
        )
        result = run_attack(model, attack, x, y, seed=seed)
        assert 0 <= result.x_adv.min() <= result.x_adv.max() <= 1
        rounding = 4 * torch.finfo(dtype).eps
        assert (result.linf if norm == "linf" else result.l2).max() <= eps + rounding
        assert torch.equal(result.adv_preds, model(result.x_adv).argmax(1))


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**31), eps=st.floats(0.01, 0.5), norm=st.sampled_from(["linf", "l2"]))
def test_two_classes_and_a_linear_model_in_closed_form(seed, eps, norm):
    model = random_linear(seed, num_classes=2)
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(seed))
    y = model(x).argmax(1)
    distance = closest_boundary(model, x, y, norm)
    result = run_attack(model, PGD(eps=eps, norm=norm, steps=5, start="clean"), x, y, input_space=UNBOUNDED)
    certain = (distance - eps).abs() > 1e-4
    assert torch.equal(result.success[certain], (distance < eps)[certain])


@pytest.mark.parametrize(
    ("loss", "targeted"),
    [("cross_entropy", False), ("cross_entropy", True), ("margin", False), ("margin", True), ("rivals", False)],
)
def test_confident_samples_move(loss, targeted):
    model = linear([[300.0, 0.0], [0.0, 300.0]])
    x, y = torch.tensor([[0.9, 0.1]]), torch.tensor([int(targeted)])
    result = run_attack(model, PGD(eps=0.5, start="clean", loss=loss, targeted=targeted), x, y)
    assert not result.zero_gradients.any()
    assert result.success.all()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"steps": 1}, 0.2),
        ({"steps": 10}, 0.05),
        ({"schedule": "shrinking"}, 0.4),
        ({"schedule": "adaptive"}, 0.4),
        ({"schedule": "shrinking", "alpha": 0.1}, 0.1),
    ],
)
def test_default_step_size(options, expected):
    assert PGD(eps=0.2, **options).step_size == pytest.approx(expected)


@pytest.mark.parametrize("steps", [1, 2, 5, 10])
def test_shrinking_steps_in_closed_form(steps):
    """Far from the bounds, the gradient of a linear model is the same everywhere: what moves is the sum of steps."""
    attack = PGD(eps=9.0, alpha=0.4, steps=steps, start="clean", schedule="shrinking", all_steps=True)
    x = torch.zeros(1, 2)
    result = run_attack(linear([[1.0, 0.0], [0.0, 1.0]]), attack, x, torch.tensor([0]), input_space=UNBOUNDED)
    sizes = np.geomspace(0.4, 0.02, steps) if steps > 1 else [0.4]
    assert result.x_adv[0].tolist() == pytest.approx([-sum(sizes), sum(sizes)], rel=1e-5)


def test_restarts_take_losses_in_turn_on_the_survivors(digits, robust_digits_network):
    x, y = digits[0][:600], digits[1][:600]
    settings = {"eps": 0.2, "steps": 4, "start": "clean"}
    first, second = (
        run_attack(robust_digits_network, PGD(**settings, loss=loss), x, y) for loss in ("cross_entropy", "margin")
    )
    assert (second.success & ~first.success).any()
    both = run_attack(robust_digits_network, PGD(**settings, loss=["cross_entropy", "margin"]), x, y)
    assert torch.equal(both.success, first.success | second.success)
    assert torch.equal(both.x_adv[first.success], first.x_adv[first.success])
    later = both.success & ~first.success
    assert torch.equal(both.x_adv[later], second.x_adv[later])
    assert torch.equal(both.queries[first.success], first.queries[first.success] + 1)
    assert torch.equal(both.queries[later], second.queries[later] + 5)
    assert PGD(loss=["margin", "rivals"]) == PGD(loss=("margin", "rivals"))


def test_a_copy_with_other_losses_has_a_start_for_each():
    attack = replace(PGD(), loss=("cross_entropy", "margin"))
    assert attack.num_restarts == 2
    assert replace(attack, loss="margin").num_restarts == 1
    assert replace(PGD(restarts=3), loss=("cross_entropy", "margin")).num_restarts == 3


def test_rivals_are_attacked_one_by_one():
    """The highest rival cannot win within the budget, the second can, the third does not exist."""
    model = linear([[0.0, 0.0], [0.25, 0.0], [0.0, 4.0]], [1.0, 0.5, 0.0])
    x, y = torch.zeros(1, 2), torch.tensor([0])
    attack = {"eps": 0.5, "steps": 3, "start": "clean", "loss": "rivals"}
    assert not run_attack(model, PGD(**attack), x, y, input_space=UNBOUNDED).success.any()
    assert run_attack(model, PGD(**attack, restarts=2), x, y, input_space=UNBOUNDED).success.all()
    for restarts, queries in ((1, 4), (2, 4 + 1 + 4), (9, 4 + 1 + 4 + 1)):
        result = run_attack(model, PGD(**attack | {"eps": 0.1}, restarts=restarts), x, y, input_space=UNBOUNDED)
        assert result.queries.tolist() == [queries]


def test_fast_pgd_breaks_more_than_ten_times_the_gradients(digits, robust_digits_network):
    x, y = digits[0][:700], digits[1][:700]
    plain = run_attack(robust_digits_network, PGD(eps=0.2, steps=200), x, y)
    strong = run_attack(robust_digits_network, get_attack("pgd", eps=0.2, strength="fast"), x, y)
    assert strong.success.sum() > plain.success.sum()
    assert strong.queries.max() == 17


@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.2), ("l2", 1.2)])
@pytest.mark.parametrize("network", ["digits_network", "robust_digits_network"])
def test_adaptive_steps_break_what_those_of_torchattacks_do(digits, request, network, norm, eps):
    network, x, y = request.getfixturevalue(network), digits[0][:400], digits[1][:400]
    theirs = [torchattacks.APGD(network, norm.capitalize(), eps, steps=40, seed=seed) for seed in range(2)]
    expected = [success_rate(network, x, y, reference_attack(x, y).detach()) for reference_attack in theirs]
    attack = PGD(eps=eps, norm=norm, steps=40, schedule="adaptive")
    rates = [run_attack(network, attack, x, y, seed=seed).success_rate for seed in range(2)]
    assert sum(rates) >= sum(expected) - 2 * 0.005


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"loss": ("margin", "ce")}, "`loss`.*'ce'"),
        ({"loss": ()}, "`loss`.*`restarts`"),
        ({"loss": ("margin", "kl"), "restarts": 1}, "Leave `restarts` out"),
        ({"loss": "rivals", "targeted": True}, 'Use loss="margin"'),
        ({"schedule": "adaptive", "momentum": 0.5}, "momentum"),
        ({"norm": "l2", "start": "sign"}, "`start`"),
        ({"loss": "kl", "start": "clean"}, 'loss="kl".*start=.clean.'),
        ({"loss": "kl", "targeted": True}, 'loss="kl".*targeted=True'),
    ],
)
def test_combinations_are_checked(options, match):
    with pytest.raises(ValueError, match=match):
        PGD(**options)
