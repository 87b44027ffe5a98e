import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


@pytest.fixture
def run_example(tmp_path, monkeypatch, run_script):
    """Callable that runs an example in a new directory; returns its names and its output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # restored at the end: the scripts set it
    return lambda name, *arguments: run_script(f"examples/{name}", *arguments)


@pytest.fixture
def logged(tmp_path):
    """Callable that returns what a run in this directory logged while it trained; of scalars, ``{step: value}``."""

    def read(tag=None, folder="version_0"):
        events = EventAccumulator(str(min((tmp_path / "lightning_logs" / folder).glob("events*")))).Reload()
        return events.Tags() if tag is None else {event.step: event.value for event in events.Scalars(tag)}

    return read
