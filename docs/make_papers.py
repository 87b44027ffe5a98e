"""Write docs/papers.md from docs/papers.txt and benchmarks/results/papers.json, and the table in docs/attacks.md.

``python docs/make_papers.py``
"""

import json
import re
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from lightning_robustness._measurement.threat_model import list_settings

ROOT = Path(__file__).parent.parent
PAGE, TABLE = ROOT / "docs" / "papers.md", ROOT / "docs" / "papers.txt"
ATTACKS, SETTINGS = ROOT / "docs" / "attacks.md", re.compile("(?<=<!-- settings -->\n).*?(?=<!-- end -->)", re.DOTALL)
RESULTS = ROOT / "benchmarks" / "results" / "papers.json"
EXPERIMENTS = {
    "fisher-13": "Fisher, Table 13: the variance of gradients of log p of sampled labels tends to G",
    "fisher-9-10": "Fisher, Theorem 1 and Tables 9 and 10: error of the approximation by d^T G d / 2, digits, FGSM's d",
    "fisher-17": "Fisher, Table 17: seconds of the solvers for one input of 10,000 dimensions",
    "fisher-18-20": "Fisher, Tables 18 and 20: error of Algorithm 2 by number and distribution of vectors, 10 classes",
    "fisher-19": "Fisher, Table 19: error of 200 vectors on the K x K and the d x d side, 1,000 dimensions",
    "fisher-21-22": "Fisher, Tables 21 and 22: spread over five samples of 250 digits",
    "fisher-step": "Fisher, after Theorem 1: accuracy on digits after one step along the principal eigenvector",
    "fisher-7": "Fisher, Table 7: time on digits, one core",
    "roby-X": "ROBY, Table X: seconds of ROBY, forward pass included, and of PGD with 40 steps",
}
HEADER = """# The papers, item by item

Look up any numbered equation, theorem, algorithm, table or figure of the four papers behind this package: what gives it
here, and whether it is the same. *Equal* means that a test compares it with independent code, *differs* that we compute
something else and why, *measured* that a benchmark repeats the experiment, with its own outcome on the page that is
linked, *not reproduced* and *open* that nothing does. *Derivation* is a step of a proof. This page is written by
[make_papers.py](../docs/make_papers.py) from [papers.txt](papers.txt); tests check that all names exist.

The text of the Fisher paper that we have lost its formulas. Those that are used were restored from the proofs around
them, so *equal* there means equal to what we restored.
"""


class Entry(NamedTuple):
    """One item of a paper: where it is here, the verdict, and a note."""

    item: str
    where: list[str]
    verdict: str
    note: str


def read() -> dict[str, list[Entry]]:
    """Return the entries of each paper by title."""
    papers: dict[str, list[Entry]] = {}
    for line in filter(None, TABLE.read_text().splitlines()):
        if line.startswith("# "):
            entries = papers.setdefault(line[2:], [])
        else:
            item, where, verdict, note = (part.strip() for part in line.split("|"))
            entries.append(Entry(item, where.split(), verdict, note))
    return papers


def link(where: str) -> str:
    """Link a file, or write what can be imported from the package as code."""
    if "/" not in where:
        return f"`{where}`"
    path, _, anchor = where.partition("#")
    target = path.removeprefix("docs/") if path.startswith("docs/") else f"../{path}"
    return f"[{Path(path).name}]({target}{'#' + anchor if anchor else ''})"


def number(value: str | float) -> str:
    """Write a count as it is, and any other number with three digits."""
    return str(value) if isinstance(value, str | int) else f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Write a table in Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows])


def render() -> str:
    """Return the page."""
    parts = [HEADER]
    for title, entries in read().items():
        rows = [[e.item, ", ".join(map(link, e.where)), e.verdict, e.note] for e in entries]
        parts.append(f"## {title}\n\n{table(['item', 'here', 'verdict', 'note'], rows)}\n")
    parts.append("## Small experiments\n\nBy [papers.py](../benchmarks/papers.py), in a minute on one core.\n")
    results = json.loads(RESULTS.read_text())
    for name, title in EXPERIMENTS.items():
        columns = results[name]
        cells = [[number(value) for value in row] for row in zip(*columns.values(), strict=True)]
        parts.append(f"{title}:\n\n{table(list(columns), cells)}\n")
    return "\n".join(parts)


def render_attacks() -> str:
    """Return the page of the attacks with the settings of today."""
    rows = []
    for name, settings in groupby(list_settings(), key=lambda row: row[0]):
        texts = [text for _, _, text in settings]
        rows.append([f"`{name}`", *(texts if len(texts) > 1 else [*texts, "the same", "the same"])])
    header = ["name", '`strength="fast"`, the monitor\'s', '`"strong"`, of `evaluate` and `compare`']
    made = table([*header, '`"paper"`, of `sweep` and `get_attack`'], rows)
    return SETTINGS.sub(lambda _: f"\n{made}\n\n", ATTACKS.read_text())


if __name__ == "__main__":
    PAGE.write_text(render())
    ATTACKS.write_text(render_attacks())
