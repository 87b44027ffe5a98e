import importlib
import json
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from typing_extensions import Self

from lightning_robustness._display.page import Page, Picture
from lightning_robustness._display.table import Table, glossary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


T = TypeVar("T")


def check_fields(report: T) -> T:
    """Check the fields of a report against their annotations and return it.

    Example:
        >>> from dataclasses import dataclass
        >>> from lightning_robustness.evaluation.reports.report import check_fields
        >>> @dataclass
        ... class Curve:
        ...     values: list[float]
        >>> check_fields(Curve([0.5, "high"]))
        Traceback (most recent call last):
        ...
        ValueError: Expected `values[1]` of a Curve to be float but got 'high'.

    """
    for place, value, hint in _entries(report, type(report), ""):
        problem = _find_problem(place, value, hint)
        if problem is not None:
            raise ValueError(f"Expected {problem[0]} of a {type(report).__name__} to be {problem[1]}.")
    return report


def _find_problem(place: str, value: Any, hint: Any) -> tuple[str, str] | None:
    """Return the place of the first entry that does not fit its annotation, and what is wrong with it."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    fitting = [option for option in options if _fits(value, option)]
    if not fitting:
        expected = hint.__name__ if isinstance(hint, type) and get_origin(hint) is None else str(hint)
        return f"`{place}`", f"{expected} but got {_shorten(value)}"
    problems = (_find_problem(*entry) for entry in _entries(value, fitting[0], place))
    return next((problem for problem in problems if problem is not None), None)


def _fits(value: Any, hint: Any) -> bool:
    kind = get_origin(hint) or hint
    if hint is Any or not isinstance(kind, type):
        return True
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if kind is float else kind)


def _entries(value: Any, hint: Any, place: str) -> list[tuple[str, Any, Any]]:
    """Return places, values and annotations of the entries of an object."""
    arguments = get_args(hint)
    if is_dataclass(hint) or hasattr(hint, "_fields"):
        hints = get_type_hints(hint)
        names = [field.name for field in fields(hint)] if is_dataclass(hint) else hint._fields
        return [(f"{place}.{name}".lstrip("."), getattr(value, name), hints[name]) for name in names]
    if get_origin(hint) is dict:
        return [(f"{place}[{key!r}]", entry, arguments[1]) for key, entry in value.items()]
    if get_origin(hint) is list:
        return [(f"{place}[{index}]", entry, arguments[0]) for index, entry in enumerate(value)]
    return []


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


class Report:
    """Base of the reports; a subclass provides the verdict, tables, figures, notes and fields."""

    title: str
    provenance: dict[str, str]

    @property
    def verdict(self) -> str:
        """The result in one sentence, with its confidence interval."""
        raise NotImplementedError

    @property
    def facts(self) -> dict[str, str]:
        """The threat model in a few lines, by name."""
        raise NotImplementedError

    def tables(self) -> list[Table]:
        """Return the tables of the text and the page, the summary first."""
        raise NotImplementedError

    def figures(self) -> dict[str, "Figure"]:
        """Draw the figures of the page, by caption, the most important first."""
        raise NotImplementedError

    def examples(self) -> list[Picture]:
        """Return pictures of adversarial examples."""
        return []

    def terms(self) -> list[str]:
        """Return the names of the values that the glossary of the page explains."""
        return []

    @property
    def notes(self) -> list[str]:
        """Caveats for the reader of the numbers."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return everything as dictionaries, lists, strings and numbers."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Make the report from the result of ``to_dict``.

        Raises:
            TypeError: If this is not a mapping.
            ValueError: If an entry is missing or of another type.

        """
        if not isinstance(fields, Mapping):
            raise TypeError(
                f"Expected argument `fields` to be a mapping, as `to_dict` returns it, but got {type(fields).__name__}."
            )
        return cls._check("", fields, "Pass what `to_dict` returned.")

    @classmethod
    def _from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Make the report from the result of ``to_dict``, or fail in any way."""
        raise NotImplementedError

    @classmethod
    def _check(cls, place: str, fields: Mapping[str, Any], remedy: str) -> Self:
        try:
            report = cls._from_fields(fields)
            str(report)  # finds entries that are missing
        except Exception as error:  # a file may hold anything
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}."
            raise ValueError(
                f"Expected all fields of a {cls.__name__}{place} but some are missing or invalid. {reason} {remedy}"
            ) from error
        return report

    def records(self) -> list[dict[str, Any]]:
        """Return the rows of the data frame."""
        raise NotImplementedError

    def __str__(self) -> str:
        facts = "\n".join(f"{name}: {text}" for name, text in self.facts.items())
        parts = [self.verdict, facts, self.title, *(table.to_text() for table in self.tables())]
        return "\n\n".join([*parts, *(f"Note: {note}" for note in self.notes)])

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the report as JSON, NaN and infinity as null, and write it to a file if a path is given."""
        text = json.dumps(_without_nan(self.to_dict()), indent=2)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, path: str | Path) -> Self:
        """Read a report that ``to_json`` wrote to a file.

        Raises:
            ValueError: If the file is not JSON or does not hold such a report.

        """
        fields = read_json(path)
        if fields.get("kind") != cls.__name__:
            raise ValueError(f"Expected a {cls.__name__} in {path} but got {fields.get('kind')}.")
        return cls._check(f" in {path}", fields, "Read a file that `to_json` or `--json` wrote.")

    def to_html(self, path: str | Path | None = None) -> str:
        """Return the report as a self-contained page, and write it to a file if a path is given.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed; the extra ``plot`` brings it.

        """
        page = Page(
            title=self.title,
            verdict=self.verdict,
            facts=self.facts,
            notes=self.notes,
            figures=self.figures(),
            tables=self.tables(),
            examples=self.examples(),
            glossary=glossary(self.terms()),
            provenance=self.provenance or {"origin": "unknown, from a report of an earlier version"},
        ).to_html()
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page

    def to_frame(self) -> Any:
        """Return the numbers as a pandas data frame.

        Raises:
            ModuleNotFoundError: If pandas is not installed.

        """
        try:
            pandas = importlib.import_module("pandas")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "Expected pandas to be installed for a data frame but it was not found. Install it with "
                "`pip install pandas`, or use `to_dict`."
            ) from error
        return pandas.DataFrame(self.records())


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a dictionary from a JSON file."""
    if not isinstance(path, (str, Path)):
        raise TypeError(f"Expected argument `path` to be the path of a JSON file but got {path!r}.")
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # no file, no UTF-8, no JSON, deep nesting
        raise ValueError(f"Expected a report as JSON in {path} but it cannot be read: {error}.") from error
    if not isinstance(fields, dict):
        raise ValueError(f"Expected a report as a JSON object in {path} but got {type(fields).__name__}.")
    return fields


def to_floats(values: Any) -> Any:
    """Replace None, which stands for NaN in JSON, in nested lists and dictionaries of numbers."""
    if isinstance(values, Mapping):
        return {name: to_floats(value) for name, value in values.items()}
    if isinstance(values, Sequence) and not isinstance(values, str):
        return [to_floats(value) for value in values]
    return math.nan if values is None else values


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nan(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
