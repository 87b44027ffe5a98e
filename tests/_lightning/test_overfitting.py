import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_robustness._lightning.overfitting import CatastrophicOverfitting


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
def test_epochs(epochs, expected):
    sign = CatastrophicOverfitting()
    assert [sign.update(*accuracies) for accuracies in epochs] == expected
    assert sign.seen == any(expected)


accuracy = st.floats(0.0, 1.0)


@given(st.lists(accuracy))
def test_no_sign_while_many_steps_succeed_less_and_less(accuracies):
    sign = CatastrophicOverfitting()
    assert not any(sign.update(1.0, multi) for multi in sorted(accuracies))


@given(st.lists(st.tuples(accuracy, accuracy), min_size=1))
def test_the_best_epoch_is_kept(epochs):
    sign = CatastrophicOverfitting()
    for epoch in epochs:
        sign.update(*epoch)
    assert sign.multi == max(multi for _, multi in epochs)
    assert (sign.single, sign.multi) in epochs
