"""What robustness costs in training, and what attack-free values say within a run."""

import data  # noqa: F401  # puts the other benchmarks on the path
import numpy as np
import within_run as runs
from plan import BASE, TRAININGS
from results import Measured, Results
from table import markdown, number


def gain(results: Results, network: Measured) -> float | None:
    """Points of robust accuracy above the natural network."""
    natural = results.get(BASE)
    return None if natural is None else 100 * (network.adv_acc - natural.adv_acc)


def benefit(everything: list[Results]) -> str:
    """Robust accuracy that each training buys, and its cost."""
    rows = []
    for results in everything:
        natural = results.get(BASE)
        for training in TRAININGS:
            network = results.get(BASE, training)
            if natural is None or network is None:
                continue
            extra, points = network.seconds - natural.seconds, gain(results, network)
            is_other = training != "natural" and points is not None
            rows.append(
                [
                    results.title,
                    training,
                    f"{network.seconds:.0f}",
                    f"{network.seconds / natural.seconds:.1f}",
                    number(network["acc"]),
                    number(network.adv_acc),
                    number(network.swept),
                    f"{points:+.0f}" if is_other else "",
                    f"{points / extra:+.1f}" if is_other and extra > 0.5 else "",
                ]
            )
    header = ["data", "training", "seconds", "times natural", "accuracy", "under cascade", "mean over sweep"]
    return markdown([*header, "points gained", "points per extra second"], rows)


def within_run() -> str:
    """Agreement of attack-free values with PGD accuracy on held-out images over the epochs of a run."""
    known = runs.read(runs.RESULTS)
    rows = []
    for name in runs.names([run["history"] for run in known.values()]):
        tau, lost, kept, _ = np.array([runs.judge(run, name) for run in known.values()]).T
        negative = f"{int((tau < 0).sum())} of {len(tau)}"
        rows.append([f"`{name}`", runs.describe(tau), negative, runs.describe(lost), runs.describe(kept)])
    return markdown(["value", "Kendall's tau", "negative in", "points lost", "points lost, kept"], rows)
