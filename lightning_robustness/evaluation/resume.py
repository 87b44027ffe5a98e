"""Results in a folder, from which an interrupted evaluation resumes, and fingerprints of what they depend on."""

import hashlib
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from lightning_robustness._measurement.feature_pass import Features
from lightning_robustness._measurement.rows import Rows
from lightning_robustness._model.batch import Batch
from lightning_robustness._numbers import write_settings
from lightning_robustness._processes import UNFINISHED, Processes, rank_zero_warn, write_file

_SIZE = 8  # bytes
_MAX_TEXT = 400  # of a value in a message


def fingerprint_weights(model: nn.Module) -> str:
    """Return a hash of all parameters and buffers, with their names."""
    digest = hashlib.blake2b(digest_size=_SIZE)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {value.dtype}".encode())
        if not isinstance(value, nn.UninitializedParameter | nn.UninitializedBuffer):
            digest.update(f" {tuple(value.shape)}".encode())
            digest.update(_bytes(value))
    return digest.hexdigest()


def fingerprint_data(batch: Batch, extras: Iterable[str] = ()) -> Counter[str]:
    """Return hashes of the inputs of a batch, its labels, and other entries that the model takes.

    Those of a data set are their sums, in any order.
    """
    found = Counter(samples=len(batch.positions))
    columns = {"inputs": batch.x, **{f"`{name}`": batch.extras[name] for name in extras if name in batch.extras}}
    for name, column in (columns | ({} if batch.y is None else {"labels": batch.y.long()})).items():
        rows = zip(batch.positions, column, strict=True)
        found[name] = sum(_hash(_bytes(position) + _bytes(row)) for position, row in rows)
    return found


def describe_fingerprint(parts: Iterable[Counter[str]]) -> dict[str, str]:
    """Describe the data, given the fingerprints of its shares."""
    total = sum(parts, Counter[str]())
    names = ("labels", "inputs", *sorted(total.keys() - {"labels", "inputs", "samples"}))
    hashes = {name: f"{total[name] % 2 ** (8 * _SIZE):016x}" for name in names}
    return {"number of samples": str(total["samples"]), **hashes}


def hash_tensor(tensor: Tensor) -> int:
    """Return a hash of the values of a tensor."""
    return _hash(_bytes(tensor))


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=_SIZE).digest(), "little")


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


_FEATURES = "features.pt"
# Facts that results depend on: what the run was started with, and what was found in the first pass
_FACTS = ("settings", "data")
# Names of the files of rows, among others that a folder may hold
_ROWS = re.compile(r".*-[0-9a-f]{8}\.\d{12}\.pt")
# Layout of the files, which changes with what rows hold
_FORMAT = "5"


