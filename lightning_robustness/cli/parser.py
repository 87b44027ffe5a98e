"""Options of the commands."""

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args, get_origin

from lightning_robustness import __version__

_COMMANDS = {
    "evaluate": ("--model MODULE:CLASS --checkpoint FILE --data MODULE:CLASS [options]", "measure one model"),
    "sweep": (
        "--model MODULE:CLASS --checkpoint FILE --data MODULE:CLASS [options]",
        "attack one model with increasing budgets",
    ),
    "compare": ("--models NAME=MODULE:CLASS@FILE ... --data MODULE:CLASS [options]", "compare several models"),
    "report": ("FILE [--html FILE]", "show a saved report, or write it as a page"),
}
# A number, or a fraction such as 8/255
_BUDGET = float | str
# A path of a class or function, or a mapping of LightningCLI
_TARGET = dict[str, Any] | str
# Options that the command has of its own: their types and help
_OWN: dict[str, tuple[Any, str]] = {
    "models": (
        str,
        "name=package.module:Class@checkpoint, or name=report.json, as written by `evaluate --sweep_budgets`.",
    ),
    "model": (_TARGET, "package.module:Class, a function that returns a model, or {class_path: ..., init_args: ...}."),
    "checkpoint": (str | None, "Checkpoint of Lightning, or a state dict. Required if the model is a class."),
    "data": (_TARGET | None, "Data module, package.module:Class, a function that returns a loader, or a class_path."),
    "model_args": (dict[str, Any], "Arguments of the class: {width: 32}."),
    "data_args": (dict[str, Any], "Arguments of the data module."),
    "trust_checkpoint": (bool, "Load pickled objects, which can run code, from checkpoints that you made or trust."),
    "split": (Literal["val", "test"], "Which loader of the data module."),
    "json": (str | None, "File to write all results to."),
    "html": (str | None, "File to write a page with figures to."),
}
# Options of Fabric: their types and help
_DEVICE_OPTIONS = {
    "devices": (int | str | None, "Number of devices, a list such as 0,1 or auto, with one process each"),
    "num_nodes": (int | None, "Number of machines"),
    "accelerator": (str | None, "Kind of device, such as cpu or cuda"),
    "strategy": (str | None, "How to start processes, such as ddp"),
    "precision": (int | str | None, "Precision of the model, such as bf16-mixed"),
}
# Arguments of the functions that the command line takes in another form, such as a path: types, or of each in a list
OPTIONS: dict[str, tuple[Any, str]] = {
    "attacks": (list[str], "Attacks by name (--list_attacks); none if empty."),
    "eps": (_BUDGET | None, "Budget of the attacks, such as 0.1 or 8/255; null for the default of each."),
    "budgets": (list[_BUDGET], "Budgets, increasing, such as 2/255 4/255 8/255."),
    "sweep_budgets": (list[_BUDGET], "Budgets of a sweep, increasing."),
    "sweep_attacks": (list[str], "Attacks of the sweep."),
    "rank_budget": (_BUDGET | None, "Budget by which models are sorted, one of --budgets; by default the middle one."),
    "head": (str | None, "Name of the classifier head, if not found."),
    "device": (str | None, "Where to run, such as cuda."),
    "roby_p": (float, "Order of the distance in ROBY, at least 1; .inf is allowed."),
    "forward_fn": (str | None, "Function that takes the model and inputs and returns logits: package.module:function."),
    "embed_fn": (str | None, "Function that takes the model and what the loader yields and returns embeddings."),
    "batch_fn": (str | None, "Function that takes a batch and returns inputs and labels: package.module:function."),
}
# Arguments that the command gets by loading, or that are made of several options
_LOADED = {"model", "models", "dataloader", "input_space"}


def make_parser(arguments: Sequence[str]) -> Any:
    """Make the parser, with options only for the command in the arguments: reading signatures imports torch."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="lightning-robustness",
        description="Measure how robust trained classifiers are against adversarial examples.",
        epilog="Exit codes: 0 done, 1 a model could not be evaluated, 2 wrong arguments or data, 130 interrupted.",
        version=__version__,
        exit_on_error=False,
    )
    parser.add_argument("--traceback", action="store_true", help="Show the traceback of an error.")
    parser.add_argument("--list_attacks", action=_ListAttacks, help="List attacks and settings.")
    commands = parser.add_subcommands(dest="command")
    for name, (usage, summary) in _COMMANDS.items():
        usage = f"lightning-robustness {name} {usage}"
        one = ArgumentParser(usage=usage, description=f"{summary.capitalize()}.", exit_on_error=False)
        if name in arguments:
            _add_options(one, name)
        commands.add_subcommand(name, one, help=summary)
    return parser


class _ListAttacks(argparse.Action):
    """Print the attacks and exit, as ``--version`` does."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None, **_: Any) -> None:  # noqa: A002
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: Any, *_: Any) -> None:
        from lightning_robustness._measurement.threat_model import list_settings

        lines = [f"{name:11}{strength:8}{settings}" for name, strength, settings in list_settings()]
        lines.append("torchattacks:NAME is a class of torchattacks, if that is installed.")
        sys.stdout.write("\n".join(lines) + "\n")
        parser.exit()


def _add_options(parser: Any, command: str) -> None:
    def add(name: str, **options: Any) -> None:
        kind, help_text = _OWN[name]
        parser.add_argument(f"--{name}", type=kind, help=help_text, **options)

    if command == "report":
        parser.add_argument("report", type=str, help="File that `--json` wrote.")
    else:
        from jsonargparse import ActionConfigFile

        from lightning_robustness import evaluation

        function = getattr(evaluation, command)
        parser.description = inspect.getdoc(function).partition("\n")[0]  # type: ignore[union-attr]
        if command == "compare":
            add("models", required=True, nargs="+")
        else:
            add("model", required=True)
            add("checkpoint", default=None)
        add("data", required=command != "compare")
        add("split", default="test")
        add("model_args", default={})
        add("data_args", default={})
        add("trust_checkpoint", nargs="?", const=True, default=False)
        config_help = "YAML file with these options, or one of LightningCLI."
        parser.add_argument("--config", action=ActionConfigFile, help=config_help)
        _add_settings(parser, function, *([evaluation.evaluate] if command == "compare" else []))
    add("json", default=None)
    add("html", default=None)


def _add_settings(parser: Any, function: Callable[..., Any], *passed_on: Callable[..., Any]) -> None:
    """Add the arguments of a function, with the help of others that it passes them on to."""
    from lightning_robustness.input_space import InputSpace

    for name, (kind, help_text) in _DEVICE_OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind, default=None, help=f"{help_text}, as in Lightning's Fabric.")
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        kind, help_text = OPTIONS.get(name, (None, ""))
        if get_origin(kind) is list:
            (kind,), default = get_args(kind), list(parameter.default)
            parser.add_argument(f"--{name}", nargs="*", type=kind, default=default, help=help_text)
        elif kind is not None:
            parser.add_argument(f"--{name}", type=kind, default=parameter.default, help=help_text)
    parser.add_class_arguments(InputSpace, "input_space")
    added = _LOADED | OPTIONS.keys()
    for source in (*passed_on, function):
        names = inspect.signature(source).parameters.keys()
        parser.add_function_arguments(source, skip=added | (names - parameters.keys()))
        added |= names
