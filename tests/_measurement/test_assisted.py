import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, norm
from sklearn.isotonic import IsotonicRegression

from lightning_robustness._measurement.assisted import assist, isotonic
from lightning_robustness._measurement.rows import Rows
from lightning_robustness._measurement.verdict import rival


def population(total, generator, accuracy=0.9, robust=0.5, strength=6.0, shift=0.0):
    """Margins of all samples, whether they are right, and whether an attack leaves them so."""
    right = generator.random(total) < accuracy
    margin = np.where(right, generator.random(total), -generator.random(total))
    offset = np.log(robust / (1 - robust))
    chance = 1 / (1 + np.exp(-(strength * (margin - 0.5) + offset + shift)))
    return margin, right, right & (generator.random(total) < chance)


def assisted(margin, right, robust, chosen, seed=0):
    positions = torch.arange(len(margin))
    margins = Rows(positions, {"margin": torch.tensor(margin).float(), "right": torch.tensor(right)})
    return assist(margins, seed, Rows(positions[chosen], {}), torch.tensor(robust[chosen]))


def draw(total, number, generator):
    return np.sort(generator.choice(total, number, replace=False))


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 1)), min_size=1, max_size=40))
def test_isotonic_regression_is_that_of_scikit_learn(pairs):
    x, y = (torch.tensor(column) for column in zip(*pairs, strict=True))
    points, values = isotonic(x, y)
    expected = IsotonicRegression().fit(x.numpy(), y.numpy()).predict(points.numpy())
    assert values.numpy() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("number", [64, 256])
def test_all_samples_attacked_give_the_plain_share(number):
    margin, right, robust = population(number, np.random.default_rng(0))
    estimate = assisted(margin, right, robust, np.arange(number)).estimate()
    assert estimate.value == estimate.plain == pytest.approx(robust.mean())
    assert not estimate.is_assisted
    low, high = binomtest(int(robust.sum()), number).proportion_ci(method="wilson")
    assert (estimate.low, estimate.high) == pytest.approx((low, high))


def test_few_samples_give_the_plain_share():
    generator = np.random.default_rng(1)
    estimate = assisted(*population(1000, generator), draw(1000, 63, generator)).estimate()
    assert not estimate.is_assisted
    assert estimate.value == estimate.plain


@pytest.mark.parametrize("robust", [0.002, 0.02])
def test_few_robust_samples_have_an_interval_that_holds_the_plain_one(robust):
    generator = np.random.default_rng(1)
    parts = population(1000, generator, accuracy=1.0, robust=robust, strength=0.0)
    chosen = draw(1000, 100, generator)
    estimate = assisted(*parts, chosen).estimate()
    low, high = binomtest(int(parts[2][chosen].sum()), 100).proportion_ci(method="wilson")
    assert estimate.low <= low + 1e-9
    assert estimate.high >= high - 1e-9


def test_a_small_sample_with_few_broken_ones_is_unbiased():
    """A choice between plain and assisted share by what was broken would add a point."""
    generator, errors = np.random.default_rng(6), []
    for _ in range(400):
        parts = population(3000, generator, accuracy=1.0, robust=0.85, strength=10.0)
        errors.append(assisted(*parts, draw(3000, 64, generator)).estimate().value - parts[2].mean())
    assert abs(np.mean(errors)) < 3 * np.std(errors) / math.sqrt(len(errors))


def test_the_estimate_by_hand():
    """The formula, written out with scikit-learn's regression."""
    generator = np.random.default_rng(2)
    margin, right, robust = population(2000, generator)
    margin = margin.astype(np.float32)
    chosen = draw(2000, 200, generator)
    found = assisted(margin, right, robust, chosen, seed=3)
    folds = found.folds.numpy()
    others = np.setdiff1d(np.arange(2000), chosen)
    terms, residuals = [], np.zeros(200)
    for fold in (0, 1):
        train, test = chosen[folds != fold], chosen[folds == fold]
        model = IsotonicRegression(out_of_bounds="clip").fit(margin[train][right[train]], robust[train][right[train]])
        f = np.where(right, model.predict(margin), 0.0)
        residuals[folds == fold] = robust[test] - f[test]
        terms.append(f[others].mean() + residuals[folds == fold].mean())
    value = 0.1 * robust[chosen].mean() + 0.9 * np.mean(terms)
    estimate = found.estimate()
    assert estimate.is_assisted
    assert estimate.value == pytest.approx(value, abs=1e-6)
    p = (200 * value + 2) / 204
    variance = (1 / 200 - 1 / 2000) * (np.square(residuals).sum() + 2) / 202 + p * (1 - p) / 2000
    effective = p * (1 - p) / variance
    half = norm.ppf(0.975) ** 2
    center = (value * effective + half / 2) / (effective + half)
    assert (estimate.low + estimate.high) / 2 == pytest.approx(center, abs=1e-6)
    assert estimate.low < value < estimate.high


