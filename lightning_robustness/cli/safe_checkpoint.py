"""Checkpoints that may come from strangers, read without running or importing what they name."""

import argparse
import pickle
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

from lightning_robustness.cli.class_path import load_object, split_path

# A path of another system is read as one of this.
_PATHS = [f"pathlib.{module}{name}" for module in ("", "_local.") for name in ("Path", "PosixPath", "WindowsPath")]
_TORCH: dict[str, tuple[type, ...]] = {
    "torch.nn.modules.": (nn.Module,),
    "torch.optim.": (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler),
}
# Entries of a dictionary that LightningCLI, jsonargparse and Hydra take for the name of code to run
_CODE_KEYS = frozenset({"_instantiator", "_class_path", "class_path", "_target_"})
_REMEDY = (
    "If you trust whoever made it, pass `trust_checkpoint=True` (`--trust_checkpoint` on the command line): it may "
    "then run any code."
)


def read_checkpoint(checkpoint: str | Path, path: str, trust_checkpoint: bool = False) -> dict[str, Any]:
    """Read a checkpoint, without running its code unless it is trusted.

    It may hold tensors, plain values, classes of ``torch.nn`` and ``torch.optim``, and classes that are defined in the
    module of the model. Nothing else is looked up, and only that module is imported.
    """
    if Path(checkpoint).is_dir():
        raise ValueError(
            f"Expected argument `checkpoint` to be a file but got the directory {checkpoint}. Make one file of a "
            "sharded checkpoint with `python -m lightning.pytorch.utilities.consolidate_checkpoint`."
        )
    if not Path(checkpoint).is_file():
        raise ValueError(f"Expected a checkpoint at {checkpoint} but there is no such file.")
    build = load_object(path)
    try:
        with _without_code(build, split_path(path)[0]) if not trust_checkpoint else nullcontext():
            content = torch.load(checkpoint, map_location="cpu", weights_only=not trust_checkpoint)
    except Exception as error:  # of any type, since every byte of a foreign file is read as an instruction
        refused = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if refused is not None:
            raise ValueError(
                f"Expected {checkpoint} to hold weights, plain values and classes of torch.nn, torch.optim and "
                f"{split_path(path)[0]!r} only but it refers to {refused[1]}. Save the state dict alone, or leave this "
                f"out of the hyper-parameters (`save_hyperparameters(ignore=...)`). {_REMEDY}"
            ) from error
        raise ValueError(
            "Expected argument `checkpoint` to be a file that `torch.save` or Lightning has written but "
            f"{checkpoint} cannot be read: {type(error).__name__}: {_reason(error)}. Is it another file, or incomplete?"
        ) from error
    if isinstance(content, nn.Module):
        return content.state_dict()
    if not isinstance(content, dict):
        raise ValueError(f"Expected a checkpoint or state dict in {checkpoint} but got {type(content).__name__}.")
    return content


def read_hyper_parameters(content: Mapping[str, Any], checkpoint: str | Path) -> dict[str, Any]:
    """Get the hyper-parameters of a checkpoint, without the entries that tell Lightning what to call with them."""
    given = content.get("hyper_parameters", {})
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ValueError(
            f"Expected `hyper_parameters` in {checkpoint} to be a dictionary with names but got {given!r}. Save its "
            "`state_dict` to a file of its own, and give the arguments as `model_args`."
        )
    return {name: value for name, value in given.items() if name not in ("_instantiator", "_class_path")}


def refuse_code(hyper_parameters: Mapping[str, Any], checkpoint: str | Path) -> None:
    """Refuse hyper-parameters that name code: a class that makes objects of them would import and run it."""
    for name, value in hyper_parameters.items():
        found = (name, value) if name in _CODE_KEYS else _find_code(value)
        if found is not None:
            key, code = found
            raise ValueError(
                f"Expected hyper-parameters in {checkpoint} to be plain values but `{name}` holds `{key}`, the name of "
                f"code to run: {code!r}. Give `{name}` yourself, as `model_args` or in a configuration of LightningCLI "
                f"(`--config` on the command line). {_REMEDY}"
            )


def _reason(error: Exception) -> str:
    """First line of a message, without torch's advice on how to load the file regardless."""
    text = str(error).strip()
    inner = re.search(r"WeightsUnpickler error: (.+)", text)
    return (inner[1] if inner else text.partition("\n")[0]).rstrip(". ") or "no message"


@contextmanager
def _without_code(build: Any, module_name: str) -> Iterator[None]:
    """Let torch read classes that hold data and do nothing else, and import nothing from the current directory."""
    # Of other callables, such as a `functools.partial`, this is the module of their type
    homes = {module_name, build.__module__ if isinstance(build, type | FunctionType) else module_name}
    kept = list(sys.path)
    sys.path[:] = [entry for entry in kept if Path(entry) != Path.cwd()]
    try:
        with torch.serialization.safe_globals(_allowed(homes)):
            yield
    finally:
        sys.path[:] = kept


def _allowed(homes: Iterable[str]) -> list[Any]:
    """List the classes that a checkpoint may use: of torch, and of the modules of the model and their package."""
    allowed: list[Any] = [argparse.Namespace, *((Path, name) for name in _PATHS)]
    for prefix, bases in _TORCH.items():
        for name in [name for name in sys.modules if name.startswith(prefix)]:
            allowed += [kind for kind in _classes(name) if issubclass(kind, bases) and kind.__module__ == name]
    for home in homes:
        package = home.partition(".")[0]
        own = [kind for kind in _classes(home) if kind.__module__.partition(".")[0] == package]
        # A class that `__main__` defined when the model was trained is in a module that was run as a script
        allowed += own + [(kind, f"__main__.{kind.__name__}") for kind in own if kind.__module__ == home]
    return allowed


def _classes(module_name: str) -> list[type]:
    return [kind for kind in getattr(sys.modules.get(module_name), "__dict__", {}).values() if isinstance(kind, type)]


def _find_code(value: Any) -> tuple[str, Any] | None:
    """Key and value of an entry that names code, at any depth; what contains itself is visited once."""
    waiting, seen = [value], {}  # with the values, so that no other can get the id of one
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, (type, torch.Tensor)):
            continue
        seen[id(value)] = value
        if isinstance(value, (list, tuple, set, frozenset)):
            waiting += value
        entries = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        for key, entry in entries.items():
            if key in _CODE_KEYS:
                return key, entry
            waiting.append(entry)
    return None
