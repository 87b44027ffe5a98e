from collections.abc import Iterable, Sequence


def markdown(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def number(value: float | None, digits: int = 3) -> str:
    """A number with this many decimals; large ones without, missing ones as a dash."""
    if value is None or value != value:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}f}"


def signed(value: float | None) -> str:
    """A coefficient with its sign."""
    return "-" if value is None or value != value else f"{value:+.2f}"