@pytest.mark.parametrize(("accuracy", "robust"), [(0.9, 0.5), (1.0, 0.2), (0.7, 0.8)])
def test_unbiased_tighter_and_covering(accuracy, robust):
    generator = np.random.default_rng(4)
    errors, plain_errors, covered = [], [], []
    for _ in range(150):
        parts = population(3000, generator, accuracy, robust, strength=10.0)
        truth = parts[2].mean()
        estimate = assisted(*parts, draw(3000, 256, generator)).estimate()
        errors.append(estimate.value - truth)
        plain_errors.append(estimate.plain - truth)
        covered.append(estimate.low <= truth <= estimate.high)
    assert abs(np.mean(errors)) < 4 * np.std(errors) / math.sqrt(len(errors))
    assert np.var(plain_errors) > 1.5 * np.var(errors)
    assert np.mean(covered) > 0.9


def test_equal_robustness_is_seldom_told_apart_and_a_gap_often():
    generator = np.random.default_rng(5)
    rejected, found = [], []
    for _ in range(150):
        margin, right, robust = population(3000, generator, strength=10.0)
        chosen = draw(3000, 256, generator)
        first = assisted(margin, right, robust, chosen)
        again = right & (generator.random(3000) < 1 / (1 + np.exp(-10.0 * (margin - 0.5))))
        worse = right & (generator.random(3000) < 1 / (1 + np.exp(-10.0 * (margin - 0.65))))
        rejected.append(rival(first, assisted(margin, right, again, chosen)).p_value < 0.05)
        other = rival(first, assisted(margin, right, worse, chosen))
        found.append(other.p_value < 0.05)
        assert other.low < other.difference < min(0, other.high)
    assert np.mean(rejected) < 0.12
    assert np.mean(found) > 0.8


@pytest.mark.parametrize(("only_first", "only_second"), [(0, 0), (0, 7), (9, 2), (1500, 1400), (0, 1200), (2900, 100)])
def test_plain_shares_of_many_samples_are_compared_exactly(only_first, only_second):
    columns = np.zeros((2, 3000), dtype=bool)
    columns[0, :only_first] = True
    columns[1, only_first : only_first + only_second] = True
    first, second = (assist(None, 0, Rows(torch.arange(3000), {}), torch.tensor(row)) for row in columns)
    gap, low, high, p_value = rival(second, first)
    assert gap == pytest.approx((only_first - only_second) / 3000)
    number = only_first + only_second
    if not number:
        assert (low, high, p_value) == (0.0, 0.0, 1.0)
        return
    test = binomtest(only_first, number)
    ends = [number * (2 * end - 1) / 3000 for end in test.proportion_ci(method="exact")]
    assert (low, high) == pytest.approx(ends, abs=1e-9)
    assert p_value == pytest.approx(test.pvalue, rel=1e-9, abs=1e-300)


def test_a_fold_without_a_sample_that_is_right_predicts_that_none_withstands():
    margin, right, robust = population(1000, np.random.default_rng(7))
    chosen = np.arange(0, 1000, 10)
    folds = assisted(margin, right, robust, chosen).folds.numpy()
    right[chosen[~folds]] = robust[chosen[~folds]] = False
    found = assisted(margin, right, robust, chosen)
    assert found.means[0] == 0.0
    assert found.residuals[found.folds].tolist() == robust[chosen[folds]].tolist()
    estimate = found.estimate()
    assert estimate.is_assisted
    assert estimate.low <= estimate.value <= estimate.high

    none = np.zeros(1000, dtype=bool)
    nothing = assisted(margin, none, none, chosen).estimate()
    assert (nothing.value, nothing.low) == (0.0, 0.0)
    assert binomtest(0, 100).proportion_ci(method="wilson").high - 1e-9 < nothing.high < 0.05


def test_halves_average_to_the_estimate():
    generator = np.random.default_rng(6)
    parts = population(2000, generator)
    found = assisted(*parts, draw(2000, 256, generator))
    read = (found.half(0, is_read=True) + found.half(1, is_read=True)) / 2
    assert read == pytest.approx(found.estimate().value, abs=0.01)  # halves differ a little in size
    assert found.half(0, is_read=False) != found.half(0, is_read=True)
