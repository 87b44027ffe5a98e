import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import minimize

from lightning_robustness.evaluation import composite_scores

BENEFIT = (True, True, True, False, False)
tables = arrays(
    np.float64, st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(2, 5), st.just(5)), elements=st.floats(0, 1)
).filter(lambda table: (np.ptp(table.reshape(-1, 5), axis=0) > 1e-3).all())


def transcription(table, benefit, prior, balance):
    """The formulas of the CMMR paper, one after the other, in numpy loops."""
    rows = table.reshape(-1, table.shape[-1])
    m, n = rows.shape
    r, w = np.zeros((m, n)), np.zeros(n)
    for j in range(n):
        low, high = rows[:, j].min(), rows[:, j].max()
        for i in range(m):
            r[i, j] = (rows[i, j] - low) / (high - low) if benefit[j] else (high - rows[i, j]) / (high - low)
        f = r[:, j] / r[:, j].sum()
        entropy = -sum(value * math.log(value) for value in f if value > 0) / math.log(m)
        w[j] = 1 - entropy
    w /= w.sum()
    weights = np.array([prior[j] * w[j] for j in range(n)])
    weights *= (1 - balance) / weights.sum()
    composite = np.array([sum(weights[j] * r[i, j] for j in range(n)) for i in range(m)]).reshape(table.shape[:3])
    return w, weights, composite, composite.mean(axis=1), composite.mean(axis=(1, 2))


@given(tables, st.lists(st.floats(0.1, 3), min_size=5, max_size=5), st.floats(0, 0.5))
def test_equals_the_formulas(table, prior, balance):
    result = composite_scores(torch.tensor(table), BENEFIT, prior, balance)
    expected = transcription(table, BENEFIT, prior, balance)
    ours = result.entropy_weights, result.weights, result.composite, result.curves, result.scores
    for value, reference in zip(ours, expected, strict=True):
        np.testing.assert_allclose(value.numpy(), reference, atol=1e-9)


@pytest.mark.parametrize("filler", [0.25, torch.linspace(0.3, 0.3 + 1e-7, 24).reshape(2, 3, 4), math.nan])
def test_constant_or_missing_metric_counts_for_nothing(filler):
    table = torch.rand(2, 3, 4, 5)
    with_filler = table.clone()
    with_filler[..., 1] = filler
    result = composite_scores(with_filler, BENEFIT)
    without = composite_scores(table[..., [0, 2, 3, 4]], [BENEFIT[j] for j in (0, 2, 3, 4)])
    assert result.weights[1] == result.entropy_weights[1] == 0
    torch.testing.assert_close(result.scores, without.scores)


def test_weights_may_be_numbers_of_numpy():
    table, prior = torch.rand(2, 1, 4, 2), [0.5, 2.0]
    found = composite_scores(table, (True, False), list(np.float32(prior)), np.float32(0.25))
    assert found.weights.tolist() == composite_scores(table, (True, False), prior, 0.25).weights.tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"values": torch.rand(3, 4, 2)}, "`values`"),
        ({"values": torch.rand(0, 3, 4, 2)}, r"but got \(0, 3, 4, 2\)"),
        ({"higher_is_better": (True,)}, "`higher_is_better`.* 2 metrics .*True"),
        ({"prior": (1.0, 1.0, 1.0)}, "`prior`.* 2 metrics .*1.0, 1.0, 1.0"),
        ({"prior": (1.0, -1.0)}, r"`prior`.*\[1.0, -1"),
        ({"values": torch.ones(1, 2, 3, 2)}, "at least one metric"),
        ({"prior": (0.0, 0.0)}, r"`prior`.*\[0.0, 0.0\]"),
        ({"values": torch.tensor([[[[0.1, 1.0], [0.2, 1.0]]]]), "prior": (0.0, 1.0)}, "at least one metric"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        composite_scores(**{"values": torch.rand(2, 2, 3, 2), "higher_is_better": (True, False), **arguments})


@pytest.mark.parametrize("num_budgets", [2, 7, 20])
def test_equal_models_have_equal_scores(num_budgets):
    for seed in range(20):
        table = torch.rand(3, 4, num_budgets, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        table[2] = table[0]
        result = composite_scores(table, BENEFIT)
        assert result.scores[0] == result.scores[2]
        assert torch.equal(result.composite[0], result.composite[2])


@given(tables, st.lists(st.floats(0.1, 3), min_size=5, max_size=5))
def test_printed_weights_are_the_entropy_weights(table, prior):
    result = composite_scores(torch.tensor(table), BENEFIT, prior, 0.08, weighting="printed")
    np.testing.assert_allclose(result.weights, transcription(table, BENEFIT, [1.0] * 5, 0.0)[1], atol=1e-9)


def test_correlation_weights_are_where_a_search_ends():
    torch.manual_seed(0)
    table, prior = torch.rand(2, 3, 6, 5, dtype=torch.double), np.array([1.0, 2.0, 1.0, 0.5, 1.0])
    result = composite_scores(table, BENEFIT, prior.tolist(), weighting="correlation")
    rows = result.normalized.reshape(-1, 5).numpy()

    def loss(logits):
        composite = rows @ np.exp(logits)
        return -sum(weight * np.corrcoef(composite, rows[:, j])[0, 1] for j, weight in enumerate(prior))

    found = np.exp(minimize(loss, np.zeros(5), tol=1e-10).x)
    np.testing.assert_allclose(result.weights, found / found.sum(), rtol=1e-3)
