"""Code blocks and links of the README and the docs."""

import configparser
import json
import re
from pathlib import Path

import pytest

from lightning_robustness._measurement.keys import GROUPS, name_of

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
OTHER_PAGES = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]


def repository():
    """Address of the repository, which setup.cfg alone decides."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config["metadata"]["url"]


def links(page):
    """Targets of all links and pictures of a page, without those in code."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def anchors(page):
    """Anchors of the headings of a page, as GitHub and mkdocs make them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ +(.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def assert_exists(path, anchor, page):
    assert path.exists(), f"{page.name} links to {path}, which does not exist"
    if anchor and path.suffix == ".md":
        assert anchor in anchors(path), f"{page.name} links to #{anchor} in {path.name}, which has {anchors(path)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=lambda page: page.name)
def test_links_resolve(page):
    """Relative ones, and those to the repository itself; the others would need a network."""
    files = (f"{repository()}/blob/main/", repository().replace("github.com", "raw.githubusercontent.com") + "/main/")
    for link in links(page):
        target, _, anchor = link.partition("#")
        if target.startswith(files):
            assert_exists(ROOT / target.removeprefix(files[0]).removeprefix(files[1]), anchor, page)
        elif not target.startswith(("https://", "mailto:")):
            assert_exists(page.parent / target if target else page, anchor, page)


def test_links_of_the_readme_are_absolute():
    """PyPI shows the README without the files beside it."""
    assert [link for link in links(ROOT / "README.md") if not link.startswith(("https://", "#"))] == []


@pytest.mark.parametrize("name", ["mkdocs.yml", "CITATION.cff", "benchmarks/run_all.py", "README.md"])
def test_the_address_of_the_repository_is_that_of_the_package(name):
    found = re.findall(r"https://github\.com/[\w-]*lightning-robustness/[\w-]+", (ROOT / name).read_text())
    assert set(found) == {repository()}


def test_the_readme_lists_every_example():
    scripts = {path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").rglob("*.py")}
    runnable = {path for path in scripts if 'if __name__ == "__main__":' in (ROOT / path).read_text()}
    listed = re.findall(r"/blob/main/(examples/[\w/]+\.py)\)", (ROOT / "README.md").read_text())
    assert set(listed) == runnable


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_every_key_is_one_that_is_logged(page):
    named = re.findall(r"(?<![\w/.-])(?:test_)?((?:robustness\w*|debug)/[\w<>/*]*)", page.read_text())
    others = {f"robustness{group}/" for group in GROUPS} | {"robustness/boundary_curve"}  # groups, and a picture
    assert [key for key in named if name_of("robustness", key) is None and key not in others] == []


def test_the_table_of_assisted_estimates_is_that_of_the_results():
    results = json.loads((ROOT / "benchmarks" / "results" / "assisted.json").read_text())["results"]
    rows = [
        f"| {row['network']} | {row['eps']:g} | {row['truth']:.3f} | {row['bias']:+.2f} | {row['coverage']:.3f} "
        f"| {row['plain_coverage']:.3f} | {row['variance_ratio']:.1f} |"
        for row in results
        if (row["total"], row["attacked"]) == (10_000, 256)
    ]
    page = (ROOT / "docs" / "robust_accuracy.md").read_text()
    assert "\n".join(rows) in page
    partial = [row for row in results if row["attacked"] < row["total"]]
    bias, coverage = max(abs(row["bias"]) for row in partial), [100 * row["coverage"] for row in partial]
    summary = f"Over all {len(partial)} settings .* {bias:.2f} points, .* {min(coverage):.1f} to {max(coverage):.0f} %"
    assert re.search(summary, page, flags=re.DOTALL)


def test_the_readme_says_what_was_replayed():
    """Of the runs whose logs were published: what the default checkpoint, the last epoch and a stop lose."""
    replay = json.loads((ROOT / "benchmarks" / "results" / "selection_replay.json").read_text())
    rules = {rule: [run[rule] for run in replay.values()] for rule in next(iter(replay.values()))}
    kept, last, stop = ("no guard, `tie_margin=0.005` (default)", "last epoch", "stop, `patience=20`")
    lost = {rule: sum(run["lost"] for run in rules[rule]) / len(replay) for rule in (kept, last, stop)}
    trained = sum(run["trained"] for run in rules[stop]) / len(replay)
    text = " ".join((ROOT / "README.md").read_text().split())
    said = re.search(
        r"\[(\d+) published .* is ([\d.]+) points .* last one ([\d.]+); .* ([\d.]+) points at (\d+) %", text
    )
    assert said.groups() == (str(len(replay)), *(f"{lost[rule]:.2f}" for rule in lost), f"{100 * trained:.0f}")
