import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_robustness._isolation.sandbox import full_precision
from lightning_robustness.attacks import CW, DDN, PGD, Cascade, MinimumNormCW, Square, get_attack, run_attack
from lightning_robustness.input_space import InputSpace
from tests._isolation.test_sandbox import assert_same, snapshot
from tests.attacks.cases import BUILT_IN, FOREIGN, failing, foolbox_fgsm, network_in_training
from tests.attacks.linear import linear


@pytest.mark.parametrize(
    ("attack", "mode"),
    [*((attack, "inference") for attack in [*BUILT_IN, *FOREIGN]), ("pgd", "plain"), ("careless", "no_grad")],
)
def test_no_trace(digits, digits_network, attack, mode):
    attack, network = (BUILT_IN | FOREIGN)[attack], network_in_training(digits_network)
    context = {"plain": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    before = snapshot(network)
    with context():
        x, y = digits[0][:6].clone(), digits[1][:6].clone()
        copies = x.clone(), y.clone()
        if attack is failing:
            with pytest.raises(RuntimeError, match="in the middle of it"):
                run_attack(network, attack, x, y)
        else:
            result = run_attack(network, attack, x, y)
            assert not result.x_adv.requires_grad
    assert_same(before, snapshot(network))
    assert torch.equal(x, copies[0])
    assert torch.equal(y, copies[1])


@pytest.mark.gpu_like
@pytest.mark.parametrize("attack", ["pgd", "pgd_l2", "square", "torchattacks:Square", "torchattacks:PGD"])
def test_same_seed_same_result_whatever_ran_before(digits, digits_network, attack):
    attack, x, y = (BUILT_IN | FOREIGN)[attack], digits[0][:30], digits[1][:30]
    first = run_attack(digits_network, attack, x, y, seed=1, index=2)
    torch.rand(17)
    run_attack(digits_network, "torchattacks:APGD", x[:3], y[:3])
    second = run_attack(digits_network, attack, x, y, seed=1, index=2)
    assert torch.equal(first.x_adv, second.x_adv)
    assert torch.equal(first.queries, second.queries)


@pytest.mark.parametrize("attack", ["pgd", "pgd_l2", "square", "square_l2"])
def test_other_seed_or_index_other_random_numbers(digits, digits_network, attack):
    x, y = digits[0][:30], digits[1][:30]
    results = [
        run_attack(digits_network, BUILT_IN[attack], x, y, seed=s, index=i).x_adv for s, i in ((0, 0), (1, 0), (0, 1))
    ]
    assert not torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.gpu_like
@pytest.mark.parametrize("attack", BUILT_IN)
def test_normalisation_changes_nothing(digits, digits_network, attack):
    """Budgets and distortions are in un-normalised units; results are in the model's own space."""
    attack, x, y = BUILT_IN[attack], digits[0][:40], digits[1][:40]
    space = InputSpace(mean=(0.3,), std=(0.25,))
    plain = run_attack(digits_network, attack, x, y)
    result = run_attack(
        lambda images: digits_network(images * 0.25 + 0.3), attack, space.normalize(x), y, input_space=space
    )
    assert torch.equal(result.preds, plain.preds)
    assert (result.success == plain.success).float().mean() >= 0.95
    close = (space.unnormalize(result.x_adv) - plain.x_adv).abs() < 1e-3
    assert close.float().mean() > 0.9
    torch.testing.assert_close(result.linf, (result.x_adv - space.normalize(x)).flatten(1).abs().amax(1) * 0.25)
    torch.testing.assert_close(result.l2, (result.x_adv - space.normalize(x)).flatten(1).norm(dim=1) * 0.25)


@pytest.mark.gpu_like
@pytest.mark.parametrize("attack", BUILT_IN)
def test_what_a_result_holds(digits, digits_network, attack):
    x, y = digits[0][:60], digits[1][:60].clone()
    y[::4] = (y[::4] + 1) % 10  # wrong before the attack
    result = run_attack(digits_network, BUILT_IN[attack], x, y)
    with full_precision():
        assert torch.equal(result.preds, digits_network(x).argmax(1))
        assert torch.equal(result.adv_preds, digits_network(result.x_adv).argmax(1))
    assert torch.equal(result.eligible, result.preds == y)
    assert torch.equal(result.success, (result.preds == y) & (result.adv_preds != y))
    assert torch.equal(result.x_adv[::4], x[::4])
    assert (result.queries[::4] == 0).all()
    assert (result.queries[result.eligible] > 0).all()
    torch.testing.assert_close(result.l2, (result.x_adv - x).flatten(1).norm(dim=1))
    torch.testing.assert_close(result.linf, (result.x_adv - x).flatten(1).abs().amax(1))
    assert result.success_rate == pytest.approx(result.success.sum().item() / result.eligible.sum().item())
    assert 0 <= result.x_adv.min() <= result.x_adv.max() <= 1
    assert f"{int(result.success.sum())} of {int(result.eligible.sum())} eligible samples broken, 60 samples" in repr(
        result
    )


@pytest.mark.parametrize("attack", [*BUILT_IN, "torchattacks:PGD", "foolbox"])
def test_nothing_to_attack(digits, digits_network, attack):
    attack, x = (BUILT_IN | FOREIGN)[attack], digits[0][:5]
    wrong = run_attack(digits_network, attack, x, (digits_network(x).argmax(1) + 1) % 10)
    assert torch.equal(wrong.x_adv, x)
    assert not wrong.eligible.any()
    assert wrong.success_rate == 0
    empty = run_attack(digits_network, attack, x[:0], torch.zeros(0, dtype=torch.long))
    assert empty.x_adv.shape == (0, 1, 8, 8)
    assert empty.success_rate == 0
    single = run_attack(digits_network, attack, x[:1], digits_network(x[:1]).argmax(1))
    assert single.eligible.all()


@pytest.mark.gpu_like
@pytest.mark.parametrize("attack", BUILT_IN)
def test_two_classes(attack):
    x = torch.rand(20, 1, 6, 6)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
    result = run_attack(model, BUILT_IN[attack], x, model(x).argmax(1))
    assert result.eligible.all()
    with full_precision():
        assert torch.equal(result.adv_preds, model(result.x_adv).argmax(1))


@pytest.mark.parametrize(
    ("attack", "dtype"),
    [*((attack, torch.bfloat16) for attack in BUILT_IN), ("pgd", torch.float16), ("pgd", torch.float64)],
)
def test_precisions(digits, digits_network, attack, dtype):
    x, y = digits[0][:40], digits[1][:40]
    plain = run_attack(digits_network, BUILT_IN[attack], x, y)
    result = run_attack(copy.deepcopy(digits_network).to(dtype), BUILT_IN[attack], x.to(dtype), y)
    assert result.x_adv.dtype == dtype
    assert result.success_rate >= plain.success_rate - 0.1


RANGES = BUILT_IN | {"square": Square(eps=0.2, num_queries=30), "ddn": DDN(steps=30), "cw": CW(steps=20, lr=0.05)}


@pytest.mark.parametrize("attack", RANGES)
def test_another_range_gives_the_same(digits, digits_network, attack):
    """Of pixels up to 255, with int32 labels: budgets are in their units, and weights mean the same."""
    attack, x, y = RANGES[attack], digits[0][:60], digits[1][:60]
    parts = [part for part in getattr(attack, "attacks", (attack,)) if hasattr(part, "eps")]
    wide = [replace(part, eps=255 * part.eps) for part in parts]
    scaled = replace(attack, attacks=tuple(wide)) if isinstance(attack, Cascade) else (wide or [attack])[0]
    result = run_attack(digits_network, attack, x, y)
    space = InputSpace(high=255)
    other = run_attack(lambda images: digits_network(images / 255), scaled, 255 * x, y.int(), input_space=space)
    assert (other.success == result.success).float().mean() >= 0.96
    assert other.l2.mean().item() / 255 == pytest.approx(result.l2.mean().item(), rel=0.02)
    assert 0 <= other.x_adv.min() <= other.x_adv.max() <= 255


# How often attacks reach the next class at least, of 100 samples
TARGETED = {
    "pgd": (PGD(eps=0.3, steps=20, targeted=True), 0.9),
    "cw": (CW(c=10.0, steps=40, lr=0.05, targeted=True), 0.6),
    "minimum_norm_cw": (MinimumNormCW(c=10.0, steps=40, lr=0.05, targeted=True), 0.9),
    "ddn": (DDN(steps=40, targeted=True), 1.0),
    "square": (Square(eps=0.4, num_queries=150, targeted=True), 0.4),
    "square of cross-entropy": (Square(eps=0.4, num_queries=150, targeted=True, loss="cross_entropy"), 0.4),
}


@pytest.mark.parametrize("name", TARGETED)
def test_targeted(digits, digits_network, name):
    (attack, least), x, target = TARGETED[name], digits[0][:100], (digits[1][:100] + 1) % 10
    result = run_attack(digits_network, attack, x, target)
    assert torch.equal(result.success, (result.adv_preds == target) & (result.preds != target))
    assert result.success_rate >= least


@pytest.mark.parametrize(
    ("attack", "queries"),
    [(CW(steps=5), 5), (DDN(steps=5), 13), (MinimumNormCW(steps=5, initial_steps=5), 18)],
    ids=repr,
)
@pytest.mark.parametrize("low", [0.0, None])
def test_without_success_the_input_comes_back(attack, queries, low):
    """DDN tries eight random images, where there is a range to draw from."""
    x, model = torch.tensor([[0.5, 0.5]]), linear([[0.0, 0.0], [0.0, 0.0]], [9.0, 0.0])
    result = run_attack(model, attack, x, torch.tensor([0]), input_space=InputSpace(low=low))
    assert torch.equal(result.x_adv, x)
    assert not result.success.any()
    assert result.queries.tolist() == [queries if low == 0 or type(attack) is CW else queries - 8]


@pytest.mark.parametrize("attack", [PGD(eps=0.1), Square(eps=0.2, num_queries=60)], ids=repr)
def test_all_steps_gives_images_of_full_strength(digits, digits_network, attack):
    x, y = digits[0][:100], digits[1][:100].clone()
    y[0] = (y[0] + 1) % 10  # wrong before the attack
    early, full = (run_attack(digits_network, a, x, y) for a in (attack, replace(attack, all_steps=True)))
    loss = nn.CrossEntropyLoss()
    assert loss(digits_network(full.x_adv), y) > 1.5 * loss(digits_network(early.x_adv), y)
    assert (full.queries == early.queries.max()).all()
    assert full.success.sum() >= early.success.sum()
    assert torch.equal(early.x_adv[0], x[0])
    assert not torch.equal(full.x_adv[0], x[0])
    assert not full.success[0]


def test_any_callable_with_what_the_model_sees(digits, digits_network):
    x, y = digits[0][:100].double(), digits[1][:100]
    network = copy.deepcopy(digits_network).double()  # in single precision, their gradient of cross-entropy underflows
    result = run_attack(network, foolbox_fgsm, x, y)
    expected = run_attack(network, get_attack("fgsm", eps=0.1), x, y)
    torch.testing.assert_close(result.x_adv[result.eligible], expected.x_adv[result.eligible])
    assert result.zero_gradients is None
    assert result.queries[result.eligible].min() >= 1


@pytest.mark.parametrize(
    ("x_adv", "error", "match"),
    [
        (lambda x: x[:, :, :4], ValueError, r"to return inputs of shape \(8, 1, 8, 8\) but got \(8, 1, 4, 8\)"),
        (lambda x: x * float("nan"), ValueError, r"to return finite inputs but got NaN or infinity"),
        (lambda x: x + float("inf"), ValueError, r"to return finite inputs but got NaN or infinity"),
        (lambda x: (x + 0.5).clamp(0, 1), ValueError, r"to stay within eps=0\.1 in the l2 norm but it went 3\.\d+ far"),
        (lambda x: x + 0.2, ValueError, r"to stay within eps=0\.1 in the linf norm but it went 0\.2 far"),
        (
            lambda x: x + 0.05,
            ValueError,
            r"in the range \[0\.0, 1\.0\] but got values in \[0\.05, 1\.05\].*`input_space`",
        ),
        (lambda x: x - 0.05, ValueError, r"in the range \[0\.0, 1\.0\] but got values in \[-0\.05, 0\.95\]"),
        (lambda x: x.tolist(), TypeError, r"to return a tensor of adversarial inputs but got list"),
    ],
)
def test_what_an_attack_returns_is_checked(digits, digits_network, x_adv, error, match):
    def attack(model, x, y):
        return x_adv(x)

    attack.eps, attack.norm = 0.1, "l2" if "l2" in match else "linf"
    with pytest.raises(error, match=match):
        run_attack(digits_network, attack, digits[0][:8], digits[1][:8])


def test_the_model_is_checked(digits):
    x, y = digits[0][:8], digits[1][:8]

    def in_place(images):
        return images.mul_(2).flatten(1)

    with pytest.raises(ValueError, match=r"changed them in place.*`x = x\.clone\(\)`"):
        run_attack(in_place, PGD(), x, y)
    with pytest.raises(ValueError, match=r"autograd can differentiate.*such as Square"):
        run_attack(lambda images: images.detach().flatten(1), PGD(all_steps=True), x, y)
    with pytest.raises(ValueError, match=r"Expected finite logits but 8 of 8 samples"):
        run_attack(lambda images: images.flatten(1) * float("nan"), PGD(), x, y)


def test_deterministic_means_that_the_same_batch_gives_the_same(digits, digits_network):
    x, y = digits[0][:32], digits[1][:32]

    def by_batch_size(images):
        return digits_network(images) * (1 + 1e-3 / len(images))

    assert run_attack(by_batch_size, PGD(eps=0.1), x, y).deterministic
    assert not run_attack(
        lambda images: digits_network(images) + 1e-3 * torch.rand(10), PGD(eps=0.1), x, y
    ).deterministic
