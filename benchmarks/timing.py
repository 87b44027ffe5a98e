import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path


def seconds(
    functions: dict[str, Callable[[], object]], repetitions: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds of each function, which take turns so that a slow moment of the machine hits all."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repetitions):
        for name, function in functions.items():
            start = clock()
            function()
            times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def record(**values: float) -> None:
    """Hand figures to ``run_all.py``: a line of JSON in the file that it names; nothing when a script runs alone."""
    if path := os.environ.get("BENCHMARK_RECORD"):
        with Path(path).open("a") as file:
            file.write(json.dumps(values) + "\n")
