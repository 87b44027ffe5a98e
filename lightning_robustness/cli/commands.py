import inspect
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from fractions import Fraction
from pathlib import Path
from typing import Any

from torch import nn

from lightning_robustness._display.drawing import new_figure
from lightning_robustness._display.provenance import describe_checkpoint
from lightning_robustness._lightning.devices import launched, make_fabric
from lightning_robustness.cli.class_path import Target, load_object
from lightning_robustness.cli.loading import load_data, load_model
from lightning_robustness.evaluation import ComparisonReport, RobustnessReport, SweepReport, compare, evaluate, sweep
from lightning_robustness.evaluation.reports.report import Report, read_json


def run(command: str, options: Any, context: AbstractContextManager[None]) -> int:
    """Run a command, measuring in a context, and return its exit code."""
    _check_output(options)
    return _report(options) if command == "report" else _measure(command, options, context)


def _measure(command: str, options: Any, context: AbstractContextManager[None]) -> int:
    """Measure one model, or compare several."""
    functions: dict[str, Callable[..., Any]] = {"evaluate": evaluate, "sweep": sweep, "compare": compare}
    function = functions[command]
    settings = _settings(function, options)
    fabric = make_fabric(options)
    models: dict[str, nn.Module | RobustnessReport]
    if command == "compare":
        sources = _split_entries(options.models)
        models = {name: _load_entry(name, source, options) for name, source in sources.items()}
    else:
        models = {"": _load_model(options.model, options.checkpoint, options)}
    loader = None if options.data is None else load_data(options.data, options.split, options.data_args)
    # Lightning, which a model may import, changes how warnings are written: the context comes last
    with launched(fabric, options, models.values()) as is_first, context:
        measured = models if command == "compare" else models[""]
        report = function(measured, loader, device=options.device, **settings)
    report.provenance |= _origin(options)
    if not isinstance(report, ComparisonReport):
        report.provenance |= describe_checkpoint(options.checkpoint)
        return _finish(report, options, is_first, is_interrupted=bool(report.interrupted))
    for name, own in report.reports.items():
        if isinstance(models[name], nn.Module):
            own.provenance |= describe_checkpoint(sources[name].partition("@")[2])
    return _finish(report, options, is_first, is_interrupted=bool(report.missing), is_failed=bool(report.failed))


def _report(options: Any) -> int:
    kinds: dict[str, type[Report]] = {k.__name__: k for k in (RobustnessReport, ComparisonReport, SweepReport)}
    kind = read_json(options.report).get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"Expected one of {', '.join(kinds)} in {options.report} but got {kind!r}.")
    return _finish(kinds[kind].from_json(options.report), options)


def _split_entries(entries: Iterable[str]) -> dict[str, str]:
    """Return where each of several models is loaded from, by name."""
    sources: dict[str, str] = {}
    for entry in entries:
        name, _, source = entry.partition("=")
        if not name or not source:
            raise ValueError(f"Expected name=package.module:Class@checkpoint or name=report.json but got {entry!r}.")
        if name in sources:
            raise ValueError(f"Expected models with different names but got {name!r} twice.")
        sources[name] = source
    return sources


def _load_entry(name: str, source: str, options: Any) -> nn.Module | RobustnessReport:
    """Load one of several models, or its report."""
    if source.endswith(".json"):
        return RobustnessReport.from_json(source)
    if options.data is None:
        raise ValueError(f"Expected `--data` to evaluate the model {name!r} on but got none.")
    path, _, checkpoint = source.partition("@")
    return _load_model(path, checkpoint or None, options)


def _load_model(target: Target, checkpoint: str | None, options: Any) -> nn.Module:
    return load_model(target, checkpoint, options.model_args, options.trust_checkpoint)


def _origin(options: Any) -> dict[str, str]:
    """Describe data and command line, for the provenance of a report."""
    data = options.data if isinstance(options.data, str | None) else options.data.get("class_path")
    origin = {} if data is None else {"data module": f"{data}, {options.split}"}
    return origin | {"command": options.command_line}


def _settings(function: Callable[..., Any], options: Any) -> dict[str, Any]:
    """Return the arguments of a function that need no loading, but for the device, which Fabric may choose."""
    names = inspect.signature(function).parameters.keys() - {"model", "models", "dataloader", "device"}
    return {name: None if options[name] is None else _read_option(name, options[name]) for name in names}


def _read_option(name: str, value: Any) -> Any:
    if name.endswith("_fn"):
        return load_object(value)
    if name.endswith("budgets"):
        return [_budget(budget) for budget in value]
    return _budget(value) if name in ("eps", "rank_budget") else value


def _budget(text: str | float) -> float:
    try:
        parts = [Fraction(part) for part in str(text).split("/")]  # which may be decimals
        numerator, denominator = parts if len(parts) == 2 else (*parts, Fraction(1))
        return float(numerator / denominator)
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"Expected a budget such as 0.1 or 8/255 but got {text!r}.") from error


def _check_output(options: Any) -> None:
    for path in (options.json, options.html):
        if path is not None and (Path(path).is_dir() or not Path(path).parent.is_dir()):
            raise ValueError(f"Expected a file in a directory that exists but got {path}.")
    if options.html is not None:
        new_figure(1, 1)  # fails without matplotlib


def _finish(
    report: Report, options: Any, is_first: bool = True, is_interrupted: bool = False, is_failed: bool = False
) -> int:
    """Write a report and return the exit code; processes other than the first have nothing to say."""
    if not is_first:
        return 0
    sys.stdout.write(f"{report}\n")
    if options.json is not None:
        report.to_json(options.json)
    if options.html is not None:
        report.to_html(options.html)
    return 130 if is_interrupted else int(is_failed)
