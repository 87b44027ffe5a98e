"""Checkpoints that may come from strangers, read without running or importing what they name."""

import argparse
import pickle
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_robustness.cli.class_path import load_object, split_path

# Hold data and do nothing when they are made. A path of another system is read as one of this.
_PATHS = [f"pathlib.{module}{name}" for module in ("", "_local.") for name in ("Path", "PosixPath", "WindowsPath")]
_PLAIN: dict[str, type] = {"argparse.Namespace": argparse.Namespace, **dict.fromkeys(_PATHS, Path)}
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
    """Read a checkpoint.

    Unless it is trusted, it may hold tensors, plain values, classes of ``torch.nn`` and ``torch.optim``, and classes
    that are defined in the module of the model. Nothing else is looked up, and only that module is imported.
    """
    if Path(checkpoint).is_dir():
        raise ValueError(
            f"Expected argument `checkpoint` to be a file but got the directory {checkpoint}. Make one file of a "
            "sharded checkpoint with `python -m lightning.pytorch.utilities.consolidate_checkpoint`."
        )
    if not Path(checkpoint).is_file():
        raise ValueError(f"Expected a checkpoint at {checkpoint} but there is no such file.")
    if trust_checkpoint:
        load_object(path)  # a pickle may import from the current directory
    try:
        with torch.serialization.safe_globals([] if trust_checkpoint else _allowed(checkpoint, path)):
            content = torch.load(checkpoint, map_location="cpu", weights_only=not trust_checkpoint)
    except _RefusedError as error:
        raise ValueError(_refusal(checkpoint, path, error.names)) from error
    except Exception as error:  # of any type, since every byte of a foreign file is read as an instruction
        refused = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if refused is not None:
            raise ValueError(_refusal(checkpoint, path, [refused[1]])) from error
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


class _RefusedError(Exception):
    def __init__(self, names: list[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names


def _reason(error: Exception) -> str:
    """First line of a message, without torch's advice on how to load the file regardless."""
    text = str(error).strip()
    inner = re.search(r"WeightsUnpickler error: (.+)", text)
    return (inner[1] if inner else text.partition("\n")[0]).rstrip(". ") or "no message"


def _refusal(checkpoint: str | Path, path: str, names: list[str]) -> str:
    return (
        f"Expected {checkpoint} to hold weights, plain values and classes of torch.nn, torch.optim and "
        f"{split_path(path)[0]!r} only but it refers to {', '.join(names)}. Save the state dict alone, or leave "
        f"this out of the hyper-parameters (`save_hyperparameters(ignore=...)`). {_REMEDY}"
    )


def _allowed(checkpoint: str | Path, path: str) -> list[Any]:
    """Classes that a checkpoint refers to and may use, by the names that it has for them."""
    try:
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(checkpoint)))
    except Exception:  # an older format: `torch.load` reads it with its own list of what is allowed
        return []
    found = {name: _PLAIN.get(name) or _torch_class(name) or _own_class(name, path) for name in names}
    refused = [name for name, kind in found.items() if kind is None]
    if refused:
        raise _RefusedError(refused)
    return [(kind, name) for name, kind in found.items()]


def _torch_class(name: str) -> type | None:
    module, _, attribute = name.rpartition(".")
    bases = next((bases for prefix, bases in _TORCH.items() if module.startswith(prefix)), ())
    kind = vars(sys.modules[module]).get(attribute) if module in sys.modules else None
    return kind if isinstance(kind, type) and issubclass(kind, bases) and kind.__module__ == module else None


def _own_class(name: str, path: str) -> type | None:
    """Class that the module of the model defines, or has imported from its own package."""
    build, (own, _) = load_object(path), split_path(path)
    module, _, attribute = name.rpartition(".")
    for home in dict.fromkeys([own, getattr(build, "__module__", own)]):
        kind = vars(sys.modules[home]).get(attribute)
        # What `__main__` defined when the model was trained is in a module that was run as a script
        expected = home if module == "__main__" else module
        is_same = isinstance(kind, type) and kind.__module__ == expected
        if is_same and expected.partition(".")[0] == home.partition(".")[0]:
            return kind
    return None


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
