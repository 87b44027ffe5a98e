"""Results of the measurements, as the tables need them."""

import json
from pathlib import Path
from typing import Any

from plan import BASE, CONVOLUTIONAL

RESULTS = Path(__file__).parents[1] / "results"
IMAGE_SETS = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
LABELS = {
    "alexnet": "AlexNet-like",
    "vgg": "VGG-like",
    "resnet": "ResNet-like",
    "resnet-deep": "deeper ResNet-like",
    "densenet": "DenseNet-like",
    "mobilenet": "MobileNet-like",
    "vit": "ViT-like",
    "fc-2x100": "FC 2 x 100",
    "fc-2x500": "FC 2 x 500",
    "fc-2x1000": "FC 2 x 1000",
    "fc-2x2000": "FC 2 x 2000",
    "fc-3x500": "FC 3 x 500",
    "fc-4x500": "FC 4 x 500",
}
# Metrics, and whether the papers say that higher is more robust
METRICS = {
    "rdi": True,
    "rdi_embedding": True,
    "roby": False,
    "roby_linf": False,
    "roby_all": False,
    "roby_adversarial": False,
    "fsa": True,
    "fsd": True,
    "fim": False,
    "fim_inverse": True,
    "fim_geometric": False,
    "lipschitz": False,
    "clever": True,
    "boundary": True,
    "boundary_acc": True,
    "acc": True,
}
# The four attacks of Table 3 of the RDI paper
RDI_ATTACKS = ("pgd", "rfgsm", "square", "cw")


class Measured:
    """A network and what was measured of it; attribute access by part, item access by metric."""

    def __init__(self, name: str, entry: dict[str, Any]) -> None:
        self.name, self.entry = name, entry
        self.architecture, self.training, self.seed = entry["architecture"], entry["training"], entry["seed"]
        adversarial = {
            f"{key}_adversarial": value for key, value in entry["adversarial_features"]["adversarial"].items()
        }
        self.values = entry["features"] | entry["fisher"] | entry["clever"] | adversarial

    def __getitem__(self, metric: str) -> float:
        return self.values[metric]

    @property
    def label(self) -> str:
        """Name in tables."""
        training = "" if self.training == "natural" else f", {self.training}"
        return LABELS[self.architecture] + training + (f", seed {self.seed}" if self.seed else "")

    @property
    def adv_acc(self) -> float:
        """Robust accuracy: the verdict of the strong cascade."""
        return self.entry["attacks"]["cascade"]["adv_acc"]

    @property
    def swept(self) -> float:
        """Robust accuracy, averaged over the twenty budgets of the sweep."""
        return sum(self.entry["sweep"]["worst"]) / len(self.entry["sweep"]["worst"])

    @property
    def seconds(self) -> float:
        """Processor time of training."""
        return self.entry["train_seconds"]

    def error(self, attack: str) -> float:
        """Share of all samples that are wrong after an attack: the success rate of the RDI paper."""
        return self.entry["attacks"][attack]["error_rate"]

    def success(self, attack: str) -> float:
        """Success rate of an attack on the samples that were right before it."""
        return self.entry["attacks"][attack]["asr"]


class Results:
    """All networks of a data set.

    Args:
        document: What ``measure.py`` wrote.

    """

    def __init__(self, document: dict[str, Any]) -> None:
        self.document, self.dataset, self.eps = document, document["dataset"], document["eps"]
        needed = ("features", "fisher", "clever", "attacks", "adversarial_features", "sweep")
        complete = {name: entry for name, entry in document["networks"].items() if all(map(entry.get, needed))}
        self.networks = {name: Measured(name, entry) for name, entry in complete.items()}

    @property
    def title(self) -> str:
        """Name of the data set."""
        return IMAGE_SETS[self.dataset]

    def get(self, architecture: str, training: str = "natural", seed: int = 0) -> Measured | None:
        """The network with this name, if it was measured."""
        return self.networks.get(f"{architecture}.{training}.{seed}")

    def natural(self) -> list[Measured]:
        """Naturally trained networks, one seed of each."""
        return [network for network in self.networks.values() if network.training == "natural" and network.seed == 0]

    def robust(self) -> list[Measured]:
        """Networks that were trained to be robust, one seed of each."""
        return [network for network in self.networks.values() if network.training != "natural" and network.seed == 0]

    def convolutional(self) -> list[Measured]:
        """Natural networks other than the fully connected ones."""
        return [network for network in self.natural() if network.architecture in CONVOLUTIONAL]

    def pairs(self) -> list[tuple[Measured, Measured]]:
        """Natural networks with the same architecture trained against PGD."""
        found = [(network, self.get(network.architecture, "pgd")) for network in self.natural()]
        return [(natural, robust) for natural, robust in found if robust is not None]

    def seeds(self, training: str) -> list[Measured]:
        """The base architecture over all seeds."""
        return [
            network
            for network in self.networks.values()
            if network.architecture == BASE and network.training == training
        ]

    def groups(self) -> dict[str, list[Measured]]:
        """Groups of networks within which metrics are compared."""
        return {"natural": self.natural(), "robust": self.robust(), "all": self.natural() + self.robust()}


def read_results(directory: Path = RESULTS) -> list[Results]:
    """The results of all data sets that were measured."""
    paths = [directory / f"paper_tables_{name}.json" for name in IMAGE_SETS]
    return [Results(json.loads(path.read_text())) for path in paths if path.exists()]


def read_speech(directory: Path = RESULTS) -> dict[str, Any]:
    """The results of the synthetic words."""
    return json.loads((directory / "paper_tables_speech.json").read_text())
