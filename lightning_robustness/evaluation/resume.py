"""Results in a folder, from which an interrupted evaluation goes on."""

import json
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from lightning_robustness.evaluation.processes import Processes
from lightning_robustness.utilities.rank_zero import rank_zero_warn

_UNFINISHED = ".unfinished"
_VALUES = ".values.json"


class Chunk(NamedTuple):
    """Results of a part for some samples.

    Args:
        positions: Positions of the samples.
        seconds: Time that they took.
        values: Results, on the CPU.

    """

    positions: Tensor
    seconds: float
    values: dict[str, Tensor]


class Records:
    """Finished results, of this run and of those before it.

    Every file is written completely or not at all, and holds numbers and text only, no pickled objects. The first
    process alone reads what earlier runs have left, so a run may have another number of processes than the one before.

    Args:
        folder: The folder, made if there is none; None to keep nothing.
        processes: The processes that evaluate together.

    """

    def __init__(self, folder: str | Path | None, processes: Processes) -> None:
        self._folder = None if folder is None else Path(folder)
        self._processes = processes
        self._chunks: dict[str, list[Chunk]] = {}
        self._positions: dict[str, Tensor] = {}
        self._values: dict[str, Any] = {}

    @property
    def is_kept(self) -> bool:
        """Whether there is a folder."""
        return self._folder is not None

    def open(self, facts: Mapping[str, str]) -> None:
        """Read what earlier runs have left, in all processes at once.

        Args:
            facts: Everything that results depend on besides the data, by its name.

        Raises:
            ValueError: If the results in the folder are of something else.

        """
        if self._folder is None:
            return
        with self._processes.step():
            self._folder.mkdir(parents=True, exist_ok=True)  # in each process: machines may not share it
            if self._processes.rank == 0:
                for path in self._folder.glob(f"*{_UNFINISHED}"):
                    path.unlink()
                _compare(self._folder, "settings", facts)
                self._read(self._folder)
        found = {part: torch.cat([chunk.positions for chunk in chunks]) for part, chunks in self._chunks.items()}
        self._positions, self._values = self._processes.gather((found, self._values))[0]

    def check(self, facts: Mapping[str, str]) -> None:
        """Check that the results are of the same data, in all processes at once.

        Raises:
            ValueError: If they are not.

        """
        with self._processes.step():
            if self._folder is not None and self._processes.rank == 0:
                _compare(self._folder, "data", facts)

    def values(self, part: str) -> Any:
        """Return the finished values of a part, or None."""
        return self._values.get(part)

    def save_values(self, part: str, values: Any) -> None:
        """Keep the values of a part, which are the same in all processes, in all of them at once."""
        with self._processes.step():
            if self._folder is not None and self._processes.rank == 0:
                text = json.dumps(values)
                _write(self._folder / f"{part}{_VALUES}", lambda file: file.write(text.encode()))

    def positions(self, part: str) -> Tensor:
        """Return the positions of the samples for which a part is finished."""
        return self._positions.get(_slug(part), torch.zeros(0, dtype=torch.long))

    def chunks(self, part: str) -> list[Chunk]:
        """Return the finished results of a part in the first process, and nothing in the others."""
        return list(self._chunks.get(_slug(part), ()))

    def save_chunk(self, part: str, chunk: Chunk) -> None:
        """Keep the results of a part for some samples."""
        if self._folder is not None:
            path = self._folder / f"{_slug(part)}.{int(chunk.positions.min()):012d}.pt"
            _write(path, lambda file: torch.save(chunk._asdict(), file))

    def _read(self, folder: Path) -> None:
        for path in sorted(folder.glob(f"*{_VALUES}")) + sorted(folder.glob("*.pt")):
            try:
                if path.suffix == ".pt":
                    self._add(path.name.rsplit(".", 2)[0], Chunk(**torch.load(path, weights_only=True)))
                else:
                    self._values[path.name.removesuffix(_VALUES)] = json.loads(path.read_text(encoding="utf-8"))
            except Exception as error:  # a damaged file can fail in any way
                rank_zero_warn(f"{path} cannot be read, so its results are computed again: {error}")

    def _add(self, part: str, chunk: Chunk) -> None:
        """Add a chunk, unless it has samples of another: a process of a killed run may have gone on for a while."""
        chunks = self._chunks.setdefault(part, [])
        if not any(torch.isin(chunk.positions, other.positions).any() for other in chunks):
            chunks.append(chunk)


def check_folder(resume: Any) -> None:
    """Check the argument for the folder.

    Raises:
        TypeError: If it is not a path.
        ValueError: If it is a file.

    """
    if resume is not None and (not isinstance(resume, str | Path) or resume == ""):
        raise TypeError(f"Expected argument `resume` to be the path of a folder but got {resume!r}.")
    if resume is not None and Path(resume).exists() and not Path(resume).is_dir():
        raise ValueError(
            f"Expected argument `resume` to be the path of a folder but {resume} is a file. Pass another path, such as "
            "that of a folder which does not exist yet."
        )


def subfolder(folder: str | Path | None, name: str) -> Path | None:
    """Return the folder of one of several models."""
    return None if folder is None else Path(folder) / _slug(name)


def _compare(folder: Path, name: str, facts: Mapping[str, str]) -> None:
    path = folder / f"{name}.json"
    if not path.exists():
        text = json.dumps(dict(facts), indent=2)
        _write(path, lambda file: file.write(text.encode()))
        return
    try:
        before = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"Expected the {name} of an evaluation in {path} but it cannot be read: {error}. Pass another folder."
        ) from error
    names = [key for key in {**before, **facts} if before.get(key) != facts.get(key)]
    if names:
        listed = "; ".join(f"{key}: {before.get(key, 'none')} there, {facts.get(key, 'none')} here" for key in names)
        raise ValueError(
            f"Expected results of the same model, data and settings in {folder} but they differ. {listed}. "
            "Go on with what it was started with, or pass another folder."
        )


def _slug(name: str) -> str:
    """Return a file name for any name, with a checksum, since different names may look alike."""
    return f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)[:60]}-{zlib.crc32(name.encode()):08x}"


def _write(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file completely or not at all."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=_UNFINISHED)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
