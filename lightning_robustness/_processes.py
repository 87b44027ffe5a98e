import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist


class RobustnessWarning(UserWarning):
    """Every warning of this package, so that its tests can tell them from others."""


def rank_zero_warn(message: str, stacklevel: int = 2) -> None:
    """Warn in the first process only; without ``torch.distributed`` that is every process."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        warnings.warn(message, RobustnessWarning, stacklevel=stacklevel + 1)


T = TypeVar("T")

_PREFIX = "lightning_robustness"
# The time that NCCL has by default, after which it ends the processes without a reason
_PATIENCE = timedelta(minutes=10)


class ProcessesLostError(RuntimeError):
    """Processes can no longer talk to each other, so nothing that they do together can continue."""


class OtherProcessError(RuntimeError):
    """Another process failed."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def describe_error(error: BaseException) -> str:
    """Describe an error by its kind and message; an error of another process as if it were this one's."""
    return error.reason if isinstance(error, OtherProcessError) else f"{type(error).__name__}: {error}".rstrip(": ")


class _OtherProcessStopped(Exception):  # noqa: N818
    """Leave a step that another process could not finish."""


class Processes:
    """All processes of the default process group, or this one alone where there is none.

    Work is done in steps. In a step each process works by itself; at its end all of them learn whether one failed, and
    only then do they exchange results. So no process waits for the results of one that has none.
    """

    def __init__(self) -> None:
        is_group = dist.is_available() and dist.is_initialized()
        self.number = dist.get_world_size() if is_group else 1
        self.rank = dist.get_rank() if is_group else 0
        self._num_steps = self._num_gathers = 0
        self._call = 0
        if self.number > 1:
            from torch.distributed import distributed_c10d  # not in all builds of torch

            # The group has no public access to its key-value store, which can be asked without waiting for the others
            self._store: Any = distributed_c10d._get_default_store()  # not all releases of torch declare `check`
            self._call = self._store.add(self._calls, 1)
            self._meet()

    def _meet(self) -> None:
        """Wait until all processes are here, since one that never comes would otherwise be waited for much longer."""
        keys = [f"{_PREFIX}/{self._call}/here/{rank}" for rank in range(self.number)]
        self._store.set(keys[self.rank], "")
        try:
            self._store.wait(keys, _PATIENCE)
        except RuntimeError as error:
            self._store.add(self._calls, -1)
            missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
            raise ProcessesLostError(
                f"Expected all {self.number} processes to evaluate together but process {', '.join(missing)} did not "
                f"start within {_PATIENCE.total_seconds():g} seconds. Call the function in every process, not in the "
                "first alone."
            ) from error

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, in the order of their ranks."""
        if self.number == 1:
            return [value]
        self._num_gathers += 1
        own = (self._call, self._num_gathers, value)
        found = [own] * self.number
        try:
            dist.all_gather_object(found, own)
        except RuntimeError as error:
            raise ProcessesLostError(
                f"Process {self.rank} of {self.number} lost the connection to another one, which has ended: {error}"
            ) from error
        if any(entry[:2] != own[:2] for entry in found):
            raise ProcessesLostError(
                f"Expected all {self.number} processes to be in the same part of an evaluation but they are not. An "
                "error in one of them came before."
            )
        return [entry[2] for entry in found]

    def poll(self) -> None:
        """Leave the step if another process has failed or was interrupted in it; takes less than 0.1 ms."""
        if self.number > 1 and self._store.check([self._key]):
            raise _OtherProcessStopped

    @contextmanager
    def step(self) -> Iterator[None]:
        """Work that each process does by itself, without talking to the others."""
        if self.number == 1:
            yield
            return
        self._num_steps += 1
        error: BaseException | None = None
        try:
            yield
        except _OtherProcessStopped:
            pass
        except ProcessesLostError:  # of a step within this one
            raise
        except (Exception, KeyboardInterrupt) as caught:
            error = caught
            self._store.set(self._key, "stopped")
        self._conclude(error)

    @contextmanager
    def together(self, context: AbstractContextManager[T]) -> Iterator[T]:
        """Enter a context in a step, so that all processes enter it or none does."""
        with ExitStack() as stack:
            with self.step():
                value = stack.enter_context(context)
            yield value

    def _conclude(self, error: BaseException | None) -> None:
        reason = describe_error(error) if isinstance(error, Exception) else ""
        found = self.gather((error is not None, reason))
        if isinstance(error, Exception):
            raise error
        failed = [(rank, text) for rank, (_, text) in enumerate(found) if text]
        if failed:
            rank, text = failed[0]
            others = f" So did {len(failed) - 1} more." if len(failed) > 1 else ""
            raise OtherProcessError(f"Process {rank} of {self.number} failed. {text}{others}", text)
        if any(is_stopped for is_stopped, _ in found):
            raise KeyboardInterrupt

    @property
    def _calls(self) -> str:
        return f"{_PREFIX}/calls/{self.rank}"

    @property
    def _key(self) -> str:
        return f"{_PREFIX}/{self._call}/{self._num_steps}"


UNFINISHED = ".unfinished"


def write_file(path: str | Path, content: bytes) -> None:
    """Write a file completely or not at all: a full disk leaves the old one untouched."""
    if os.path.exists(path) and not os.path.isfile(path):  # a device or a pipe, such as /dev/stdout
        Path(path).write_bytes(content)
        return
    path = Path(os.path.realpath(path))
    mode = path.stat().st_mode if path.exists() else None
    temporary = path.with_name(f".{path.name[:100]}.{os.getpid()}{UNFINISHED}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            temporary.chmod(mode)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise type(error)(error.errno, error.strerror or str(error), str(path)) from error
        raise
