import argparse
import json
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from lightning_robustness.cli.parser import make_parser

_SUBCOMMANDS = ("fit", "validate", "test", "predict")
_SIGNS = ("trainer", "seed_everything")
# No option by themselves
_PARTS = {"input_space": "input_space.low, --input_space.high"}
# Arguments that a message names in a more precise way too, and how it does
_COVERED = {"eps": "budgets`", "input_space": "InputSpace("}
# Values of Python that options can have too
_PLAIN = r"'?[\w./-]*'?"
# Errors of arguments, and of a model or data that do not fit; others are failures
_MISFITS = (FileNotFoundError, ModuleNotFoundError, PermissionError, TypeError, ValueError)


def translate_configs(arguments: Sequence[str]) -> list[str]:
    """Replace LightningCLI configuration files among the arguments by their options for model and data."""
    # ``--config=FILE`` is two arguments too
    parts = [argument.split("=", 1) if argument.startswith("--config=") else [argument] for argument in arguments]
    translated = list(chain(*parts))
    for index, (name, path) in enumerate(pairwise(translated.copy()), start=1):
        if name == "--config" and os.path.isfile(path):  # which takes the text of a configuration too, of any length
            options = _read_lightning(Path(path), takes_model="compare" not in arguments)
            translated[index] = path if options is None else json.dumps(options)
    return translated


def _read_lightning(path: Path, takes_model: bool) -> dict[str, Any] | None:
    """Return the options from a configuration of LightningCLI, or None for a file of this command."""
    import yaml  # type: ignore[import-untyped]

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"Expected `--config` to be a YAML file but {path} cannot be read: {error}") from error
    if not isinstance(config, Mapping):
        raise ValueError(
            f"Expected `--config` to be a YAML file with options but {path} holds {type(config).__name__}. Write one "
            "with `--print_config`."
        )
    for name in _SUBCOMMANDS:  # a file for several subcommands has a section for each
        if isinstance(config.get(name), Mapping):
            config = {**dict.fromkeys(_SIGNS), **config[name]}
            break
    if not any(sign in config for sign in _SIGNS):
        return None
    options = {}
    for name in ("model", "data") if takes_model else ("data",):
        value = config.get(name)
        if isinstance(value, Mapping) and "class_path" not in value:  # the class is fixed in the script
            options[f"{name}_args"] = dict(value)
        elif value is not None:
            options[name] = value
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        parser = make_parser(given)
    except ModuleNotFoundError as error:
        return _fail(
            f"Expected {error.name}, which reads the arguments, but it is not installed: "
            'pip install "lightning-robustness[cli]"'
        )
    try:
        return _run(parser, given)
    except KeyboardInterrupt:
        return _fail("interrupted before there was anything to report", code=130)
    except Exception as error:
        if "--traceback" in given:
            traceback.print_exc()
        if isinstance(error, (argparse.ArgumentError, *_MISFITS)):
            _reject(parser, given, error)
        return _fail(f"{type(error).__name__}: {error}")


def _reject(parser: Any, given: Sequence[str], error: Exception) -> None:
    """Say what is wrong with the arguments, with the usage of the command, and exit with 2."""
    commands = _subcommands(parser)
    command = next((name for name in given if name in commands), "")
    chosen = commands.get(command, parser)
    chosen.exit_on_error = True
    if not isinstance(error, argparse.ArgumentError):
        chosen.error(_with_flags(str(error), chosen))
    message = str(error)
    for action in chosen._actions:  # by the names that are typed
        message = re.sub(rf"\b{command}\.{action.dest}\b", (action.option_strings or ["FILE"])[-1], message)
    chosen.error(message)


def _with_flags(message: str, command: Any) -> str:
    """Add the options that stand for the arguments of Python that stand at the start of code in a message."""
    flags: list[tuple[int, str]] = []
    for action in command._actions:
        place, _, name = action.dest.rpartition(".")
        if name in _COVERED and _COVERED[name] in message:
            continue
        pattern = rf"InputSpace\([^`]*?\b{name}=([^,)]*)" if place else rf"`{name}(?:=([^`]*))?`"
        for found in re.finditer(pattern, message):
            value = found[1] if re.fullmatch(_PLAIN, found[1] or "-") else None
            value = "package.module:function" if name.endswith("_fn") else (value or "").strip("'")
            value = "null" if value == "None" else value
            flags.append((found.end(), f"--{_PARTS.get(action.dest, action.dest)} {value}".strip()))
    listed = ", ".join(dict.fromkeys(flag for _, flag in sorted(flags)))
    return f"{message}\nOn the command line: {listed}" if flags else message


def _run(parser: Any, given: Sequence[str]) -> int:
    given = translate_configs(given)
    options = parser.parse_args(given)  # before imports that take seconds
    from lightning_robustness._display.provenance import write_command
    from lightning_robustness.cli import commands
    from lightning_robustness.cli.class_path import instantiate

    options = instantiate(parser, options)
    chosen = options[options.command]
    chosen["command_line"] = write_command(["lightning-robustness", *given])  # for the provenance of the report
    return commands.run(options.command, chosen, _flags_in_warnings(_subcommands(parser)[options.command]))


@contextmanager
def _flags_in_warnings(command: Any) -> Iterator[None]:
    """Add options to warnings where they are written, as to errors."""
    from lightning_robustness._processes import RobustnessWarning

    write = warnings.formatwarning

    def write_with_flags(message: Any, *arguments: Any, **options: Any) -> str:
        is_own = isinstance(message, RobustnessWarning)
        return write(_with_flags(str(message), command) if is_own else message, *arguments, **options)

    warnings.formatwarning = write_with_flags
    try:
        yield
    finally:
        warnings.formatwarning = write


def _subcommands(parser: Any) -> Any:
    return next(action.choices for action in parser._actions if action.dest == "command")


def _fail(message: str, code: int = 1) -> int:
    sys.stderr.write(f"lightning-robustness: {message}\n")
    return code
