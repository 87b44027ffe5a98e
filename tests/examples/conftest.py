import runpy
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run_example(tmp_path, monkeypatch, capsys):
    """Callable that runs a script as the command line does, in a new directory; returns its names and its output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # restored at the end: the scripts set it

    def run(name, *arguments):
        script = EXAMPLES / name
        monkeypatch.syspath_prepend(str(script.parent))
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        names = runpy.run_path(str(script), run_name="__main__")
        return names, capsys.readouterr().out

    return run


@pytest.fixture
def logged(tmp_path):
    """Callable that returns what the run in this directory logged while it trained; of scalars, ``{step: value}``."""

    def read(tag=None):
        events = EventAccumulator(str(min((tmp_path / "lightning_logs" / "version_0").glob("events*")))).Reload()
        return events.Tags() if tag is None else {event.step: event.value for event in events.Scalars(tag)}

    return read
