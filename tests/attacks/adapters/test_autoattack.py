import sys
import types
from typing import ClassVar

import pytest
import torch
from torch import nn

from lightning_robustness import evaluate
from lightning_robustness._measurement.plan import name_attacks
from lightning_robustness.attacks import AutoAttackAdapter, Budget, budget_of, get_attack, run_attack
from lightning_robustness.input_space import InputSpace


class Part:
    n_target_classes = 9


class StandIn:
    """The interface of AutoAttack: a step of eps towards the middle of [0, 1], and the manners of the original."""

    made: ClassVar[list["StandIn"]] = []

    def __init__(self, model, norm="Linf", eps=0.3, seed=None, verbose=True, version="standard", device="cuda"):
        self.model, self.norm, self.eps, self.seed, self.version, self.device = model, norm, eps, seed, version, device
        self.apgd_targeted, self.fab = Part(), Part()
        self.made.append(self)
        if verbose:
            sys.stdout.write("setting parameters for standard version\n")

    def run_standard_evaluation(self, x_orig, y_orig, bs=250):
        sys.settrace(None)
        assert x_orig.min() >= 0
        assert x_orig.max() <= 1
        assert self.model(x_orig).shape == (bs, 10)
        return x_orig + self.eps * (0.5 - x_orig).sign()


@pytest.fixture
def stand_in(monkeypatch):
    module = types.ModuleType("autoattack")
    module.AutoAttack = StandIn
    monkeypatch.setitem(sys.modules, "autoattack", module)
    monkeypatch.setitem(sys.modules, "autoattack.fab_pt", types.ModuleType("autoattack.fab_pt"))
    StandIn.made = []
    return StandIn


def test_budget_range_seed_and_classes_are_handed_over(stand_in, digits, digits_network, capsys):
    x, y = 255 * digits[0][:16], digits[1][:16]
    attack = get_attack("autoattack:plus", eps=25.5, norm="l2")
    assert attack == AutoAttackAdapter(version="plus", eps=25.5, norm="l2")
    assert budget_of(attack) == Budget("l2", 25.5)

    def tracer(*_):
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        result = run_attack(
            lambda x: digits_network(x / 255),
            get_attack("autoattack:plus", eps=25.5),
            x,
            y,
            input_space=InputSpace(high=255),
        )
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    (made,) = stand_in.made
    assert (made.norm, made.version, made.device) == ("Linf", "plus", x.device)
    assert made.eps == pytest.approx(0.1)
    assert made.apgd_targeted.n_target_classes == made.fab.n_target_classes == 9
    assert isinstance(made.seed, int)
    right = result.preds == y
    expected = x[right] + 25.5 * (127.5 - x[right]).sign()
    torch.testing.assert_close(result.x_adv[right], expected)
    assert torch.equal(result.x_adv[~right], x[~right])
    assert capsys.readouterr().out == ""


def test_seed_is_that_of_the_run(stand_in, digits, digits_network):
    for seed in (0, 0, 1):
        run_attack(digits_network, get_attack("autoattack:standard", eps=0.1), digits[0][:4], digits[1][:4], seed=seed)
    first, again, other = (made.seed for made in stand_in.made)
    assert first == again != other


def test_fewer_than_ten_classes(stand_in, monkeypatch):
    monkeypatch.setattr(stand_in, "run_standard_evaluation", lambda self, x, y, bs: x)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 5))
    x = torch.rand(4, 1, 4, 4)
    run_attack(model, get_attack("autoattack:standard", eps=0.1), x, model(x).argmax(1))
    (made,) = stand_in.made
    assert made.apgd_targeted.n_target_classes == made.fab.n_target_classes == 4


@pytest.mark.parametrize(("version", "fewest"), [("standard", 4), ("plus", 4), ("rand", 3)])
def test_too_few_classes(stand_in, version, fewest):
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, fewest - 1))
    x = torch.rand(4, 1, 4, 4)
    with pytest.raises(ValueError, match=rf"{fewest} classes .*'{version}'.* {fewest - 1}.*get_att"):
        run_attack(model, f"autoattack:{version}", x, model(x).argmax(1))
    assert run_attack(model, get_attack("ensemble", eps=1.0), x, model(x).argmax(1)).success.any()  # the remedy


def test_inputs_that_it_cannot_take(stand_in):
    model, x = nn.Linear(16, 5), torch.rand(4, 16)
    y = model(x).argmax(1)
    with pytest.raises(ValueError, match=r"\(N, C, H, W\) .*\(4, 16\)"):
        run_attack(model, "autoattack:standard", x, y)
    with pytest.raises(ValueError, match=r"inputs with a range for AutoAttack.* `input_space`"):
        run_attack(model, "autoattack:standard", x, y, input_space=InputSpace(low=None, high=None))
    assert run_attack(model, get_attack("ensemble", eps=1.0), x, y).success.any()


def test_arguments(stand_in):
    with pytest.raises(ValueError, match=r"`version`.*'fast'"):
        get_attack("autoattack:fast")
    with pytest.raises(ValueError, match=r"`targeted`.*Use get_attack"):
        get_attack("autoattack:standard", targeted=True)
    with pytest.raises(ValueError, match=r"norm.* got steps"):
        get_attack("autoattack:standard", steps=3)
    with pytest.raises(ValueError, match=r"'autoattack:plus'.* got version"):
        get_attack("autoattack:plus", version="rand")
    with pytest.raises(ValueError, match=r"preset .*'mnist'"):
        get_attack("autoattack:standard", preset="mnist")
    assert get_attack("autoattack", eps=0.1) == get_attack("autoattack:standard", eps=0.1)
    assert list(name_attacks(["autoattack"], eps=0.1)) == ["autoattack"]
    assert list(name_attacks(["autoattack:standard"], eps=0.1)) == ["autoattack_standard"]


def test_package_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "autoattack", None)  # as if it could not be found
    with pytest.raises(ModuleNotFoundError, match=r"autoattack .*`pip install"):
        get_attack("autoattack:standard")


def test_package_that_fails_to_import(monkeypatch, tmp_path):
    """Torchattacks 3.3 brings a copy of it that needs an old release of torch."""
    (tmp_path / "autoattack").mkdir()
    (tmp_path / "autoattack" / "__init__.py").touch()
    (tmp_path / "autoattack" / "fab_pt.py").write_text("from torch.autograd.gradcheck import zero_gradients")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("autoattack")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ModuleNotFoundError, match=r"fits torch .*zero_gradients.* Install it with .* newer torch"):
        get_attack("autoattack:standard")


@pytest.mark.slow
@pytest.mark.parametrize(("network", "eps"), [("digits_network", 0.1), ("robust_digits_network", 0.2)])
def test_strong_attacks_are_within_a_point_of_the_authors_package(digits, request, network, eps):
    """It is not on PyPI, and torchattacks 3.3 brings an old copy that fails: run it with their source on the path."""
    reason = "AutoAttack is not on PyPI: put https://github.com/fra31/auto-attack on PYTHONPATH"
    pytest.importorskip("autoattack.fab_pt", reason=reason, exc_type=ImportError)
    network, x, y = request.getfixturevalue(network), digits[0][1200:1500], digits[1][1200:1500]
    theirs = run_attack(network, get_attack("autoattack", eps=eps), x, y)
    report = evaluate(network, [(x, y)], eps=eps, attack_samples=300, fim_samples=0, num_examples=0, progress=False)
    robust = ((theirs.adv_preds == y) & (theirs.preds == y)).double().mean().item()
    assert report.rates["worst"]["adv_acc"] <= robust + 0.01
