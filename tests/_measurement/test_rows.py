import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_robustness._measurement.rows import Rows


def part(positions, seconds=0.0):
    """Rows of which one knows what they have to be."""
    positions = torch.tensor(positions, dtype=torch.long)
    columns = {"square": positions**2, "pair": torch.stack([positions, -positions], dim=1).double()}
    return Rows(positions, columns if len(positions) else {}, seconds)


def test_parts_without_samples_need_no_columns():
    joined = Rows.join([[part([])], [part([]), part([2, 1])], []])
    assert joined["square"].tolist() == [1, 4]
    for ranks in ([], [[]], [[part([])], []]):
        nothing = Rows.join(ranks)
        assert (len(nothing), nothing.columns, nothing.positions.dtype) == (0, {}, torch.long)


def test_the_slowest_process_counts():
    ranks = [[part([0], 1.0), part([1], 2.5)], [part([2], 3.25), part([], 0.125)], []]
    assert Rows.join(ranks).seconds == 3.5
    assert Rows.join(ranks[1:]).seconds == 3.375
    assert Rows.join([]).seconds == 0


def test_other_columns_in_another_part():
    with pytest.raises(KeyError):
        Rows.join([[part([0]), Rows(torch.tensor([1]), {"square": torch.ones(1)})]])


@given(st.data(), st.permutations(range(12)), st.integers(1, 4))
def test_however_samples_are_divided_the_rows_are_the_same(data, positions, number):
    """Among any number of processes, in batches of any size, in any order."""
    ends = sorted(data.draw(st.lists(st.integers(0, 12), min_size=5, max_size=5)))
    batches = [part(positions[start:end]) for start, end in zip([0, *ends], [*ends, 12], strict=True)]
    owners = data.draw(st.lists(st.integers(0, number - 1), min_size=6, max_size=6))
    ranks = [[batch for batch, owner in zip(batches, owners, strict=True) if owner == rank] for rank in range(number)]
    joined, whole = Rows.join(ranks), part(range(12))
    assert torch.equal(joined.positions, whole.positions)
    assert joined.columns.keys() == whole.columns.keys()
    assert all(torch.equal(joined[name], column) for name, column in whole.columns.items())
