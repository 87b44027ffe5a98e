"""Translate configuration files of LightningCLI for this command."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_SUBCOMMANDS = ("fit", "validate", "test", "predict")
_SIGNS = ("trainer", "seed_everything")


def translate_configs(arguments: Sequence[str]) -> list[str]:
    """Replace LightningCLI configuration files among the arguments by their options for model and data.

    Raises:
        ValueError: If a file is not YAML.

    """
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
