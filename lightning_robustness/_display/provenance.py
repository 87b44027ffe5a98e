"""Where a result comes from: time, versions, machine and files, without the names of hosts, users or directories."""

import hashlib
import platform
import re
import shlex
from collections.abc import Iterable, Sized
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_LIBRARIES = ("lightning", "torchmetrics", "torchattacks")
# Home directories, and absolute directories up to the last separator; 8/255 has none
_HOME = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?[/\\](?:home|Users)[/\\][^/\\'\"=@,;\]}]+")
_DIRECTORIES = re.compile(r"(?<![\w.)])(?:~[/\\]|[A-Za-z]:[/\\]|/)(?:[^'\"=@,;:/\\]+[/\\])*")


def describe_run(device: torch.device | str = "cpu") -> dict[str, str]:
    """Describe time, versions and the machine."""
    from lightning_robustness import __version__  # here, since the package imports this module

    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        # torch names its build, as in 2.7.0+cpu, which the version of its distribution may leave out
        "versions": ", ".join([f"lightning-robustness {__version__}", f"torch {torch.__version__}", *_versions()]),
        "machine": ", ".join([f"{platform.system()} {platform.machine()}", _processor(), *_accelerator(device)]),
        "Python": platform.python_version(),
    }


def describe_data(dataloader: Any) -> dict[str, str]:
    """Describe the data by the class of the data set, and its size where it is known."""
    data = getattr(dataloader, "dataset", dataloader)
    size = f", {len(data)} samples" if data is not dataloader and isinstance(data, Sized) else ""
    return {"data": f"{type(data).__name__}{size}"}


def describe_checkpoint(path: str | None) -> dict[str, str]:
    """Describe a file of weights, if there is one, by its name and its SHA-256 hash."""
    if not path:
        return {"checkpoint": "none"}
    hashed = hashlib.sha256()
    with Path(path).open("rb") as file:
        while block := file.read(1 << 20):
            hashed.update(block)
    return {"checkpoint": Path(path).name, "checkpoint SHA-256": hashed.hexdigest()}


def write_command(arguments: Iterable[str]) -> str:
    """Write a command line without absolute directories, which may name a user."""
    return shlex.join(_DIRECTORIES.sub("", _HOME.sub("~", argument)) for argument in arguments)


def _versions() -> list[str]:
    found = []
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return found


def _processor() -> str:
    try:  # `platform.processor` is empty or repeats the architecture on Linux
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"


def _accelerator(device: torch.device | str) -> list[str]:
    device = torch.device(device)
    if device.type == "cuda":
        return [torch.cuda.get_device_name(device)]
    return [] if device.type == "cpu" else [device.type]
