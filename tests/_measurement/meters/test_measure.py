import pytest
import torch
from torch import nn

from lightning_robustness._measurement.meters import Interrupted, Meter, measure
from lightning_robustness._measurement.rows import Rows
from lightning_robustness._processes import OtherProcessError, Processes
from tests._measurement.subjects import rows_of, samples, subject


class Sums(Meter):
    """The sum of each input, until the sample at which it stops."""

    name, title, label = "sums", "sums", "the sums"

    def __init__(self, size=10, stop=None, error=KeyboardInterrupt, keeps_partial=True):
        self.size = size
        self.stop = stop
        self.error = error
        self.keeps_partial = keeps_partial
        self.seen = []

    def measure(self, subject, batch):
        if self.stop is not None and self.stop in batch.positions:
            raise self.error("enough")
        self.seen.append(batch.positions.tolist())
        return {"sum": batch.x.sum(dim=1).requires_grad_()}


class Kept:
    """Rows of an earlier run, and those that are kept now."""

    def __init__(self, *earlier):
        self.earlier = list(earlier)
        self.saved = []

    def rows(self, name):
        return list(self.earlier)

    def positions(self, name):
        return torch.cat([torch.zeros(0, dtype=torch.long), *(part.positions for part in self.earlier)])

    def save(self, name, rows):
        self.saved.append((name, rows))


X = torch.arange(20.0).reshape(10, 2)
SUMS = [1.0 + 4.0 * row for row in range(10)]
MODEL = nn.Linear(2, 2)


def measure_sums(meter, finished=None, batch_size=4):
    return measure(meter, subject(MODEL, batch_size=batch_size), samples(X), Processes(), finished)


def test_all_samples_are_measured_in_batches():
    meter = Sums()
    rows = measure_sums(meter)
    assert meter.seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert rows["sum"].tolist() == SUMS
    assert rows.positions.tolist() == list(range(10))
    assert not rows["sum"].requires_grad
    assert rows.seconds > 0


def test_a_meter_may_have_a_batch_size_of_its_own():
    meter = Sums()
    meter.batch_size = 3
    measure_sums(meter)
    assert [len(positions) for positions in meter.seen] == [3, 3, 3, 1]


def test_finished_rows_are_not_measured_again():
    # Rows that nobody would measure, so that one sees where they come from
    earlier = [Rows(torch.tensor([7, 2]), {"sum": torch.tensor([-7.0, -2.0])}, 5.0)]
    finished, meter = Kept(*earlier, Rows(torch.tensor([4]), {"sum": torch.tensor([-4.0])}, 1.0)), Sums()
    rows = measure_sums(meter, finished)
    assert meter.seen == [[0, 1, 3, 5], [6, 8, 9]]
    assert rows["sum"].tolist() == [-row if row in (2, 4, 7) else SUMS[row] for row in range(10)]
    assert rows.seconds > 6
    assert [(name, part.positions.tolist()) for name, part in finished.saved] == [
        ("sums", [0, 1, 3, 5]),
        ("sums", [6, 8, 9]),
    ]


def test_nothing_is_measured_where_everything_is_finished():
    finished, meter = Kept(Rows(torch.arange(10), {"sum": torch.zeros(10)})), Sums()
    assert measure_sums(meter, finished)["sum"].tolist() == [0] * 10
    assert meter.seen == finished.saved == []


@pytest.mark.parametrize("stop", [0, 5])
def test_an_interrupt_keeps_rows_where_a_part_says_something(stop):
    finished = Kept()
    with pytest.raises(KeyboardInterrupt) as stopped:
        measure_sums(Sums(stop=stop), finished)
    assert isinstance(stopped.value, Interrupted)
    assert stopped.value.label == "the sums"
    assert stopped.value.rows.positions.tolist() == ([0, 1, 2, 3] if stop else [])
    assert [part.positions.tolist() for _, part in finished.saved] == ([[0, 1, 2, 3]] if stop else [])


def test_an_interrupt_drops_rows_where_a_part_says_nothing():
    finished = Kept()
    with pytest.raises(KeyboardInterrupt) as stopped:
        measure_sums(Sums(stop=5, keeps_partial=False), finished)
    assert (stopped.value.label, stopped.value.rows) == ("the sums", None)
    # They are kept for a run that goes on
    assert [part.positions.tolist() for _, part in finished.saved] == [[0, 1, 2, 3]]


def test_an_error_is_raised_and_what_was_finished_is_kept():
    finished = Kept()
    with pytest.raises(OSError, match="enough"):
        measure_sums(Sums(stop=5, error=OSError), finished)
    assert [part.positions.tolist() for _, part in finished.saved] == [[0, 1, 2, 3]]


def measure_share(rank, stop, error):
    """Rows of two processes, the second of which stops; and what a process sees of it."""
    meter, first = Sums(stop=stop, error=error), 5 * rank
    try:
        rows = rows_of(meter, MODEL, X[first : first + 5], first=first, batch_size=2)
    except Interrupted as stopped:
        return "interrupted", stopped.rows.positions.tolist()
    except Exception as failure:
        return type(failure), str(failure)
    return "finished", rows["sum"].tolist()


def test_two_processes_raise_in_both_or_in_none(two_processes):
    assert two_processes(measure_share, None, None) == [("finished", SUMS)] * 2
    first, second = two_processes(measure_share, 7, KeyboardInterrupt)
    assert first == second
    assert first[0] == "interrupted"
    assert {5, 6} <= set(first[1]) <= {0, 1, 2, 3, 4, 5, 6}
    (kind, message), own = two_processes(measure_share, 7, OSError)
    assert own == (OSError, "enough")
    assert kind is OtherProcessError
    assert "Process 1 of 2 failed. OSError: enough" in message
