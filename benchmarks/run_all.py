"""Measure every figure of the README's table of costs, and print that table and what docs/monitor.md says of it.

Runs the scripts that the table names, one after the other, and keeps their figures in ``results/costs.json``, each
script's as soon as it ends. A script that fails keeps its old figures, and the others go on. Takes about 25 minutes on
two idle cores: ``python benchmarks/run_all.py --data DIRECTORY --readme``, where the directory holds the four files of
Fashion-MNIST (without ``--data``, torchvision downloads them, where it is installed). ``--only fisher sweep`` runs some
of the scripts, ``--resume`` those without figures of today, ``--table`` none.
"""

import argparse
import datetime
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parent
RESULTS = DIRECTORY / "results" / "costs.json"
README = DIRECTORY.parent / "README.md"
MONITOR = DIRECTORY.parent / "docs" / "monitor.md"
SCRIPT_URL = "https://github.com/lightning-robustness/lightning-robustness/blob/main/benchmarks/{}.py"
START, END = "<!-- costs, by benchmarks/run_all.py -->\n", "<!-- end of costs -->"

# the parts of each script that the table needs, with as many repetitions as fit into half an hour
SCRIPTS = {
    "monitor_overhead": ["--repetitions", "2"],
    "feature_metrics": ["--parts", "1", "2", "--classes", "1000"],
    "adversarial_training": ["--parts", "pgd", "--repetitions", "4"],
    "sweep": ["--samples", "300", "--repetitions", "1"],
    "fisher": ["--parts", "3", "--repetitions", "1"],
    "attacks": ["--repetitions", "2"],
}

ROWS = (
    (
        "validation epoch with RDI and ROBY",
        "{validation:.2f} times as long; the hooks alone {hooks:.2f}",
        "the epoch without them, ResNet-18 at 32x32",
        "monitor_overhead",
    ),
    (
        "computing RDI",
        "1/{pgd_per_rdi:,.0f} of the time",
        "10-step PGD on the same samples, ResNet-18",
        "monitor_overhead",
    ),
    (
        "five epochs with everything on: PGD five times, C&W and Square twice",
        "{fit:.2f} times as long: C&W {fit_cw:.0%}, Square {fit_square:.0%}, PGD {fit_pgd:.0%}, figures "
        "{fit_figures:.0%}, Fisher information {fit_fim:.0%}, RDI and ROBY {fit_features:.0%}",
        "the run without the monitor, small network, Fashion-MNIST",
        "monitor_overhead",
    ),
    (
        "update of RDI and ROBY, batch of 128",
        "{update_exact:.2%} of the time",
        "forward pass of a ResNet-18 at 32x32",
        "feature_metrics",
    ),
    (
        "ROBY of 10,000 samples, 1,000 classes",
        "{roby_1000:.0f} times faster",
        "the paper's loops",
        "feature_metrics",
    ),
    (
        "Fisher spectral norm: 10, 100 and 1,000 classes",
        "{fisher_10:.0%}, {fisher_100:.0%} and {fisher_1000:.0%} of the time",
        "20-step PGD on the same samples, ResNet-18",
        "fisher",
    ),
    (
        "adversarial training with 7-step PGD",
        "{PGD_callback:.2f} times as long; {PGD_active:.2f} with `all_steps=False`",
        "hand-written loop (torchattacks in `training_step`: {PGD_torchattacks:.2f}), small network",
        "adversarial_training",
    ),
    (
        "sweep over 20 budgets",
        "{sweep_lowest:.1f} to {sweep_highest:.1f} of the time; accuracy at most {sweep_excess:.1f} points higher",
        "independent attacks that measure the same",
        "sweep",
    ),
    *(
        (
            f"PGD, 40 steps of 0.01, eps {eps / 100}: natural, robust network",
            f"{{pgd_natural_{eps}:.1f}}, {{pgd_robust_{eps}:.1f}} times faster",
            "torchattacks; the script prints the success rates of both",
            "attacks",
        )
        for eps in (30, 10)
    ),
    *(
        (
            f"Square, {queries} queries, eps {eps / 100}: natural, robust network",
            f"{{square_natural_{eps}:.1f}}, {{square_robust_{eps}:.1f}} times faster",
            "torchattacks; the script prints the success rates of both",
            "attacks",
        )
        for eps, queries in ((30, "5,000"), (10, "200"))
    ),
    (
        "C&W from a DDN start at foolbox's success rate: natural, robust network",
        "{cw_natural:.1f}, {cw_robust:.1f} times faster",
        "foolbox, 5 binary search steps",
        "attacks",
    ),
)


