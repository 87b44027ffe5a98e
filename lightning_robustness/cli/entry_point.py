import json
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lightning_robustness.cli.parser import make_parser

_SUBCOMMANDS = ("fit", "validate", "test", "predict")
_SIGNS = ("trainer", "seed_everything")


def translate_configs(arguments: Sequence[str]) -> list[str]:
    """Replace LightningCLI configuration files among the arguments by their options for model and data."""
    translated = list(arguments)
    for index, argument in enumerate(arguments):
        is_joined = argument.startswith("--config=")
        position = index if is_joined else index + 1
        if not is_joined and (argument != "--config" or position == len(arguments)):
            continue
        path = argument.removeprefix("--config=") if is_joined else arguments[position]
        options = _read_lightning(Path(path), takes_model="compare" not in arguments) if Path(path).is_file() else None
        if options is not None:
            text = json.dumps(options)
            translated[position] = f"--config={text}" if is_joined else text
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
        with _checked_arguments(parser, show_traceback="--traceback" in given):
            given = translate_configs(given)
        options = parser.parse_args(given)
        return _run(parser, options, ["lightning-robustness", *given])
    except KeyboardInterrupt:
        return _fail("interrupted before there was anything to report", code=130)


def _run(parser: Any, options: Any, command: Sequence[str]) -> int:
    from lightning_robustness._display.provenance import write_command
    from lightning_robustness.cli import commands
    from lightning_robustness.cli.class_path import instantiate

    checked = partial(_checked_arguments, parser, options.traceback)
    with checked():
        options = instantiate(parser, options)
        options[options.command]["command_line"] = write_command(command)  # for the provenance of the report
    try:
        return commands.COMMANDS[options.command](checked, options[options.command])
    except Exception as error:
        if options.traceback:
            traceback.print_exc()
        return _fail(f"{type(error).__name__}: {error}")


@contextmanager
def _checked_arguments(parser: Any, show_traceback: bool) -> Iterator[None]:
    """Report errors in arguments as the parser reports its own, with exit code 2."""
    try:
        yield
    except (ModuleNotFoundError, OSError, TypeError, ValueError) as error:
        if show_traceback:
            traceback.print_exc()
        parser.error(str(error))


def _fail(message: str, code: int = 1) -> int:
    sys.stderr.write(f"lightning-robustness: {message}\n")
    return code
