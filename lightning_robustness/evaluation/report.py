"""The base of all reports: text, JSON, HTML and data frames."""

import importlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from lightning_robustness.measurement.glossary import glossary
from lightning_robustness.utilities.page import Page, Picture
from lightning_robustness.utilities.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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

    def figures(self, columns: int = 3) -> dict[str, "Figure"]:
        """Draw the figures of the page, by caption, the most important first.

        Args:
            columns: Largest number of panels side by side, in figures that have several.

        """
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
        figures, phone_figures = self.figures(), self.figures(columns=1)
        page = Page(
            title=self.title,
            verdict=self.verdict,
            facts=self.facts,
            notes=self.notes,
            figures=figures,
            phone_figures={
                caption: figure
                for caption, figure in phone_figures.items()
                if figure.get_figwidth() != figures[caption].get_figwidth()
            },
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
    """Read a dictionary from a JSON file.

    Raises:
        TypeError: If this is not a path.
        ValueError: If the file cannot be read or holds something else.

    """
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