def values_of(results: dict[str, Any]) -> dict[str, float]:
    """All figures by name."""
    return {name: value for script in results.values() for name, value in script["values"].items()}


def sentence(results: dict[str, Any]) -> str:
    """What docs/monitor.md says of whole runs."""
    fits = {name: values_of(results).get(name, math.nan) for name in ("fit", "resnet18_fit")}
    return (
        f"Five epochs at the defaults, with C&W and Square in two of them, take {fits['fit']:.2f} times as long on a\n"
        f"small network with all of Fashion-MNIST, and {fits['resnet18_fit']:.2f} times as long on a ResNet-18 with\n"
        "about a hundredth of the images and of the samples.\n"
    )


def put(text: str, path: Path) -> None:
    """Replace what stands between the marks on a page."""
    path.write_text(re.sub(f"(?s){START}.*{END}", lambda match: f"{START}{text}{END}", path.read_text()))


def markdown(results: dict[str, Any]) -> str:
    """The README's table of what was measured, and a sentence that says when and with what."""
    values = values_of(results)
    lines = ["| | here | compared with | script |", "|---|---|---|---|"]
    for what, here, against, script in ROWS:
        try:
            here, against = here.format(**values), against.format(**values)
        except KeyError:  # not measured yet
            continue
        lines.append(f"| {what} | {here} | {against} | [{script}.py]({SCRIPT_URL.format(script)}) |")
    return "\n".join(lines) + f"\n\nMeasured on two CPU cores {when(results)}. Only ratios are claimed.\n"


def when(results: dict[str, Any]) -> str:
    """Dates and versions, as words of a sentence."""
    dated = [script for script in results.values() if script["date"]]
    undated = [f"{name}.py" for name, script in results.items() if not script["date"]]
    if not dated:
        return "during development"
    dates, torch = sorted({script["date"] for script in dated}), sorted({script["torch"] for script in dated})
    first = f"on {dates[0]}" if len(dates) == 1 else f"from {dates[0]} to {dates[-1]}"
    earlier = f"; with earlier versions: {', '.join(undated)}" if undated else ""
    return f"{first} with torch {' and '.join(torch)}{earlier}"


def measure(script: str, data: str | None) -> dict[str, float] | None:
    """Run a script with its output on the terminal; return what it recorded, None if it failed."""
    with tempfile.TemporaryDirectory() as directory:
        record = Path(directory) / "record"
        record.touch()
        command = [sys.executable, str(DIRECTORY / f"{script}.py"), *SCRIPTS[script]]
        command += ["--data", data] if data is not None else []
        result = subprocess.run(command, env={**os.environ, "BENCHMARK_RECORD": str(record)})
        if result.returncode:
            return None
        return {name: value for line in record.read_text().splitlines() for name, value in json.loads(line).items()}


def main() -> int:
    """Run what the command line asks for; return the number of scripts that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="directory with Fashion-MNIST's idx files")
    parser.add_argument(
        "--only", nargs="+", choices=SCRIPTS, default=list(SCRIPTS), metavar="NAME", help="which scripts"
    )
    parser.add_argument("--resume", action="store_true", help="skip scripts that have figures of today")
    parser.add_argument("--table", action="store_true", help="measure nothing, print the table of what is known")
    parser.add_argument("--readme", action="store_true", help="put both into README.md and docs/monitor.md")
    arguments = parser.parse_args()

    results = json.loads(RESULTS.read_text())
    today = datetime.date.today().isoformat()
    scripts = [] if arguments.table else arguments.only
    if arguments.resume:
        scripts = [script for script in scripts if results.get(script, {}).get("date") != today]
    failed = []
    for number, script in enumerate(scripts, start=1):
        print(f"\n=== {number} of {len(scripts)}: {script}.py", flush=True)
        start = time.perf_counter()
        values = measure(script, arguments.data)
        print(f"=== {script}.py took {time.perf_counter() - start:.0f} s", flush=True)
        if values is None:
            failed.append(script)
            continue
        results[script] = {"date": today, "torch": version("torch"), "values": values}
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")

    table = markdown(results)
    print(f"\n{table}\n{sentence(results)}")
    if arguments.readme:
        put(table, README)
        put(sentence(results), MONITOR)
    if failed:
        print(f"Failed, with the old figures in the table: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
