"""Type checks of reports that were read from a file, which anyone may have written."""

import types
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def check_fields(report: T) -> T:
    """Check the fields of a report against their annotations and return it.

    Raises:
        ValueError: If a field has another type.

    Example:
        >>> from dataclasses import dataclass
        >>> from lightning_robustness.evaluation.report_fields import check_fields
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
