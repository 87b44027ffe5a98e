import sys

import pytest
import torch

from tests._measurement.subjects import samples, subject


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_batches_hold_all_samples_in_order(batch_size):
    given = samples(torch.rand(8, 2), torch.arange(8))
    batches = list(subject(torch.nn.Identity(), batch_size=batch_size).batches(given, "all"))
    assert [len(batch.x) for batch in batches] == [len(part) for part in given.x.split(batch_size)]
    for name in ("x", "y", "positions"):
        assert torch.equal(torch.cat([getattr(batch, name) for batch in batches]), getattr(given, name))


def test_batches_of_nothing_and_without_labels():
    assert list(subject(torch.nn.Identity()).batches(samples(torch.zeros(0, 0)), "none")) == []
    (batch,) = subject(torch.nn.Identity()).batches(samples(torch.rand(2, 1)), "unlabelled")
    assert batch.y is None
    with pytest.raises(ValueError, match="labels, for attacks"):
        batch.labels()


@pytest.mark.parametrize("progress", [False, True])
def test_progress_is_shown_where_it_is_wanted(capsys, monkeypatch, progress):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    list(subject(torch.nn.Identity(), progress=progress).batches(samples(torch.rand(4, 1)), "some title"))
    assert ("some title" in capsys.readouterr().err) == progress


def test_logs_that_are_no_terminals_get_no_progress(capsys):
    list(subject(torch.nn.Identity(), progress=True).batches(samples(torch.rand(4, 1)), "some title"))
    assert capsys.readouterr().err == ""
