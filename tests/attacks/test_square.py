import math
from dataclasses import replace

import pytest
import torch
import torchattacks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_robustness._isolation.sandbox import sandbox
from lightning_robustness.attacks import Square, get_attack, run_attack
from lightning_robustness.attacks.square import _bumps, _pyramid
from tests.attacks.linear import linear


@pytest.mark.parametrize(
    ("norm", "network", "eps"), [("linf", "digits_network", 0.2), ("l2", "robust_digits_network", 0.3)]
)
def test_success_rate_of_torchattacks(digits, request, network, eps, norm):
    """As published it is that of torchattacks; by default it is higher."""
    network, x, y = request.getfixturevalue(network), digits[0][:1100], digits[1][:1100]
    eps = eps if norm == "linf" else 6 * eps
    right = network(x).argmax(1) == y
    assert right.sum() > 1000
    rates, published, expected = [], [], []
    # In torchattacks windows are the same in all images of a batch, so that rates vary by 2 to 5 points: many batches
    for seed, rows in enumerate(torch.arange(len(x)).chunk(25)):
        images, labels = x[rows], y[rows]
        with sandbox(network, images):
            attack = torchattacks.Square(network, norm=norm.capitalize(), eps=eps, n_queries=60, seed=seed)
            expected.append(((network(attack(images, labels)).argmax(1) != labels) & right[rows]).sum())
        for found, as_published in ((rates, False), (published, True)):
            attack = Square(eps=eps, num_queries=60, norm=norm, as_published=as_published)
            found.append(run_attack(network, attack, images, labels, seed=seed).success.sum())
    rates, published, expected = (torch.stack(found).double() for found in (rates, published, expected))
    assert rates.sum() >= expected.sum()
    # Published is within three standard errors, by pairs of batches, and in l-infinity the default is beyond them
    error = 3 * (published - expected).std() * math.sqrt(len(expected))
    assert abs(published.sum() - expected.sum()) <= error
    assert norm == "l2" or error < rates.sum() - expected.sum()


@pytest.mark.parametrize(
    ("preset", "network", "number"),
    [
        ("cifar10", "robust_digits_network", 528),
        ("cifar100", "digits_network", 528),
        pytest.param("mnist", "robust_digits_network", 200, marks=pytest.mark.slow),
        pytest.param("fisher", "digits_network", 200, marks=pytest.mark.slow),
    ],
)
def test_presets_succeed_as_often_as_torchattacks(digits, request, preset, network, number):
    """Within three standard errors, by pairs of batches, and a sample where few or all are broken."""
    network, x, y = request.getfixturevalue(network), digits[0][:number], digits[1][:number]
    attack, right = get_attack("square", preset=preset), network(x).argmax(1) == y
    found, expected = [], []
    for seed, rows in enumerate(torch.arange(number).split(44)):
        images, labels = x[rows], y[rows]
        with sandbox(network, images):
            theirs = torchattacks.Square(network, eps=attack.eps, n_queries=attack.num_queries, seed=seed)
            expected.append(((network(theirs(images, labels)).argmax(1) != labels) & right[rows]).sum())
        found.append(run_attack(network, attack, images, labels, seed=seed).success.sum())
    difference = torch.stack(found).double() - torch.stack(expected)
    assert abs(difference.sum()) <= 3 * difference.std() * math.sqrt(len(difference)) + 1


def test_proposals_as_published(digits, digits_network, monkeypatch):
    """One by one, those of AutoAttack's formula: add twice the budget in the window, and clip to ball and range."""
    propose, seen = Square._propose, []

    def record(self, model, image, best, window, places, signs):
        proposed = propose(self, model, image, best.clone(), window, places, signs)
        seen.append((image.clone(), best.clone(), window[0], places.clone(), signs.clone(), proposed))
        return proposed

    monkeypatch.setattr(Square, "_propose", record)
    attack = Square(eps=0.2, num_queries=40, all_steps=True, as_published=True)
    run_attack(digits_network, attack, digits[0][:8], digits[1][:8])
    assert len(seen) == 39
    for image, best, side, places, signs, proposed in seen:
        expected = best.clone()
        for row in range(len(image)):
            top, left = (int(place * (8 - side)) for place in places[row, :2])
            expected[row, :, top : top + side, left : left + side] += 2 * 0.2 * signs[row].unsqueeze(1)
        expected = torch.minimum(torch.maximum(expected, image - 0.2), image + 0.2).clamp(0, 1)
        torch.testing.assert_close(proposed, expected)
    assert any(torch.equal(best[row], proposed[row]) for _, best, *_, proposed in seen for row in range(8))


def test_windows_as_published_leave_the_last_row_and_column_as_they_start():
    x, y = torch.full((64, 1, 6, 6), 0.5), torch.zeros(64, dtype=torch.long)
    model = nn.Sequential(nn.Flatten(), linear(torch.eye(2).repeat(1, 18)))
    attack = Square(eps=0.1, num_queries=100, all_steps=True, as_published=True)
    start, end = (run_attack(model, replace(attack, num_queries=n), x, y).x_adv for n in (1, 100))
    assert torch.equal(start[..., 5, :], end[..., 5, :])
    assert torch.equal(start[..., 5], end[..., 5])
    assert not torch.equal(start, end)
    assert not torch.equal(start[..., 5], run_attack(model, replace(attack, as_published=False), x, y).x_adv[..., 5])


