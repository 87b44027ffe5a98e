import numpy as np
import pytest
import torch
from scipy import stats

from lightning_robustness._isolation.draws import Draws, hash_positions

KINDS = {
    "bits": lambda draws, counter, shape: draws.bits(counter, shape),
    "uniform": lambda draws, counter, shape: draws.uniform(counter, shape, -0.3, 0.3),
    "normal": lambda draws, counter, shape: draws.normal(counter, shape, torch.float64),
    "signs": lambda draws, counter, shape: draws.signs(counter, shape),
}


GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(z):
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def bits_by_numpy(positions, seed, index, counter, number):
    """The documented generator, in the unsigned arithmetic that it is defined in."""
    words = np.random.SeedSequence([seed, index]).generate_state(2, np.uint32).astype(np.uint64)
    with np.errstate(over="ignore"):
        keys = splitmix64(splitmix64(np.asarray(positions, dtype=np.uint64)) + (words[1] << np.uint64(32) | words[0]))
        keys = splitmix64(keys + np.uint64(counter + 1) * GOLDEN)[:, None]
        low, high = (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32), (keys >> np.uint64(32)).astype(np.uint32)
        x = np.arange(number, dtype=np.uint32) ^ low
        x = ((x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)) ^ high
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
        return (x ^ (x >> np.uint32(16))).astype(np.int32)


@pytest.mark.parametrize(("seed", "index", "counter"), [(0, 0, 0), (1, 2, 3), (2**63, 10**9, 10**6)])
def test_bits_are_those_of_unsigned_arithmetic(seed, index, counter):
    positions = [0, 1, 2, 1000, 2**40, 2**62]
    bits = Draws(torch.tensor(positions), seed, index).bits(counter, (5, 3))
    assert np.array_equal(bits.flatten(1).numpy(), bits_by_numpy(positions, seed, index, counter, 15))


@pytest.mark.parametrize("seed", [0, 1, 2**62])
def test_hashes_are_those_of_unsigned_arithmetic_in_the_same_order(seed):
    positions = np.array([*range(100), 2**40, 2**62])
    with np.errstate(over="ignore"):
        expected = splitmix64((positions.astype(np.uint64) + np.uint64(1)) * GOLDEN + np.uint64(seed))
    hashes = hash_positions(torch.from_numpy(positions), seed).numpy()
    assert np.array_equal(hashes.view(np.uint64) ^ np.uint64(2**63), expected)
    assert np.array_equal(hashes.argsort(), expected.argsort())


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_gets_the_same_whatever_its_batch(kind):
    draw, positions = KINDS[kind], torch.tensor([12, 5, 900, 0, 33])
    whole = draw(Draws(positions, seed=3), 4, (2, 3))
    assert whole.shape == (5, 2, 3)
    for row, position in enumerate(positions):
        assert torch.equal(draw(Draws(position.reshape(1), seed=3), 4, (2, 3))[0], whole[row])
    order = torch.tensor([3, 1, 4])
    assert torch.equal(draw(Draws(positions, seed=3).rows(order), 4, (2, 3)), whole[order])
    assert torch.equal(draw(Draws(positions.int(), seed=3), 4, (2, 3)), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_no_samples(kind):
    assert KINDS[kind](Draws(torch.zeros(0, dtype=torch.long)), 0, (2, 3)).shape == (0, 2, 3)


def test_other_seeds_indices_counters_streams_and_positions_give_others():
    positions = torch.arange(100)
    draws = Draws(positions)
    others = [
        draws.uniform(0, (100,)),
        draws.uniform(1, (100,)),
        Draws(positions, seed=1).uniform(0, (100,)),
        Draws(positions, index=1).uniform(0, (100,)),
        Draws(positions + 100).uniform(0, (100,)),
        draws.stream(0).uniform(0, (100,)),
        draws.stream(1).uniform(0, (100,)),
        draws.stream(0).stream(0).uniform(0, (100,)),
    ]
    correlations = np.corrcoef(torch.stack(others).flatten(1).numpy())[np.triu_indices(len(others), 1)]
    assert np.abs(correlations).max() < 0.04  # four standard deviations of independent numbers


@pytest.mark.parametrize("seed", [0, 1])
def test_distributions(seed):
    draws = Draws(torch.arange(500), seed)
    uniform, normal = draws.uniform(0, (400,), -2.0, 3.0, torch.float64), draws.normal(1, (400,), torch.float64)
    assert stats.kstest(uniform.flatten().numpy(), "uniform", (-2, 5)).pvalue > 1e-3
    assert stats.kstest(normal.flatten().numpy(), "norm").pvalue > 1e-3
    assert stats.chisquare((draws.signs(3, (400,)) > 0).long().flatten().bincount().numpy()).pvalue > 1e-3
    for bit in range(32):
        ones = int((draws.bits(4, (400,)) >> bit & 1).sum())
        assert stats.binomtest(ones, 200_000).pvalue > 1e-4


def test_ends_of_the_range():
    """No infinite normal number, and no uniform number out of range, for the largest and smallest bits."""

    class Extreme(Draws):
        def bits(self, counter, shape):
            return torch.tensor([[-(2**31), 2**31 - 1, 0, -1]], dtype=torch.int32)

    draws = Extreme(torch.tensor([0]))
    assert draws.uniform(0, (4,), -0.1, 0.1).abs().max() <= torch.tensor(0.1)
    assert draws.normal(0, (4,)).isfinite().all()
    assert draws.signs(0, (4,)).tolist() == [[-1, 1, 1, -1]]


@pytest.mark.parametrize("dim", [0, 1])
def test_samples_and_coordinates_are_independent(dim):
    """Pairwise correlations are those of independent numbers, and neighbours have no pattern of two bytes."""
    draws = Draws(torch.arange(400))
    values = draws.uniform(0, (400,), dtype=torch.float64).numpy()
    correlations = np.corrcoef(values if dim == 0 else values.T)[np.triu_indices(400, 1)]
    assert stats.kstest(np.arctanh(correlations) * np.sqrt(397), "norm").pvalue > 1e-3
    for shift in (0, 24):
        byte = (draws.bits(1, (400,)).long() >> shift) & 0xFF
        pairs = byte.narrow(dim, 1, 399) * 256 + byte.narrow(dim, 0, 399)
        assert stats.chisquare(pairs.flatten().bincount(minlength=2**16).numpy()).pvalue > 1e-3
