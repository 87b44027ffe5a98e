import copy
import functools
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torchattacks
from torch import nn

from lightning_robustness import evaluate
from lightning_robustness._isolation.sandbox import sandbox
from lightning_robustness.attacks import PGD, Budget, TorchattacksAdapter, budget_of, get_attack, run_attack
from lightning_robustness.attacks.attack import most_passes
from lightning_robustness.input_space import InputSpace


def test_by_name_is_what_torchattacks_gives(digits, digits_network):
    x, y = digits[0][:64], digits[1][:64]
    right = digits_network(x).argmax(1) == y
    with sandbox(digits_network, x):
        expected = torchattacks.PGD(digits_network, eps=0.1, alpha=0.02, steps=5)(x[right], y[right])
    result = run_attack(digits_network, get_attack("torchattacks:PGD", eps=0.1, alpha=0.02, steps=5), x, y)
    torch.testing.assert_close(result.x_adv[right], expected)
    assert (result.queries[right] == 5).all()


@pytest.mark.parametrize("name", ["FGSM", "CW", "Square", "APGD", "PGDL2", "VANILA"])
def test_instances_and_names_agree(digits, digits_network, name):
    x, y = digits[0][:12], digits[1][:12]
    options = {"n_queries": 20} if name == "Square" else {"steps": 3} if name in ("CW", "APGD") else {}
    instance = getattr(torchattacks, name)(digits_network, **options)
    by_name = run_attack(digits_network, get_attack(f"torchattacks:{name}", **options), x, y)
    by_instance = run_attack(digits_network, instance, x, y)
    assert torch.equal(by_name.x_adv, by_instance.x_adv)
    assert instance.model is digits_network
    assert by_name.attack.white_box == (name not in ("Square", "VANILA"))
    assert budget_of(by_name.attack) == budget_of(by_instance.attack)


def test_nested_attacks(digits, digits_network):
    attacks = [torchattacks.FGSM(digits_network, eps=0.1), torchattacks.PGD(digits_network, eps=0.1, alpha=0.02)]
    x, y = digits[0][:24], digits[1][:24]
    result = run_attack(digits_network, torchattacks.MultiAttack(attacks), x, y)
    single = run_attack(digits_network, attacks[0], x, y)
    assert (result.success | ~single.success).all()


@pytest.mark.parametrize("name", ["PGD", "instance"])
def test_normalisation_and_range_are_handed_over(digits, digits_network, name):
    x, y = digits[0][:32], digits[1][:32]
    space = InputSpace(high=255, mean=33.0, std=70.0)

    def normalised(images):
        return digits_network((images * 70 + 33) / 255)

    if name == "instance":
        attack = plain = torchattacks.PGD(digits_network, eps=0.1, alpha=0.01, random_start=False)
        plain.set_normalization_used(mean=[0.5], std=[0.5])  # not what holds for this model
    else:
        attack = get_attack("torchattacks:PGD", eps=25.5, alpha=2.55, random_start=False)
        plain = get_attack("torchattacks:PGD", eps=0.1, alpha=0.01, random_start=False)
    result = run_attack(normalised, attack, space.normalize(255 * x), y, input_space=space)
    expected = run_attack(digits_network, plain, x, y)
    assert result.linf.max().item() == pytest.approx(25.5, abs=0.01)
    close = (space.unnormalize(result.x_adv) / 255 - expected.x_adv).abs() < 1e-4
    assert close.float().mean() > 0.999
    assert torch.equal(result.success, expected.success)


def test_targeted_by_name(digits, digits_network):
    x, target = digits[0][:40], (digits[1][:40] + 1) % 10
    attack = get_attack("torchattacks:PGD", eps=0.3, alpha=0.03, steps=20, targeted=True)
    result = run_attack(digits_network, attack, x, target)
    assert result.success_rate > 0.8
    assert (result.adv_preds[result.success] == target[result.success]).all()


def test_targeted_mode_must_exist(digits, digits_network):
    with pytest.raises(ValueError, match=r"targeted .*DeepFool"):
        run_attack(digits_network, get_attack("torchattacks:DeepFool", targeted=True), digits[0][:4], digits[1][:4] + 1)


