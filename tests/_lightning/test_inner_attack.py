import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_robustness import InputSpace
from lightning_robustness._lightning.inner_attack import CatastrophicOverfitting, Clipping, make_inner_attacks
from lightning_robustness.attacks import CW, PGD, Cascade, TorchattacksAdapter, budget_of


def make(attack, eps=None, steps=None, alpha=None, all_steps=True, input_space=None):
    (made,) = make_inner_attacks(attack, eps, None, steps, alpha, all_steps, input_space or InputSpace())
    return made


def own(model, x, y):
    return x


def test_names_and_objects():
    assert make("pgd", eps=0.1, steps=7) == PGD(eps=0.1, steps=7, all_steps=True)
    assert make(PGD(momentum=1.0), eps=0.1, alpha=0.02) == PGD(momentum=1.0, eps=0.1, alpha=0.02, all_steps=True)
    assert make(PGD(), all_steps=False) == PGD()
    assert make("cw", steps=5) == CW(steps=5, all_steps=True)
    assert isinstance(make("torchattacks:FGSM", eps=0.1), TorchattacksAdapter)
    assert make(own) is own


def test_parts_of_a_cascade():
    worst = make("cascade", eps=8.0, input_space=InputSpace(high=255))
    assert [part.eps for part in worst.attacks] == [8.0] * 3
    assert all(part.all_steps for part in worst.attacks)
    mixed = Cascade(attacks=(own, PGD(eps=0.1)))
    assert make(mixed).attacks == (own, PGD(eps=0.1, all_steps=True))


def test_budgets_of_torchattacks_are_in_the_units_of_the_range():
    space = InputSpace(high=255)
    assert budget_of(make("torchattacks:FGSM", input_space=space), space).eps == pytest.approx(8.0)


def test_fast_takes_one_step_that_is_longer_than_the_budget():
    assert make("fast") == PGD(steps=1, alpha=10 / 255, all_steps=True)
    assert make("fast", eps=0.1) == PGD(steps=1, eps=0.1, alpha=0.125, all_steps=True)
    assert make("fast", steps=2, alpha=0.1) == PGD(steps=2, alpha=0.1, all_steps=True)


def test_a_budget_may_be_as_wide_as_the_range():
    assert make("pgd", eps=1.0).eps == 1.0
    assert make("pgd", eps=8.0, input_space=InputSpace(high=255)).eps == 8.0
    assert make("pgd", eps=8.0, input_space=InputSpace(low=None, high=None)).eps == 8.0
    assert make("pgd_l2", eps=8.0).eps == 8.0


@pytest.mark.parametrize(
    ("attack", "options", "match"),
    [
        (own, {"eps": 0.1}, "takes eps .*<function own"),
        (CW(), {"eps": 0.1, "alpha": 0.1}, r"takes eps, alpha .*CW\("),
        (PGD(targeted=True), {}, r"not targeted.*PGD\("),
        ("pgd", {"eps": 8.0}, r"\[0, 1\], but got 8\. .*8/255"),
        ("pgd", {"eps": 0.6, "input_space": InputSpace(high=0.5)}, r"at most 0\.5, .* but got 0\.6"),
        ("cascade", {"eps": 8.0}, r"at most 1, the width .* but got 8\."),
        (Cascade(attacks=(own, PGD(eps=8.0))), {}, r"at most 1, the width .* but got 8\."),
        ("cw", {"eps": 0.1}, r"CW\(.*Leave `eps` out"),
        ("torchattacks:CW", {"eps": 0.1}, r"`eps`.*TorchattacksAdapter\("),
        (
            "torchattacks:FGSM",
            {"eps": 0.1, "input_space": InputSpace(low=None, high=None)},
            "inputs with a range for .*FGSM",
        ),
        ("nonsense", {}, "the name of an attack but got 'nonsense'"),
    ],
)
def test_bad_arguments(attack, options, match):
    with pytest.raises(ValueError, match=match):
        make(attack, **options)


@pytest.mark.parametrize(
    ("values", "is_mistaken"),
    [([0.2, 0.4, 1.05], True), ([0.1] * 19 + [1.05], False), ([0.1] * 19 + [40.0], True)],
)
@pytest.mark.filterwarnings("ignore:Some inputs of a training batch leave the range")
def test_first_batch_with_many_values_or_a_mean_outside_is_refused(values, is_mistaken):
    clip, x = Clipping(InputSpace(), "clipped"), torch.tensor([values, [0.5] * len(values)])
    if is_mistaken:
        with pytest.raises(ValueError, match=r"inputs in the range \[0.0, 1.0\]"):
            clip(x)
    # Later ones are clipped
    clipped, share = clip(x)
    assert torch.equal(clipped, x.clamp(0, 1))
    assert share == 0.5


def test_clipping_refuses_what_it_cannot_mend():
    clip = Clipping(InputSpace(), "clipped")
    x = torch.rand(4, 3)
    assert clip(x) == (x, 0.0)
    with pytest.raises(ValueError, match="inputs to be finite"):
        clip(torch.tensor([[0.5, torch.nan]]))
    with pytest.raises(TypeError, match=r"`x\.float\(\)`"):
        clip(torch.zeros(2, 2, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("epochs", "expected"),
    [
        ([(0.4, 0.3), (0.5, 0.4), (0.9, 0.1)], [False, False, True]),
        ([(0.4, 0.3), (0.9, 0.15)], [False, False]),  # by less than the margin
        ([(0.5, 0.5), (0.4, 0.2)], [False, False]),  # both fall: a larger eps, for instance
        ([(0.5, 0.5), (0.55, 0.4), (0.6, 0.3)], [False, False, True]),  # slowly
        ([(0.5, 0.5), (0.9, 0.1), (0.6, 0.6)], [False, True, False]),  # and back
        ([(1.0, 0.95), (1.0, 0.0)], [False, True]),  # where the one step cannot do any worse
        ([(0.95, 0.95, 0.01), (0.7, 0.6, 0.1), (0.9, 0.05, 0.2), (0.93, 0.0, 0.3)], [False, False, True, True]),
        ([(0.9, 0.9, 0.01), (0.6, 0.5, 0.1), (0.7, 0.2, 0.1)], [False, False, True]),  # after the budget has grown
        ([(0.6, 0.5, 0.2), (0.5, 0.2, 0.3), (0.6, 0.3, 0.1)], [False, False, False]),  # no worse than the last one
    ],
)
def test_the_sign_of_overfitting(epochs, expected):
    sign = CatastrophicOverfitting()
    assert [sign.update(*accuracies) for accuracies in epochs] == expected
    assert sign.seen == any(expected)


accuracy = st.floats(0.0, 1.0)


@given(st.lists(accuracy))
def test_no_sign_of_overfitting_while_many_steps_succeed_less_and_less(accuracies):
    sign = CatastrophicOverfitting()
    assert not any(sign.update(1.0, multi) for multi in sorted(accuracies))


@given(st.lists(st.tuples(accuracy, accuracy), min_size=1))
def test_the_best_epoch_is_kept(epochs):
    sign = CatastrophicOverfitting()
    for epoch in epochs:
        sign.update(*epoch)
    assert sign.multi == max(multi for _, multi in epochs)
    assert (sign.single, sign.multi) in epochs
