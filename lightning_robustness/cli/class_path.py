"""Import classes and functions by path, and read their arguments as LightningCLI does."""

import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

# ``package.module:Name``, or a mapping of LightningCLI with ``class_path``, ``init_args`` and ``dict_kwargs``
Target = str | Mapping[str, Any]
_KEYS = ("class_path", "init_args", "dict_kwargs")


def load_object(path: str) -> Any:
    """Import an object by its path, ``package.module:name`` or ``package.module.name``.

    The current directory is searched first, as ``python script.py`` would.
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return pkgutil.resolve_name(":".join(split_path(path)))
    except Exception as error:  # of any type, since a module is run
        raise ValueError(
            f"Expected package.module:Name but got {path!r}, which cannot be imported from the current directory or "
            f"Python's path: {type(error).__name__}: {error}"
        ) from error


def split_path(path: str) -> tuple[str, str]:
    """Split a path into the names of the module and of the object."""
    module_name, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    return module_name, name


def split_target(
    target: Target, arguments: Mapping[str, Any] | None = None
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Split a target into its path, the arguments to parse, with others that replace them, and those to pass on."""
    if isinstance(target, str):
        target = {"class_path": target}
    init_args, dict_kwargs = target.get("init_args") or {}, target.get("dict_kwargs") or {}
    is_known = all(key in _KEYS for key in target) and isinstance(target.get("class_path"), str)
    if not is_known or not isinstance(init_args, Mapping) or not isinstance(dict_kwargs, Mapping):
        raise ValueError(
            "Expected package.module:Name, or a mapping with `class_path` (a string) and `init_args` (a mapping) as in "
            f"a configuration of LightningCLI, but got {dict(target)!r}."
        )
    return target["class_path"], {**init_args, **(arguments or {})}, dict(dict_kwargs)


def read_arguments(build: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert plain values, as read from YAML, to the annotated types, as LightningCLI does.

    A mapping with ``class_path`` becomes an object, a string a path or a member of an enumeration, a list a tuple.
    """
    hints = _annotations(build)
    typed = {name: value for name, value in arguments.items() if name in hints}
    if not typed:
        return dict(arguments)
    from jsonargparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(exit_on_error=False, add_help=False)
    try:
        for name in typed:
            parser.add_argument(f"--{name}", type=hints[name])
        made = instantiate(parser, parser.parse_object(typed)).as_dict()
    except (ArgumentError, TypeError, ValueError) as error:
        what = getattr(build, "__qualname__", repr(build))
        raise ValueError(
            f"Expected arguments that fit the annotations of {what} but got {dict(typed)!r}: {error}"
        ) from error
    return {**arguments, **{name: made[name] for name in typed}}


def instantiate(parser: Any, options: Any) -> Any:
    """Instantiate the objects that options describe."""
    return (getattr(parser, "instantiate", None) or parser.instantiate_classes)(options)  # its name before 4.49


def _annotations(build: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a class's parameters and of its parents', which may be passed on by keyword."""
    functions = [vars(kind).get("__init__") for kind in reversed(build.__mro__)] if inspect.isclass(build) else [build]
    hints: dict[str, Any] = {}
    for function in functions:
        try:
            hints |= get_type_hints(function)
        except Exception:  # a name imported for type checkers only, or not a Python function
            continue
    hints.pop("return", None)
    return hints
