"""The command ``lightning-robustness``: measure a checkpoint, compare several, show saved reports.

Nothing heavy is imported before a command is named, so that ``--help`` and ``--version`` answer at once.
"""

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning_robustness.cli.lightning_config import translate_configs
from lightning_robustness.cli.parser import make_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Arguments of the command, by default those of the shell.

    Returns:
        Exit code: 0 on success, 1 if a model could not be evaluated, 130 if the run was interrupted; results of other
        models, or so far, are then printed and written. Wrong arguments raise ``SystemExit`` with code 2.

    """
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
    from lightning_robustness.cli import commands
    from lightning_robustness.evaluation.class_path import instantiate
    from lightning_robustness.utilities.provenance import write_command

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
