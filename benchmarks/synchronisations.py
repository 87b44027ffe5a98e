"""Times that a batch makes the program wait for a GPU: values read, boolean indices, sizes from values, copies.

Counted on a CPU, by the mode that the tests have; every line of the package with its number. A batch of 128 images:
PGD with 40 steps, Square with 100 queries, and the features (RDI, ROBY, accuracy) of a validation batch. Takes seconds:
``python benchmarks/synchronisations.py``. ``--output FILE`` keeps the totals as JSON.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_robustness._measurement.feature_pass import FeaturePass
from lightning_robustness._model.batch import Batch
from lightning_robustness._model.head import HeadCall
from lightning_robustness.attacks import PGD, Square, run_attack
from tests.gpu_like import Synchronisations

BATCH, CLASSES = 128, 10


def workloads() -> dict[str, Callable[[], object]]:
    """Return what is counted, by name."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    x = torch.rand(BATCH, 1, 28, 28)
    with torch.no_grad():
        logits = network(x)
    y = logits.argmax(dim=1)
    features = FeaturePass(CLASSES, "exact", x.device)
    batch, call = Batch(x, y, positions=torch.arange(BATCH)), HeadCall(x.flatten(1), logits)
    return {
        "PGD-40": lambda: run_attack(network, PGD(eps=0.02, steps=40), x, y),
        "Square-100": lambda: run_attack(network, Square(eps=0.02, num_queries=100), x, y),
        "features of a validation batch": lambda: features.add(batch, call),
    }


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="File to keep the counts in.")
    options = parser.parse_args()
    counts: dict[str, int] = {}
    for name, run in workloads().items():
        with Synchronisations() as counter:
            run()
        counts[name] = counter.total
        print(f"{name}: {counter.total}")
        for place, number in counter.places.most_common():
            print(f"{number:6}  {place}")
    if options.output:
        options.output.write_text(json.dumps(counts, indent=2) + "\n")


if __name__ == "__main__":
    main()
