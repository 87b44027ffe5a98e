import importlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Union, get_args, get_origin, get_type_hints

from typing_extensions import Self

from lightning_robustness._display.page import Page
from lightning_robustness._display.pictures import AdversarialExample
from lightning_robustness._display.table import Table, glossary
from lightning_robustness._measurement.statistics import accuracy_interval
from lightning_robustness._numbers import write_interval
from lightning_robustness._processes import write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def to_plain(value: Any) -> Any:
    """Turn reports and other objects with fields into dictionaries, lists, strings and numbers, however deep."""
    if isinstance(value, Report) or _has_fields(type(value)):
        kind = {"kind": type(value).__name__} if isinstance(value, Report) else {}
        return kind | {name: to_plain(getattr(value, name)) for name in _hints(type(value))}
    if isinstance(value, Mapping):
        return {name: to_plain(entry) for name, entry in value.items()}
    return [to_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def from_plain(hint: Any, value: Any, place: str = "") -> Any:
    """Make what an annotation says from the result of ``to_plain``; None is NaN where a number is expected."""
    if get_origin(hint) in (Union, UnionType):  # of something and None
        (hint,) = (option for option in get_args(hint) if option is not NoneType)
        return None if value is None else from_plain(hint, value, place)
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if hint is Any or (kind is float and value is None):
        return math.nan if kind is float else value
    expected: Any = Mapping if _has_fields(kind) else (int, float) if kind is float else kind
    if not isinstance(value, expected) or (isinstance(value, bool) and kind is not bool):
        name = kind.__name__ if hint is kind else hint
        raise ValueError(f"Expected `{place}` to be {name} but got {_shorten(value)}.")
    if kind is list:
        return [from_plain(arguments[0], entry, f"{place}[{number}]") for number, entry in enumerate(value)]
    if kind is dict:
        return {name: from_plain(arguments[1], entry, f"{place}[{name!r}]") for name, entry in value.items()}
    return _from_fields(kind, value, place) if _has_fields(kind) else value


def _from_fields(kind: type, value: Mapping[str, Any], place: str) -> Any:
    hints, start = _hints(kind), f"{place}." if place else ""
    derived = {"kind", *kind._derived} if issubclass(kind, Report) else set()
    for what, names in {
        "is missing": hints.keys() - value.keys(),
        "is unknown": value.keys() - hints - derived,
    }.items():
        if names:
            raise ValueError(f"`{start}{min(names)}` {what}.")
    return kind(**{name: from_plain(hint, value[name], f"{start}{name}") for name, hint in hints.items()})


def _has_fields(kind: Any) -> bool:
    return is_dataclass(kind) or hasattr(kind, "_fields")


def _hints(kind: Any) -> dict[str, Any]:
    """Return the annotations of the fields of a data class or a named tuple, in their order."""
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else kind._fields
    hints = get_type_hints(kind)
    return {name: hints[name] for name in names}


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


class Share(NamedTuple):
    """A share of samples with its 95 % interval, and the number of samples it is estimated from."""

    value: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, value: float, samples: float) -> Self:
        """Compute the interval of a share of this many samples."""
        return cls(value, *accuracy_interval(value, samples), int(samples))

    @classmethod
    def of_rates(cls, rates: Mapping[str, float]) -> Self:
        """Return the accuracy under an attack."""
        return cls(rates["adv_acc"], rates["adv_acc_low"], rates["adv_acc_high"], int(rates["count"]))

    def __str__(self) -> str:
        return f"({write_interval(self.low, self.high)}, n = {self.samples})"


class Report:
    """Base of the reports: data classes that have a verdict, tables, figures and notes.

    Their annotations say how they are written and read; ``_derived`` are values that are written only.
    """

    title: str
    provenance: dict[str, str]
    adversarial_examples: Sequence[AdversarialExample] = ()
    _derived: ClassVar[tuple[str, ...]] = ()

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

    def _terms(self) -> list[str]:
        """Return the names of the values that the glossary of the page explains."""
        return []

    @property
    def notes(self) -> list[str]:
        """Caveats for the reader of the numbers."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return everything as dictionaries, lists, strings and numbers."""
        return to_plain(self)

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
        return cls._read("", fields, "Pass what `to_dict` returned.")

    @classmethod
    def _read(cls, place: str, fields: Mapping[str, Any], remedy: str) -> Self:
        try:
            report = from_plain(cls, fields)
            str(report)  # finds entries that are missing in dictionaries
        except Exception as error:  # a file may hold anything
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}."
            raise ValueError(
                f"Expected all fields of a {cls.__name__}{place} but some are missing or invalid. {reason} {remedy}"
            ) from error
        return report

    def _records(self) -> list[dict[str, Any]]:
        """Return the rows of the data frame."""
        raise NotImplementedError

    def __str__(self) -> str:
        facts = "\n".join(f"{name}: {text}" for name, text in self.facts.items())
        parts = [self.verdict, facts, self.title, *(table.to_text() for table in self.tables())]
        return "\n\n".join(part for part in [*parts, *(f"Note: {note}" for note in self.notes)] if part)

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the report as JSON, NaN and infinity as null, and write it to a file if a path is given."""
        text = json.dumps(_without_nan(self.to_dict()), indent=2)
        if path is not None:
            write_file(path, f"{text}\n".encode())
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
        return cls._read(f" in {path}", fields, "Read a file that `to_json` or `--json` wrote.")

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
            examples=self.adversarial_examples,
            glossary=glossary(self._terms()),
            provenance=self.provenance,
        ).to_html()
        if path is not None:
            write_file(path, page.encode())
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
        return pandas.DataFrame(self._records())


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


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nan(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