def test_budgets_are_in_the_units_of_the_range(digits_network):
    space = InputSpace(low=-128.0, high=127.0)
    assert budget_of(get_attack("torchattacks:FGSM"), space) == Budget("linf", pytest.approx(8.0))
    assert budget_of(get_attack("torchattacks:FGSM", eps=3.0), space) == Budget("linf", 3.0)
    assert budget_of(get_attack(torchattacks.PGDL2(digits_network, eps=0.5)), space) == Budget("l2", 127.5)
    assert budget_of(get_attack("torchattacks:APGD", norm="L2"), space) == Budget("l2", pytest.approx(8.0))


def test_messages_are_off_in_every_part(digits, digits_network, capsys):
    parts = [torchattacks.FGSM(digits_network, eps=0.1), torchattacks.APGD(digits_network, steps=2, verbose=True)]
    instance = torchattacks.MultiAttack(parts, verbose=True)
    run_attack(digits_network, instance, digits[0][:8], digits[1][:8])
    run_attack(digits_network, get_attack("torchattacks:APGD", steps=2, verbose=True), digits[0][:8], digits[1][:8])
    run_attack(digits_network, get_attack("torchattacks:PGD", steps=2, targeted=True), digits[0][:8], digits[1][:8])
    assert capsys.readouterr().out == ""
    assert parts[1].verbose


def test_stdout_stays_in_place_under_two_threads(digits, digits_network, capsys):
    """Another thread prints while an attack is under way, and is heard."""
    stdout, started, printed = sys.stdout, threading.Event(), threading.Event()

    class Slow(torchattacks.FGSM):
        def forward(self, images, labels):
            started.set()
            assert printed.wait(30)
            return super().forward(images, labels)

    def attack_digits():
        run_attack(copy.deepcopy(digits_network), Slow(digits_network, eps=0.1), digits[0][:4], digits[1][:4])

    def print_meanwhile():
        assert started.wait(30)
        print("heard")  # noqa: T201
        printed.set()

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(attack_digits), pool.submit(print_meanwhile)]:
            future.result()
    assert sys.stdout is stdout
    assert capsys.readouterr().out == "heard\n"


def test_called_directly_and_on_a_function(digits, digits_network):
    x, y = digits[0][:20].double(), digits[1][:20]
    network = copy.deepcopy(digits_network).double()  # in single precision, their gradient of cross-entropy underflows
    attack = get_attack("torchattacks:FGSM", eps=0.1)
    x_adv = attack(lambda images: network(images), x, y)
    expected = PGD(eps=0.1, steps=1, start="clean")(network, x, y)
    torch.testing.assert_close(x_adv, expected)


@pytest.mark.parametrize(("name", "options"), [("APGDT", {"steps": 2}), ("FAB", {"steps": 2}), ("AutoAttack", {})])
def test_number_of_classes_and_seed_come_from_the_call(monkeypatch, digits, digits_network, name, options):
    made, original = [], getattr(torchattacks, name).__init__

    def record(self, model, **given):
        made.append(given)
        original(self, model, **given)

    monkeypatch.setattr(getattr(torchattacks, name), "__init__", functools.wraps(original)(record))
    x, y = digits[0][:4], digits[1][:4]
    network = torch.nn.Sequential(digits_network, torch.nn.ConstantPad1d((0, 3), -5.0))
    attack = get_attack(f"torchattacks:{name}", eps=0.3, **options)
    first, second = (run_attack(network, attack, x, y) for _ in range(2))
    assert torch.equal(first.x_adv, second.x_adv)
    assert [given["n_classes"] for given in made] == [13, 13]
    run_attack(network, get_attack(f"torchattacks:{name}", eps=0.3, n_classes=4, **options), x, y)
    assert made[-1]["n_classes"] == 4


def test_eps_is_left_out_where_there_is_none():
    assert get_attack("torchattacks:CW", eps=0.1) == TorchattacksAdapter(attack="CW")
    assert budget_of(get_attack("torchattacks:CW")) is None


@pytest.mark.parametrize(
    ("width", "steps", "alpha"), [(1, 10, 2 / 255 * 0.1 / (8 / 255)), (255, 10, 0.025), (1, 20, 2 / 255)]
)
def test_a_default_step_size_that_cannot_reach_the_budget_grows(digits, digits_network, width, steps, alpha):
    x, y, space = digits[0][:64], digits[1][:64], InputSpace(high=width, std=width)
    attack = get_attack("torchattacks:PGD", eps=0.1 * width, steps=steps, random_start=False)
    same = get_attack("torchattacks:PGD", eps=0.1 * width, steps=steps, random_start=False, alpha=alpha * width)
    found, expected = (run_attack(digits_network, one, x, y, input_space=space) for one in (attack, same))
    torch.testing.assert_close(found.x_adv, expected.x_adv)
    assert found.linf.max() == pytest.approx(0.1 * width, rel=1e-4)