@settings(deadline=None, max_examples=40)
@given(
    shape=st.one_of(
        st.tuples(st.integers(1, 3), st.integers(1, 13), st.integers(1, 13)),
        st.tuples(st.integers(1, 3), st.integers(1, 30)),
        st.tuples(st.integers(1, 30)),
    ),
    norm=st.sampled_from(["linf", "l2"]),
    eps=st.floats(0.0, 2.0),
    seed=st.integers(0, 2**31),
    all_steps=st.booleans(),
)
def test_any_shape_within_budget_and_range(shape, norm, eps, seed, all_steps):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, math.prod(shape), generator=generator)
    x = torch.rand(4, *shape, generator=generator).round(decimals=1)
    y = (x.flatten(1) @ weight.T).argmax(1)
    eps = min(eps, 1.0) if norm == "linf" else eps  # no wider than the range
    attack = Square(eps=eps, num_queries=12, norm=norm, all_steps=all_steps)
    result = run_attack(nn.Sequential(nn.Flatten(), linear(weight)), attack, x, y, seed=seed)
    assert 0 <= result.x_adv.min() <= result.x_adv.max() <= 1
    assert (result.linf if norm == "linf" else result.l2).max() <= eps + 1e-5


@pytest.mark.parametrize(("norm", "shape"), [("linf", (200,)), ("linf", (1, 200)), ("l2", (1, 200))])
def test_sequences(norm, shape):
    """An interval of one sign shifts the mean that the model looks at, in both norms."""
    model = nn.Sequential(nn.Flatten(), linear([[1 / 200] * 200, [0.0] * 200], [0.0, 0.57]))
    x = torch.full((30, *shape), 0.6)
    attack = Square(eps=0.1 if norm == "linf" else 1.5, num_queries=300, norm=norm)
    result = run_attack(model, attack, x, torch.zeros(30, dtype=torch.long))
    assert result.success.all()
    assert result.queries.max() < 300


def test_published_schedule():
    attack = Square(num_queries=10_000)
    sides = {query: attack.window(query, 224, 224)[0] for query in (1, 12, 52, 202, 502, 1002, 2002, 4002, 6002, 8002)}
    shares = [0.8 / 2**k for k in range(10)]
    assert list(sides.values()) == [round(math.sqrt(share * 224 * 224)) for share in shares]
    stretched = Square(num_queries=1000)
    assert stretched.window(201, 224, 224) == attack.window(2001, 224, 224)


@pytest.mark.parametrize(
    ("norm", "height", "width", "expected"),
    [
        ("linf", 10, 10, (9, 9)),
        ("linf", 1, 100, (1, 80)),
        ("linf", 100, 1, (80, 1)),
        ("linf", 4, 100, (4, 80)),
        ("linf", 100, 4, (80, 4)),
        ("l2", 1, 2, (1, 2)),
        ("l2", 11, 11, (11, 11)),
    ],
)
def test_windows_have_their_share_of_the_area(norm, height, width, expected):
    assert Square(norm=norm).window(1, height, width) == expected


def test_bump_is_two_opposite_pyramids():
    pyramid = _pyramid(3, 3)
    torch.testing.assert_close(pyramid[1, 1] / pyramid[0, 0], torch.tensor((1 + 1 / 4) / (1 / 4)))
    torch.testing.assert_close(pyramid.norm(), torch.tensor(1.0))
    for rows, columns in ((6, 6), (1, 8), (8, 1), (7, 4)):
        above, beside = _bumps(rows, columns).unflatten(1, (rows, columns))
        for bump in (above, beside):
            torch.testing.assert_close(bump.norm(), torch.tensor(1.0))
            assert bump.min() < 0 < bump.max()
        if rows > 1:
            assert above[: rows // 2].min() > 0 > above[rows // 2 :].max()
        if columns > 1:
            assert beside[:, : columns // 2].min() > 0 > beside[:, columns // 2 :].max()
    assert (_bumps(1, 1).abs() == 1).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_every_query_changes_something(channels):
    """On grey images, windows within a part of one sign would often draw that sign again."""
    seen = []

    def model(images):
        seen.append(images.clone())
        return images.flatten(1).sum(dim=1, keepdim=True) * torch.tensor([[0.0, 1.0]]) + torch.tensor([[1e4, 0.0]])

    x = torch.rand(1, channels, 9, 9).round(decimals=1)
    attack = Square(eps=0.1, num_queries=300, all_steps=True)
    result = run_attack(model, attack, x, torch.zeros(1, dtype=torch.long))
    best, queries = seen[1], seen[2 : 1 + attack.num_queries]
    for image in queries:
        assert not torch.equal(image, best)
        best = image if image.sum() > best.sum() else best
    assert torch.equal(result.x_adv, best)


def test_shape_is_checked():
    with pytest.raises(ValueError, match=r"square attack .*\(2, 1, 2, 2, 2\)"):
        run_attack(
            nn.Sequential(nn.Flatten(), nn.Linear(8, 2)),
            Square(all_steps=True),
            torch.rand(2, 1, 2, 2, 2),
            torch.zeros(2).long(),
        )