class ResumeFolder:
    """Finished results, of this run and of earlier ones.

    Files are written completely or not at all, without pickled objects. Only the first process reads the results of
    earlier runs, so a run may have another number of processes than the one before. ``features`` are those of all
    samples, in every process, or None if they are not finished.
    """

    def __init__(self, folder: str | Path | None, processes: Processes) -> None:
        self._folder = None if folder is None else Path(folder)
        self._processes = processes
        self._rows: dict[str, list[Rows]] = {}
        self._positions: dict[str, Tensor] = {}
        self.features: Features | None = None

    @property
    def is_kept(self) -> bool:
        """Return whether there is a folder."""
        return self._folder is not None

    def open(self, facts: Mapping[str, str]) -> None:
        """Read the results of earlier runs; all processes must call it."""
        if self._folder is None:
            return
        with self._processes.step():
            self._folder.mkdir(parents=True, exist_ok=True)  # in each process: machines may not share it
            if self._processes.rank == 0:
                for path in self._folder.glob(f"*{UNFINISHED}"):
                    path.unlink()
                _discard_unknown(self._folder)
                _compare(self._folder, "settings", facts)
                self._read(self._folder)
        found = {name: torch.cat([part.positions for part in parts]) for name, parts in self._rows.items()}
        self._positions, self.features = self._processes.gather((found, self.features))[0]

    def check(self, facts: Mapping[str, str]) -> None:
        """Check that the results are of the same data; all processes must call it."""
        with self._processes.step():
            if self._folder is not None and self._processes.rank == 0:
                _compare(self._folder, "data", facts)

    def recorded(self) -> dict[str, str]:
        """Return what was found about the data by earlier runs."""
        path = None if self._folder is None else self._folder / "data.json"
        return _read_facts(path) if path is not None and path.exists() else {}

    def save_features(self, features: Features) -> None:
        """Keep the features of all samples, which every process has; all of them must call it."""
        with self._processes.step():
            if self._folder is not None and self._processes.rank == 0:
                content = features._replace(distances={})._asdict() | {"margins": asdict(features.margins)}
                _write(self._folder / _FEATURES, content)

    def positions(self, name: str) -> Tensor:
        """Return the positions of the samples that a meter has finished."""
        return self._positions.get(_slug(name), torch.zeros(0, dtype=torch.long))

    def rows(self, name: str) -> list[Rows]:
        """Return what a meter has finished in earlier runs, in the first process alone."""
        return list(self._rows.get(_slug(name), ()))

    def save(self, name: str, rows: Rows) -> None:
        """Keep rows of a meter."""
        if self._folder is not None:
            _write(self._folder / f"{_slug(name)}.{int(rows.positions.min()):012d}.pt", asdict(rows))

    def _read(self, folder: Path) -> None:
        for path in sorted(folder.glob("*.pt")):
            try:
                content = torch.load(io.BytesIO(_unseal(path)), weights_only=True)
                if path.name == _FEATURES:
                    self.features = Features(**content | {"margins": Rows(**content["margins"])})
                else:
                    self._add(path.name.rsplit(".", 2)[0], Rows(**content))
            except Exception as error:  # a damaged file can fail in any way
                rank_zero_warn(f"{path} cannot be read, so its results are computed again: {error}")

    def _add(self, name: str, rows: Rows) -> None:
        """Add rows, unless others have samples of theirs: a process of a killed run may have gone on for a while."""
        parts = self._rows.setdefault(name, [])
        if not any(torch.isin(rows.positions, other.positions).any() for other in parts):
            parts.append(rows)


def check_folder(resume: Any) -> None:
    """Check the argument for the folder."""
    if resume is not None and (not isinstance(resume, str | Path) or resume == ""):
        raise TypeError(f"Expected argument `resume` to be the path of a folder but got {resume!r}.")
    if resume is not None and Path(resume).exists() and not Path(resume).is_dir():
        raise ValueError(
            f"Expected argument `resume` to be the path of a folder but {resume} is a file. Pass another path, "
            "such as a folder that does not exist yet."
        )


def subfolder(folder: str | Path | None, name: str) -> Path | None:
    """Return the folder of one of several models."""
    return None if folder is None else Path(folder) / _slug(name)


def _discard_unknown(folder: Path) -> None:
    """Delete results of which it is not known what they belong to, since a file of facts is lost or damaged."""
    results = [path for path in folder.glob("*.pt") if path.name == _FEATURES or _ROWS.fullmatch(path.name)]
    for path in [folder / f"{name}.json" for name in _FACTS] if results else ():
        try:
            _read_facts(path)
        except (FileNotFoundError, ValueError, TypeError) as error:
            reason = f"cannot be read: {error}" if path.exists() else "is missing"
            rank_zero_warn(f"All results next to {path} are computed again, since it {reason}.")
            for own in (*results, *(folder / f"{name}.json" for name in _FACTS)):
                own.unlink(missing_ok=True)
            return


def _read_facts(path: Path) -> dict[str, str]:
    """Read a file of facts and check its checksum."""
    facts = dict(json.loads(path.read_text(encoding="utf-8")))
    if facts.pop("checksum", None) != _checksum(facts):
        raise ValueError("its checksum is wrong, so it is damaged or of another program")
    return facts


def _checksum(facts: Mapping[str, str]) -> str:
    return f"{_hash(json.dumps(dict(facts)).encode()):016x}"


