"""Build models and data from their paths, and load checkpoints."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lightning_robustness._processes import rank_zero_warn
from lightning_robustness.cli.class_path import Target, load_object, read_arguments, split_target
from lightning_robustness.cli.safe_checkpoint import read_checkpoint, read_hyper_parameters, refuse_code

Split = Literal["val", "test"]


def load_model(
    path: Target,
    checkpoint: str | Path | None = None,
    arguments: Mapping[str, Any] | None = None,
    trust_checkpoint: bool = False,
) -> nn.Module:
    """Build a model and load its weights.

    The checkpoint is read with ``weights_only=True`` and cannot run code. A LightningModule is built with its
    hyper-parameters, and its hooks ``configure_model`` and ``on_load_checkpoint`` are called.
    """
    name, init_args, given = split_target(path, arguments)
    content = {} if checkpoint is None else read_checkpoint(checkpoint, name, trust_checkpoint)
    build = load_object(name)
    if checkpoint is None and isinstance(build, type):
        raise ValueError(
            f"Expected argument `checkpoint` with the weights of {name!r} but got none: they would be random. On the "
            f"command line, pass `--checkpoint FILE`, or {name}@FILE to `compare`. If they come from elsewhere, pass "
            "a function that returns the trained model."
        )
    given |= read_arguments(build, init_args)
    is_lightning = "pytorch-lightning_version" in content and hasattr(build, "load_from_checkpoint")
    if checkpoint is not None and trust_checkpoint and is_lightning:
        return _load_by_lightning(build, checkpoint, given, name)
    if checkpoint is not None and "state_dict" in content:
        content["hyper_parameters"] = read_hyper_parameters(content, checkpoint)
        saved = _select(build, content, given)
        if not trust_checkpoint:
            refuse_code(saved, checkpoint)
        given = {**saved, **given}
    model = _build(build, given, name, "model", nn.Module)
    if checkpoint is not None:
        _prepare(model, content if is_lightning else None, f"{name!r} to load {checkpoint}")
        _load_weights(model, content.get("state_dict", content), checkpoint)
    return model


def load_data(path: Target, split: Split = "test", arguments: Mapping[str, Any] | None = None) -> Any:
    """Build a loader."""
    name, init_args, given = split_target(path, arguments)
    build = load_object(name)
    given |= read_arguments(build, init_args)
    data = _build(build, given, name, "data")
    method = f"{split}_dataloader"
    splits = [key for key in ("val", "test") if _has_loader(data, key)]
    if split not in splits and (splits or hasattr(data, method)):
        remedy = f"Use split={splits[0]!r} (--split {splits[0]})." if splits else f"Give it a method `{method}`."
        raise ValueError(f"Expected {name!r} to have a loader for the split {split!r} but it has none. {remedy}")
    if hasattr(data, "prepare_data") and hasattr(data, "setup"):
        data.prepare_data()
        data.setup({"val": "validate", "test": "test"}[split])
    loader = getattr(data, method)() if splits else data
    if isinstance(loader, (list, tuple)) and len(loader) == 1 and splits:
        loader = loader[0]
    if isinstance(loader, (list, tuple, Mapping, str)) or not hasattr(loader, "__iter__"):
        observed = (
            f"{len(loader)} in a {type(loader).__name__}" if hasattr(loader, "__len__") else type(loader).__name__
        )
        raise TypeError(
            f"Expected {name!r} to give one loader for the split {split!r} but got {observed}. Pass a data module with "
            f"`{method}`, or a function that returns the loader."
        )
    return loader


def _has_loader(data: Any, split: str) -> bool:
    """Return whether a data module defines a loader; the one of Lightning's base class only raises an error."""
    method = getattr(type(data), f"{split}_dataloader", None)
    return method is not None and not method.__module__.startswith(("lightning.pytorch.", "pytorch_lightning."))


@contextmanager
def _explained(kind: type[Exception], expected: str, remedy: str) -> Iterator[None]:
    """Say what was expected where the code of a user or of Lightning fails."""
    try:
        yield
    except Exception as error:
        raise kind(f"Expected {expected} but it failed: {type(error).__name__}: {error}. {remedy}") from error


