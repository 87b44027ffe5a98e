"""Models and data by the names that a command line gives them."""

import importlib
import inspect
import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

Split = Literal["val", "test"]


def load_object(path: str) -> Any:
    """Import something by its path, ``package.module:name``.

    Raises:
        ValueError: If the path has another form, the module is not found, or has no such name.

    Example:
        >>> from lightning_robustness.evaluation.checkpoint import load_object
        >>> load_object("torch.nn:Linear")
        <class 'torch.nn.modules.linear.Linear'>

    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ValueError(f"Expected a path of the form package.module:Name but got {path!r}.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"Expected the module of {path!r} to be found but there is no {error.name!r}. Modules are looked for in "
            "the current directory and where Python finds packages."
        ) from error
    if not hasattr(module, name):
        known = ", ".join(sorted(key for key, value in vars(module).items() if inspect.isclass(value)))
        raise ValueError(f"Expected {name!r} in the module {module_name!r} but found only the classes {known or '-'}.")
    return getattr(module, name)


def load_model(
    path: str, checkpoint: str | Path | None = None, arguments: Mapping[str, Any] | None = None
) -> nn.Module:
    """Make a model and load its weights.

    A class of Lightning loads its checkpoints itself, hooks included, by ``load_from_checkpoint``.

    Args:
        path: ``package.module:Class``, or a function that returns a module.
        checkpoint: File with weights: a checkpoint of Lightning, whose hyper-parameters become arguments of the class,
            or a state dict. Weights of a part of a larger module are found in those of the whole. It is loaded with
            ``weights_only=True``, and so cannot run code.
        arguments: Further arguments of the class, which take precedence.

    Raises:
        TypeError: If the path leads to something else.
        ValueError: If the checkpoint cannot be read, belongs to another class, or holds several such models.

    """
    content = {} if checkpoint is None else _read(checkpoint)
    build = load_object(path)
    if not callable(build):
        raise TypeError(f"Expected {path!r} to be a class or function that makes a model but got {build!r}.")
    if "pytorch-lightning_version" in content and hasattr(build, "load_from_checkpoint"):
        return _load_itself(build, content, dict(arguments or {}), f"{path!r} to load {checkpoint}")
    given = dict(content.get("hyper_parameters", {})) if "state_dict" in content else {}
    given = {**_known(build, given), **dict(arguments or {})}
    try:
        model = build(**given)
    except TypeError as error:
        raise TypeError(
            f"Expected {path!r} to take the arguments {', '.join(given) or 'none'} but it failed: {error}. Arguments "
            "come from the hyper-parameters of a checkpoint of Lightning, and from `model_args`."
        ) from error
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected {path!r} to make a torch.nn.Module but got {type(model).__name__}.")
    if checkpoint is not None:
        _load_weights(model, content.get("state_dict", content), checkpoint)
    return model


def load_data(path: str, split: Split = "test", arguments: Mapping[str, Any] | None = None) -> Any:
    """Make a loader.

    Args:
        path: ``package.module:DataModule``, a class with ``test_dataloader`` or ``val_dataloader``; or a function that
            returns a loader.
        split: Which of the loaders of a data module.
        arguments: Arguments of the class or function.

    Raises:
        TypeError: If there is no single loader.

    """
    data = load_object(path)(**dict(arguments or {}))
    method = f"{split}_dataloader"
    if hasattr(data, "prepare_data") and hasattr(data, "setup"):
        data.prepare_data()
        data.setup({"val": "validate", "test": "test"}[split])
    loader = getattr(data, method)() if hasattr(data, method) else data
    if isinstance(loader, (list, tuple)) and len(loader) == 1 and hasattr(data, method):
        loader = loader[0]
    if isinstance(loader, (list, tuple, Mapping)) or not hasattr(loader, "__iter__"):
        observed = (
            f"{len(loader)} in a {type(loader).__name__}" if hasattr(loader, "__len__") else type(loader).__name__
        )
        raise TypeError(f"Expected {path!r} to give one loader for the split {split!r} but got {observed}.")
    return loader


def _read(checkpoint: str | Path) -> dict[str, Any]:
    if not Path(checkpoint).is_file():
        raise ValueError(f"Expected a checkpoint at {checkpoint} but there is no such file.")
    try:
        content = torch.load(checkpoint, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"Expected {checkpoint} to hold weights and plain values only but it cannot be read as such: {error} "
            "If you trust it, load it yourself and save its state dict."
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"Expected a checkpoint or state dict in {checkpoint} but got {type(content).__name__}.")
    return content


def _load_itself(build: Any, content: dict[str, Any], arguments: dict[str, Any], what: str) -> nn.Module:
    """Let a class of Lightning load a checkpoint: not from the file, but from what was read of it without its code."""
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    try:
        model: nn.Module = build.load_from_checkpoint(file, map_location="cpu", **arguments)
    except Exception as error:
        raise ValueError(
            f"Expected {what} but it failed: {type(error).__name__}: {error} Arguments that are not among the "
            "hyper-parameters of the checkpoint can be given as `model_args`."
        ) from error
    return model


def _known(build: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those hyper-parameters that a class takes: older checkpoints may hold others."""
    parameters = inspect.signature(build).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}


def _load_weights(model: nn.Module, state: Mapping[str, Any], checkpoint: str | Path) -> None:
    own = model.state_dict()
    prefix = _find_prefix(state, own, f"{type(model).__name__} in {checkpoint}")
    state = state if prefix is None else {key: state[prefix + key] for key in own}
    missing, unexpected = [k for k in own if k not in state], [k for k in state if k not in own]
    reshaped = [
        f"{key} (shape {tuple(state[key].shape)} instead of {tuple(value.shape)})"
        for key, value in own.items()
        if key in state and getattr(state[key], "shape", None) != value.shape
    ]
    problems = {"missing": missing, "unexpected": unexpected, "different": reshaped}
    found = "; ".join(f"{name}: {_list(keys)}" for name, keys in problems.items() if keys)
    if found:
        raise ValueError(
            f"Expected {checkpoint} to hold the weights of {type(model).__name__} but it does not. {found}."
        )
    model.load_state_dict(state)


def _find_prefix(state: Mapping[str, Any], own: Mapping[str, Any], what: str) -> str | None:
    """Prefix of the weights of a network that was part of a module, compiled or wrapped when it was saved."""
    if not own or all(key in state for key in own):
        return None
    first = next(iter(own))
    prefixes = [key[: -len(first)] for key in state if key.endswith(f".{first}")]
    named = [prefix for prefix in prefixes if all(prefix + key in state for key in own)]
    fitting = [p for p in named if all(getattr(state[p + k], "shape", None) == v.shape for k, v in own.items())]
    # A network with two names is saved twice
    if any(not torch.equal(state[fitting[0] + key], state[other + key]) for other in fitting[1:] for key in own):
        prefixes = [repr(prefix) for prefix in fitting]
        raise ValueError(
            f"Expected one {what} but got {len(prefixes)}, with the prefixes {_list(prefixes)}. Save the state dict of "
            "the one that you mean to a file of its own."
        )
    return next(iter(fitting or named), None)


def _list(keys: list[str], most: int = 5) -> str:
    rest = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(keys[:most]) + rest