def _compare(folder: Path, name: str, facts: Mapping[str, str]) -> None:
    path = folder / f"{name}.json"
    if not path.exists():
        text = json.dumps({**facts, "checksum": _checksum(facts)}, indent=2)
        write_file(path, text.encode())
        return
    try:
        before = _read_facts(path)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"Expected the {name} of an evaluation in {path} but it cannot be read: {error}. Pass another folder."
        ) from error
    changed = [key for key in {**before, **facts} if not is_same(before.get(key), facts.get(key))]
    if changed:
        raise ValueError(
            f"Expected results of the same model, data and settings in {folder} but they differ. "
            f"{_describe_changes(changed, before, facts)}. Go on with what it was started with, or pass another folder."
        )


def _describe_changes(changed: Sequence[str], before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Say what differs, with both values; of rows of numbers, only whose they are: of the model, then of attacks.

    They may follow from the other differences, and those of attacks from the model's.
    """
    plain = {key: [shorten(facts.get(key, "none"), _MAX_TEXT) for facts in (before, now)] for key in changed}
    for key in changed:
        if _read_numbers(before.get(key)) is not None and _read_numbers(now.get(key)) is not None:
            del plain[key]
    if plain:
        return "; ".join(f"{key}: {there} there, {here} here" for key, (there, here) in plain.items())
    subject = changed[0].partition(": ")[0]
    own = [key.removeprefix(f"{subject}: ") for key in changed if key.startswith(f"{subject}: ")]
    return f"{subject} computes something else: {' and '.join(own)} differ"


def is_same(before: str | None, now: str | None) -> bool:
    """Compare texts; where both are rows of numbers, which devices compute differently, up to a thousandth."""
    pair = [_read_numbers(text) for text in (before, now)]
    if before == now or pair[0] is None or pair[1] is None or pair[0].shape != pair[1].shape:
        return before == now
    return torch.allclose(pair[0], pair[1], rtol=0, atol=1e-3 * pair[0].abs().max().item())


def _read_numbers(text: str | None) -> Tensor | None:
    """Return a row of several numbers, or None for any other text."""
    words = (text or "").split()
    try:
        return torch.tensor([float(word) for word in words]) if len(words) > 1 else None
    except ValueError:
        return None


def _slug(name: str) -> str:
    """Return a file name for any name, with a checksum, since different names may look alike."""
    return f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)[:60]}-{zlib.crc32(name.encode()):08x}"


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Write tensors and plain values to a file."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_file(path, _seal(buffer.getvalue()))


def _seal(content: bytes) -> bytes:
    """Add a checksum to the content of a file."""
    return content + f"\n{_hash(content):016x}".encode()


def _unseal(path: Path) -> bytes:
    """Read a file and check its checksum."""
    content = path.read_bytes()
    if _seal(content[:-17]) != content:
        raise ValueError("its checksum is wrong, so it is damaged")
    return content[:-17]


# By name: importing them takes long
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}


def open_folder(
    resume: str | Path | None, model: nn.Module, processes: Processes, facts: Mapping[str, Any]
) -> ResumeFolder:
    """Check that all processes have the same whole model, and that earlier results are of this evaluation."""
    folder, weights = ResumeFolder(resume, processes), ""
    with processes.step():
        if processes.number > 1:
            _check_whole(model)
        if processes.number > 1 or folder.is_kept:
            weights = fingerprint_weights(model)
    if len(set(processes.gather(weights))) > 1:
        raise ValueError(
            "Expected the same weights in all processes but they differ. Load the same checkpoint in each of them, or "
            "seed before the model is made."
        )
    described = {name: _describe(value) for name, value in facts.items()}
    own = {"model": type(model).__name__, "forward": _describe(model.forward), "weights": weights}
    folder.open({"format": _FORMAT, **own, "torch": torch.__version__, **described})
    return folder


def _check_whole(model: nn.Module) -> None:
    for module in model.modules():
        names = _WRAPPERS & {parent.__name__ for parent in type(module).__mro__}
        if names:
            raise ValueError(
                f"Expected a model that each process can use by itself but got {names.pop()} inside of "
                f"{type(model).__name__}. Pass the module within, such as `model.module`, whole in each process."
            )
    if any(hasattr(p, "ds_id") or "DTensor" in {type(p).__name__, type(p.data).__name__} for p in model.parameters()):
        raise ValueError(
            f"Expected a model that is whole in each process but the parameters of {type(model).__name__} are sharded. "
            "Evaluate a checkpoint of it, loaded in each process."
        )


def _describe(value: Any) -> str:
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return write_settings(value)
