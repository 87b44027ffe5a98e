import json
import tempfile
import uuid
from pathlib import Path


class History:
    """Values of the evaluations of a run, which find their way back from processes that Lightning has spawned."""

    def __init__(self) -> None:
        self._entries: list[dict[str, float]] = []
        self._transfer = Path(tempfile.gettempdir()) / f"lightning_robustness_{uuid.uuid4().hex}.json"
        self._last_batch: int | None = None  # number of training batches at the last evaluation

    @property
    def entries(self) -> list[dict[str, float]]:
        """One dictionary per evaluation."""
        if self._transfer.exists():  # training ran in processes that Lightning started, and ended
            self._entries = json.loads(self._transfer.read_text())
            self._transfer.unlink()
        return self._entries

    @entries.setter
    def entries(self, entries: list[dict[str, float]]) -> None:
        self._entries = entries

    def begin(self, anew: bool) -> None:
        """Begin a run, with or without the entries of the one before."""
        self._entries, self._last_batch = [] if anew else self._entries, None

    def add(self, batch: int, epoch: int, step: int, values: dict[str, float]) -> None:
        """Add values; those of attacks that run again at the end of training join the last evaluation."""
        if self.entries and batch == self._last_batch:
            entry = self.entries[-1]
            before = {key: entry.get(key, 0.0) for key in values if key.startswith("seconds/")}
            entry |= values | {key: values[key] + seconds for key, seconds in before.items()}
        else:
            self.entries.append({"epoch": epoch, "step": step, **values})
        self._last_batch = batch

    def send(self) -> None:
        """Leave the entries for the main process, at the end of a spawned one."""
        self._transfer.write_text(json.dumps(self._entries))