def test_a_given_step_size_that_cannot_reach_the_budget_is_warned_about(digits, digits_network):
    attack = get_attack("torchattacks:PGD", eps=0.1, alpha=0.001)
    with pytest.warns(UserWarning, match=r"10 steps of 0.001 cannot reach .*0.1 .*Pass `alpha` of at least 0.01"):
        run_attack(digits_network, attack, digits[0][:4], digits[1][:4])


def test_an_instance_that_cannot_reach_its_budget_is_warned_about(digits, digits_network):
    """10 default steps of 2/255, alone and as a part."""
    weak = torchattacks.PGD(digits_network, eps=0.1)
    for instance in (weak, torchattacks.MultiAttack([torchattacks.FGSM(digits_network), weak])):
        with pytest.warns(UserWarning, match=r"10 steps of 0.0078.* reach .*0.1 .*PGD,.*`alpha` of at least 0.01"):
            run_attack(digits_network, instance, digits[0][:4], digits[1][:4])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_attack(digits_network, torchattacks.PGD(digits_network), digits[0][:4], digits[1][:4])


def test_attacks_without_steps_or_queries_have_a_number_of_passes(digits_network):
    assert most_passes(get_attack("torchattacks:AutoAttack")) >= 5000
    assert most_passes(get_attack(torchattacks.AutoAttack(digits_network))) >= 5000
    pixle = torchattacks.Pixle(digits_network)
    assert most_passes(get_attack(pixle)) == pixle.restarts * pixle.max_patches


def test_a_class_of_another_norm_is_suggested(digits, digits_network):
    data = [(digits[0][:8], digits[1][:8])]
    with pytest.raises(ValueError, match=r"`norm` for torchattacks' PGD.*torchattacks:PGDL2"):
        evaluate(digits_network, data, ["torchattacks:PGD"], eps=0.5, norm="l2", progress=False)
    assert budget_of(get_attack("torchattacks:PGDL2", eps=0.5)) == Budget("l2", 0.5)


@pytest.mark.filterwarnings("ignore:The attack torchattacks_square takes")
def test_next_to_our_attacks_in_evaluate(digits, digits_network):
    """Keys are those of torchattacks, and rates what torchattacks itself gives."""
    x, y = digits[0][1200:1264], digits[1][1200:1264]
    names = ["torchattacks:PGD", "torchattacks:CW", get_attack("torchattacks:Square", eps=0.1, n_queries=50)]
    options = {"eps": 0.1, "attack_samples": 64, "fim_samples": 0, "num_examples": 0, "progress": False}
    report = evaluate(digits_network, [(x, y)], ["pgd", *names], **options)
    assert list(report.rates) == ["pgd", "torchattacks_pgd", "torchattacks_cw", "torchattacks_square", "worst"]
    with sandbox(digits_network, x):
        attack = torchattacks.PGD(digits_network, eps=0.1, alpha=0.025, steps=10)
        accuracy = (digits_network(attack(x, y)).argmax(1) == y).double().mean().item()
    assert report.rates["torchattacks_pgd"]["adv_acc"] == pytest.approx(accuracy, abs=0.04)
    text = report.threat_model.describe()["attacks"]
    assert "torchattacks_pgd (10 steps" in text
    assert "torchattacks_square (at most 50 queries" in text


def test_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchattacks", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "lightning-robustness\[torchattacks\]"'):
        get_attack("torchattacks:PGD")


def test_arguments_that_do_not_go_together(digits_network):
    with pytest.raises(ValueError, match=r"`eps`.* -1"):
        get_attack("torchattacks:PGD", eps=-1)
    with pytest.raises(ValueError, match="Set them on the instance"):
        TorchattacksAdapter(attack=torchattacks.PGD(digits_network), targeted=True)


def test_unbounded_range_is_refused():
    with pytest.raises(ValueError, match=r"a range for .*FGSM.*, which clamps to \[0, 1\], but got low=None"):
        run_attack(
            nn.Linear(2, 2),
            "torchattacks:FGSM",
            torch.rand(3, 2),
            torch.tensor([0, 1, 0]),
            input_space=InputSpace(low=None, high=None),
        )
