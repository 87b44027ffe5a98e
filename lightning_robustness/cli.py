"""The command ``lightning-robustness``: evaluate a checkpoint, compare several, make a page of saved results."""

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from lightning_robustness.evaluation import ComparisonReport, RobustnessReport, SweepReport, compare, evaluate
from lightning_robustness.evaluation.checkpoint import Split, load_data, load_model
from lightning_robustness.evaluation.comparison_checks import check_prior
from lightning_robustness.evaluation.report import Report, read_json
from lightning_robustness.evaluation.sweep_plan import SWEEP_ATTACKS, SWEEP_EPS, plan_sweep
from lightning_robustness.measurement.attack_names import name_attacks
from lightning_robustness.utilities.drawing import new_figure
from lightning_robustness.utilities.input_space import InputSpace

# Makes a context in which errors are those of wrong arguments
_Checked = Callable[[], AbstractContextManager[None]]
# A number, or a fraction such as 8/255
_BUDGET = float | str
# Arguments of `evaluate` that are not taken from its signature as they are
_OWN = {"model", "dataloader", "attacks", "eps", "input_space", "head", "device", "sweep_eps", "sweep_attacks"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: What follows the name of the command; by default what the shell gave.

    Returns:
        Exit code: 0 if all went well, 1 if the evaluation failed, 130 if it was interrupted (what there is was then
        printed and written). Wrong arguments end in ``SystemExit`` with code 2.

    """
    try:
        parser = _parser()
    except ModuleNotFoundError as error:
        return _fail(
            f"Expected {error.name}, which reads the arguments, but it is not installed: "
            'pip install "lightning-robustness[cli]"'
        )
    sys.path.insert(0, str(Path.cwd()))  # modules are found as `python script.py` would find them
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # its name before 4.49
    options = parser.parse_args(arguments)
    checked = partial(_checked_arguments, parser, options.traceback)
    with checked():
        options = instantiate(options)
    commands = {"evaluate": _evaluate, "compare": _compare, "report": _report}
    try:
        return commands[options.command](checked, options[options.command])
    except KeyboardInterrupt:
        return _fail("interrupted before there was anything to report", code=130)
    except Exception as error:
        if options.traceback:
            traceback.print_exc()
        return _fail(f"{type(error).__name__}: {error}")


def _evaluate(checked: _Checked, options: Any) -> int:
    with checked():
        _check_output(options)
        options.eps, options.sweep_eps = _budget(options.eps), [_budget(eps) for eps in options.sweep_eps]
        name_attacks(options.attacks, options.eps)
        if options.sweep_eps:
            plan_sweep(options.sweep_attacks, options.sweep_eps)
        model = load_model(options.model, options.checkpoint, options.model_args)
        loader = load_data(options.data, options.split, options.data_args)
    own = {name: options[name] for name in ("attacks", "eps", "sweep_attacks", "sweep_eps")}
    report = evaluate(model, loader, **own, **_settings(options))
    _write(report, options)
    return 0 if report.interrupted is None else 130


def _compare(checked: _Checked, options: Any) -> int:
    with checked():
        _check_output(options)
        options.eps = [_budget(eps) for eps in options.eps]
        plan_sweep(options.attacks, options.eps)
        check_prior(options.prior, options.balance)
        models: dict[str, nn.Module | RobustnessReport] = {}
        for entry in options.models:
            name, model = _named_model(entry, options.model_args)
            if name in models:
                raise ValueError(f"Expected models of different names but got {name!r} twice.")
            models[name] = model
        loader = None if options.data is None else load_data(options.data, options.split, options.data_args)
    own = {name: options[name] for name in ("attacks", "eps", "prior", "balance")}
    report = compare(models, loader, **own, **_settings(options))
    _write(report, options)
    return 130 if report.missing else 0


def _report(checked: _Checked, options: Any) -> int:
    kinds: dict[str, type[Report]] = {k.__name__: k for k in (RobustnessReport, ComparisonReport, SweepReport)}
    with checked():
        _check_output(options)
        fields = read_json(options.report)
        if fields.get("kind") not in kinds:
            raise ValueError(f"Expected one of {', '.join(kinds)} in {options.report} but got {fields.get('kind')}.")
        report = kinds[fields["kind"]].from_json(options.report)
    _write(report, options)
    return 0


def _parser() -> Any:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="lightning-robustness",
        description="Measure how robust trained classifiers are against adversarial examples.",
        epilog="Exit codes: 0 done, 1 the evaluation failed, 2 wrong arguments, 130 interrupted.",
    )
    parser.add_argument("--traceback", action="store_true", help="Show where an error comes from.")
    commands = parser.add_subcommands(dest="command")

    one = ArgumentParser(
        usage="lightning-robustness evaluate --model MODULE:CLASS --checkpoint FILE --data MODULE:CLASS [options]",
        description="Measure one model: RDI, ROBY, Fisher information, and success rates of attacks.",
    )
    one.add_argument("--model", required=True, type=str, help="package.module:Class, or a function that returns one.")
    one.add_argument("--checkpoint", type=str, help="Weights: a checkpoint of Lightning, or a state dict.")
    _add_data(one, required=True)
    one.add_argument("--attacks", nargs="*", default=["pgd", "cw", "square"], help="Names of attacks; none if empty.")
    one.add_argument("--eps", type=_BUDGET, default="8/255", help="Budget of the attacks, such as 0.1 or 8/255.")
    one.add_argument("--sweep_eps", nargs="*", type=_BUDGET, default=[], help="Budgets of a sweep, increasing.")
    one.add_argument("--sweep_attacks", nargs="*", default=list(SWEEP_ATTACKS), help="Attacks of the sweep.")
    _add_settings(one)
    commands.add_subcommand("evaluate", one, help="measure one model")

    many = ArgumentParser(
        usage="lightning-robustness compare --models NAME=MODULE:CLASS@FILE ... --data MODULE:CLASS [options]",
        description="Compare models by CMMR, adversarial accuracy and attack-free metrics.",
    )
    many.add_argument(
        "--models",
        required=True,
        nargs="+",
        help="name=package.module:Class@checkpoint, or name=report.json for what `evaluate --sweep_eps` has written.",
    )
    _add_data(many, required=False)
    many.add_argument("--attacks", nargs="+", default=list(SWEEP_ATTACKS), help="Names of the attacks.")
    many.add_argument("--eps", nargs="+", type=_BUDGET, default=list(SWEEP_EPS), help="Budgets, increasing.")
    many.add_argument("--prior", type=dict[str, float], default={}, help="Prior weights of metrics: {accuracy: 2}.")
    many.add_argument("--balance", type=float, default=0.0, help="Share of the weight that is kept from all metrics.")
    _add_settings(many)
    commands.add_subcommand("compare", many, help="compare several models")

    saved = ArgumentParser(
        usage="lightning-robustness report FILE [--html FILE]",
        description="Show a report that was saved as JSON, and make a page of it.",
    )
    saved.add_argument("report", type=str, help="File that `--json` has written.")
    _add_output(saved)
    commands.add_subcommand("report", saved, help="show a saved report, or make a page of it")
    return parser


def _add_data(parser: Any, required: bool) -> None:
    parser.add_argument("--config", action="config", help="YAML file with any of these options.")
    parser.add_argument("--model_args", type=dict[str, Any], default={}, help="Arguments of the class: {width: 32}.")
    parser.add_argument(
        "--data",
        required=required,
        type=str,
        help="Data module, package.module:Class, or a function that returns a loader.",
    )
    parser.add_argument("--data_args", type=dict[str, Any], default={}, help="Arguments of the data module.")
    parser.add_argument("--split", type=Split, default="test", help="Which loader of the data module.")


def _add_settings(parser: Any) -> None:
    parser.add_argument("--head", type=str | None, default=None, help="Name of the classifier head, if not found.")
    parser.add_argument("--device", type=str | None, default=None, help="Where to run, such as cuda.")
    parser.add_class_arguments(InputSpace, "input_space")
    parser.add_function_arguments(evaluate, skip=_OWN)
    _add_output(parser)


def _add_output(parser: Any) -> None:
    parser.add_argument("--json", type=str | None, default=None, help="File to write all results to.")
    parser.add_argument("--html", type=str | None, default=None, help="File to write a page with figures to.")


def _settings(options: Any) -> dict[str, Any]:
    names = [name for name in inspect.signature(evaluate).parameters if name not in _OWN]
    return {name: options[name] for name in (*names, "input_space", "head", "device")}


def _budget(text: str | float) -> float:
    try:
        return float(Fraction(str(text)))
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"Expected a budget such as 0.1 or 8/255 but got {text!r}.") from error


def _named_model(entry: str, arguments: dict[str, Any]) -> tuple[str, nn.Module | RobustnessReport]:
    name, _, source = entry.partition("=")
    if not name or not source:
        raise ValueError(f"Expected name=package.module:Class@checkpoint or name=report.json but got {entry!r}.")
    if source.endswith(".json"):
        return name, RobustnessReport.from_json(source)
    path, _, checkpoint = source.partition("@")
    return name, load_model(path, checkpoint or None, arguments)


@contextmanager
def _checked_arguments(parser: Any, show_traceback: bool) -> Iterator[None]:
    """Let what is wrong with arguments end as other wrong arguments do."""
    try:
        yield
    except (ModuleNotFoundError, OSError, TypeError, ValueError) as error:
        if show_traceback:
            traceback.print_exc()
        parser.error(str(error))


def _check_output(options: Any) -> None:
    for path in (options.json, options.html):
        if path is not None and (Path(path).is_dir() or not Path(path).parent.is_dir()):
            raise ValueError(f"Expected a file in a directory that exists but got {path}.")
    if options.html is not None:
        new_figure(1, 1)  # fails without matplotlib


def _write(report: Report, options: Any) -> None:
    sys.stdout.write(f"{report}\n")
    if options.json is not None:
        report.to_json(options.json)
    if options.html is not None:
        report.to_html(options.html)


def _fail(message: str, code: int = 1) -> int:
    sys.stderr.write(f"lightning-robustness: {message}\n")
    return code