def _build(build: Callable[..., Any], given: Mapping[str, Any], name: str, what: str, kind: type = object) -> Any:
    source = "the hyper-parameters of a checkpoint of Lightning, and from `model_args`"
    remedy = f"Arguments come from {source if what == 'model' else '`data_args`'} and `init_args`."
    with _explained(TypeError, f"{name!r} to take the arguments {', '.join(given) or 'none'}", remedy):
        made = build(**given)
    if not isinstance(made, kind):
        raise TypeError(f"Expected {name!r} to make a torch.nn.Module but got {type(made).__name__}.")
    return made


def _load_by_lightning(build: Any, checkpoint: str | Path, arguments: dict[str, Any], name: str) -> nn.Module:
    has_option = "weights_only" in inspect.signature(build.load_from_checkpoint).parameters  # since Lightning 2.6
    options = {"weights_only": False} if has_option else {}
    remedy = "Arguments that are not among the hyper-parameters of the checkpoint can be given as `model_args`."
    with _explained(ValueError, f"{name!r} to load {checkpoint}", remedy):
        model: nn.Module = build.load_from_checkpoint(checkpoint, map_location="cpu", **options, **arguments)
    return model


def _select(build: Callable[..., Any], content: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters that a class takes and that are not given; older checkpoints may hold others."""
    saved = content["hyper_parameters"]
    parameters = inspect.signature(build).parameters
    whole = content.get("hparams_name")  # the argument that holds them all
    if isinstance(whole, str) and whole in parameters:
        saved = {whole: saved}
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in saved.items() if name not in given and (takes_all or name in parameters)}


def _prepare(model: nn.Module, content: dict[str, Any] | None, what: str) -> None:
    """Call the hooks in which a LightningModule creates its layers and edits the checkpoint."""
    with _explained(ValueError, what, "This came from `configure_model` or `on_load_checkpoint`."):
        if callable(getattr(model, "configure_model", None)):
            model.configure_model()  # type: ignore[operator]
        if content is not None:
            model.on_load_checkpoint(content)  # type: ignore[operator]


def _load_weights(model: nn.Module, state: Any, checkpoint: str | Path) -> None:
    name = type(model).__name__
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise ValueError(f"Expected {checkpoint} to hold a state dict, with names of weights, but got {state!r}.")
    own = model.state_dict()
    prefix = _find_prefix(state, own, f"{name} in {checkpoint}")
    state = state if prefix is None else {key: state[prefix + key] for key in own}
    is_strict = bool(getattr(model, "strict_loading", True))
    missing = [key for key in own if key not in state]
    has_none = bool(own) and len(missing) == len(own)
    try:
        model.load_state_dict(state, strict=is_strict or has_none)
    except Exception as error:  # weights may be of any type
        inner = [key for key, value in state.items() if isinstance(value, Mapping)]
        remedy = (
            f"It holds dictionaries ({', '.join(inner)}): save the one with the weights to a separate file."
            if inner
            else "Does it belong to another class, or to one with other arguments (`model_args`)?"
        )
        raise ValueError(
            f"Expected {checkpoint} to hold the weights of {name} but it does not. {remedy} {error}"
        ) from error
    if missing:
        rank_zero_warn(
            f"{checkpoint} lacks weights of {name}, which keep their initial values: {', '.join(missing)}. Loading is "
            "not strict because `strict_loading` is False."
        )


def _find_prefix(state: Mapping[str, Any], own: Mapping[str, Any], what: str) -> str | None:
    """Find the prefix of a network's weights, which may have been saved compiled, wrapped or within a module."""
    if not own or all(key in state for key in own):
        return None
    first = next(iter(own))
    prefixes = [key[: -len(first)] for key in state if key.endswith(f".{first}")]
    named = [prefix for prefix in prefixes if all(prefix + key in state for key in own)]
    fitting = [p for p in named if all(getattr(state[p + k], "shape", None) == v.shape for k, v in own.items())]
    # A network with two names is saved twice
    if any(not torch.equal(state[fitting[0] + key], state[other + key]) for other in fitting[1:] for key in own):
        raise ValueError(
            f"Expected one {what} but got {len(fitting)}, with the prefixes {', '.join(map(repr, fitting))}. Save the "
            "state dict of the intended one to a separate file."
        )
    return next(iter(fitting or named), None)
