"""Measure the networks behind the tables, and write the results to a JSON file.

``python benchmarks/paper_tables/measure.py mnist --data DIRECTORY --work DIRECTORY`` measures the networks that
``train.py`` left in the directory, in about twenty minutes on one core. Each network is measured in parts; a run that
is interrupted goes on where it was, and ``--only vgg.pgd.0/attacks`` repeats the parts with this in their names. The
numbers of samples are arguments, and part of the results.
"""

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from architectures import ARCHITECTURES
from data import DATA_SETS, load
from plan import CONVOLUTIONAL, EPS, Network, plan
from torch import Tensor, nn
from tqdm import tqdm
from train import checkpoint

from lightning_robustness import __version__
from lightning_robustness._measurement.keys import get_key
from lightning_robustness.attacks import PGD, MinimumNormCW, get_attack, run_attack
from lightning_robustness.evaluation import RobustnessReport, evaluate, sweep
from lightning_robustness.functional import (
    clever_score,
    fisher_spectral_norm,
    lipschitz_constant,
    robustness_difference_index,
    roby,
)
from lightning_robustness.functional.attack_success_rate import wilson_interval

RESULTS = Path(__file__).parents[1] / "results"
BATCH_SIZE = 128
# In the l2 norm; 0.3, the budget of the ROBY paper in both norms, breaks nothing in units of pixels in [0, 1]
L2_EPS = 2.0
CLEVER_RADIUS = 2.0
Batches = list[tuple[Tensor, Tensor]]


class Measurement:
    """The parts of the measurement of a network.

    Args:
        network: The trained network, whose last layer is its head.
        dataset: Name of the data set.
        x: Test images.
        y: Their labels.
        sizes: Number of samples of each part.

    """

    def __init__(self, network: nn.Sequential, dataset: str, x: Tensor, y: Tensor, sizes: dict[str, int]) -> None:
        self.network, self.dataset, self.eps = network, dataset, EPS[dataset]
        self.x, self.y, self.sizes = x, y, sizes
        self.batches: Batches = list(zip(x.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True))

    def features(self) -> dict[str, Any]:
        """RDI and ROBY, in the forms of both papers, and of logits and true labels, as in the authors' later code."""
        report = evaluate(self.network, self.batches, attacks=[], fim_samples=0, progress=False)
        logits, suffixes = self._embed(self.x)[1], {"pairs": "", "all": "_all"}
        of_logits = {
            f"roby{suffix}_logits": float(roby(logits, self.y, normalization=normalization))
            for normalization, suffix in suffixes.items()
        }
        return report.metrics | self._roby(self.x) | of_logits

    def fisher(self) -> dict[str, Any]:
        """Fisher information, Lipschitz constant, and distance to the decision boundary."""
        options = {"eps": self.eps, "fim_samples": self.sizes["fisher"], "progress": False}
        report = evaluate(self.network, self.batches, attacks=[], **options)
        return {name: value for name, value in report.metrics.items() if get_key(name).part == "fim"}

    def clever(self) -> dict[str, Any]:
        """CLEVER, against the highest rivals of the predicted class."""
        x = self.x[: self.sizes["clever"]]
        rivals = self.network(x).topk(1 + self.sizes["clever_rivals"]).indices[:, 1:]
        batches = {"num_batches": self.sizes["clever_batches"], "points_per_batch": self.sizes["clever_points"]}
        scores = clever_score(self.network, x, CLEVER_RADIUS, targets=rivals, **batches)
        return {"clever": scores.amin(dim=1).mean().item()}

    def attacks(self) -> dict[str, Any]:
        """Success of the attacks at the settings of the papers, and the verdict of the strong cascade."""
        by_preset = {name: get_attack(name, preset=self.dataset) for name in ("pgd", "rfgsm", "square")}
        attacks = by_preset | {
            "pgd_fisher": get_attack("pgd", preset="fisher"),
            "pgd_l2": PGD(norm="l2", eps=L2_EPS, steps=40),
            "fgsm": get_attack("fgsm", eps=self.eps),
            "pgd20": PGD(eps=self.eps, steps=20),
            "cascade": get_attack("cascade", eps=self.eps),
        }
        report = self._attack(attacks)
        return plain_rates(report) | self.cw() | {"signs": [sign.name for sign in report.signs]}

    def cw(self) -> dict[str, Any]:
        """Success of C&W at any distance, as in the papers, so without other attacks and their budgets."""
        attacks = {
            "cw": get_attack("cw", preset=self.dataset),
            "cw_search": MinimumNormCW(),
            "cw_fisher": get_attack("cw", preset="fisher"),
        }
        return plain_rates(self._attack(attacks, eps=None, strength="paper"))

    def _attack(self, attacks: dict[str, Any], **options: Any) -> RobustnessReport:
        options |= {"fim_samples": 0, "attack_samples": self.sizes["attacks"], "progress": False}
        return evaluate(self.network, self.batches, attacks=attacks, **options)

    def adversarial_features(self) -> dict[str, Any]:
        """ROBY and RDI of adversarial samples, and of the same samples before the attack."""
        x, y = self.x[: self.sizes["adversarial"]], self.y[: self.sizes["adversarial"]]
        attack = get_attack("pgd", preset=self.dataset, all_steps=True)
        x_adv = torch.cat([run_attack(self.network, attack, *rows).x_adv for rows in self._split(x, y)])
        return {"clean": self._roby(x), "adversarial": self._roby(x_adv)}

    def sweep(self) -> dict[str, Any]:
        """Accuracy and image quality at the twenty budgets of the CMMR paper."""
        report = sweep(self.network, self.batches, attack_samples=self.sizes["sweep"], progress=False)
        names = ("attacks", "values", "worst", "clean_accuracy", "samples", "seconds", "settings")
        return {"eps": report.budgets} | {name: getattr(report, name) for name in names}

    def cost(self) -> dict[str, Any]:
        """Processor time per sample, in milliseconds."""
        x, y, network = self.x[:BATCH_SIZE], self.y[:BATCH_SIZE], self.network
        few, attack = x[:2], get_attack("pgd", preset=self.dataset, all_steps=True)
        cw = get_attack("cw", preset=self.dataset)
        preds = self._embed(self.x)[1].argmax(dim=1)
        return {
            "rdi": _milliseconds(lambda: robustness_difference_index(self._embed(self.x)[1], preds), len(self.x)),
            "roby": _milliseconds(lambda: roby(self._embed(self.x)[0], preds), len(self.x)),
            "pgd": _milliseconds(lambda: run_attack(network, attack, x, y), len(x)),
            "cw": _milliseconds(lambda: run_attack(network, cw, x, y), len(x)),
            "fisher": _milliseconds(lambda: fisher_spectral_norm(network, x), len(x)),
            "rayleigh": _milliseconds(lambda: fisher_spectral_norm(network, x, method="rayleigh"), len(x)),
            "lipschitz": _milliseconds(lambda: lipschitz_constant(network, x), len(x)),
            "clever": _milliseconds(lambda: clever_score(network, few, CLEVER_RADIUS, num_batches=5), len(few) / 10),
        }

    def _split(self, x: Tensor, y: Tensor) -> Batches:
        return list(zip(x.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True))

    @torch.no_grad()
    def _embed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings and logits."""
        embeddings = torch.cat([self.network[:-1](rows) for rows in x.split(BATCH_SIZE)])
        return embeddings, self.network[-1](embeddings)

    def _roby(self, x: Tensor) -> dict[str, float]:
        embeddings, logits = self._embed(x)
        preds = logits.argmax(dim=1)
        values = {"rdi": robustness_difference_index(logits, preds), "classes": preds.unique().numel()}
        for suffix, p in {"": 2.0, "_linf": math.inf}.items():
            parts = roby(embeddings, preds, p=p, return_components=True)
            values |= {f"{name}{suffix}": getattr(parts, name) for name in ("roby", "fsa", "fsd")}
            values[f"roby_all{suffix}"] = roby(embeddings, preds, p=p, normalization="all")
        return {name: float(value) for name, value in values.items()}


PARTS = ("features", "fisher", "clever", "attacks", "adversarial_features", "sweep", "cost")


def parts_of(network: Network) -> list[str]:
    """The parts that are measured of a network: costs only where the papers list them."""
    is_listed = network.architecture in CONVOLUTIONAL and not network.is_robust and network.seed == 0
    return [part for part in PARTS if part != "cost" or is_listed]


def _milliseconds(function: Callable[[], object], samples: float) -> float:
    start = time.process_time()
    function()
    return 1000 * (time.process_time() - start) / samples


def cost_of_classes(samples: int = 10_000, width: int = 64) -> dict[str, dict[str, float]]:
    """Seconds that RDI and ROBY take for random features of many classes, without the network."""
    costs = {}
    for classes in (10, 100, 200):
        preds = torch.arange(samples) % classes
        features = torch.randn(samples, width, generator=torch.Generator().manual_seed(0)) + preds.unsqueeze(1)
        both = {"rdi": robustness_difference_index, "roby": roby}
        costs[str(classes)] = {
            name: _milliseconds(partial(metric, features, preds), samples=1000) for name, metric in both.items()
        }
    return costs


def load_network(path: Path, network: Network, x: Tensor) -> tuple[nn.Sequential, dict[str, Any]]:
    """A trained network in eval mode, and how it was trained."""
    saved = torch.load(path)
    loaded = ARCHITECTURES[network.architecture](x.shape[1], x.shape[2])
    loaded.load_state_dict(saved["state"])
    loaded.eval().requires_grad_(False)
    return loaded, {
        "architecture": network.architecture,
        "training": network.training,
        "seed": network.seed,
        "parameters": sum(parameter.numel() for parameter in loaded.parameters()),
        "train_settings": saved["settings"],
        "train_seconds": saved["seconds"],
    }


def plain_rates(report: RobustnessReport) -> dict[str, Any]:
    """Rates on the attacked samples alone, where the report estimates those of all samples."""
    found = {}
    for name, rates in report.rates.items():
        counts = {count: rates[count] for count in ("flipped", "correct", "wrong", "count")}
        flipped, correct, wrong, number = counts.values()
        low, high = wilson_interval(torch.tensor(flipped), torch.tensor(correct))
        share = {"asr": flipped / max(correct, 1), "asr_low": low.item(), "asr_high": high.item()}
        share |= {"error_rate": wrong / number, "adv_acc": 1 - wrong / number, "distortion": rates["distortion"]}
        found[name] = share | counts
    return {name: rates for name, rates in found.items() if name != "worst"}


def rounded(value: Any) -> Any:
    """The value for JSON: six digits, None for what is not finite."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def measure(networks: list[Network], arguments: argparse.Namespace, path: Path, x: Tensor, y: Tensor) -> None:
    """Measure all parts that are not in the file yet, and write it after each."""
    sizes = {name: getattr(arguments, name) for name in SIZES}
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"networks": {}}
    versions = {"torch": str(torch.__version__), "lightning-robustness": __version__}
    results |= {"dataset": arguments.dataset, "eps": EPS[arguments.dataset], "sizes": sizes, "versions": versions}
    jobs = [(network, part) for network in networks for part in parts_of(network)]
    for network, part in tqdm(jobs, desc=arguments.dataset):
        kept = results["networks"].get(network.name, {})
        if part in kept if arguments.only is None else arguments.only not in f"{network.name}/{part}":
            continue
        saved = checkpoint(arguments.work, arguments.dataset, network)
        if not saved.exists():
            tqdm.write(f"{network.name} is not trained yet")
            continue
        loaded, facts = load_network(saved, network, x)
        start = time.process_time()
        values = getattr(Measurement(loaded, arguments.dataset, x, y, sizes), part)()
        seconds = kept.get("seconds", {}) | {part: time.process_time() - start}
        results["networks"][network.name] = rounded(kept | facts | {part: values, "seconds": seconds})
        write(path, results)
    if "classes" not in results:
        results["classes"] = rounded(cost_of_classes())
        write(path, results)


def write(path: Path, results: dict[str, Any]) -> None:
    """Write the results in the order of the plan."""
    order = [network.name for network in plan()]
    networks = dict(sorted(results["networks"].items(), key=lambda item: order.index(item[0])))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results | {"networks": networks}, indent=1) + "\n")


SIZES = {
    "features": 2000,
    "fisher": 256,
    "attacks": 128,
    "adversarial": 256,
    "sweep": 64,
    "clever": 16,
    "clever_rivals": 2,
    "clever_batches": 10,
    "clever_points": 32,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=DATA_SETS)
    parser.add_argument("--data", help="directory with the files of the data set")
    parser.add_argument("--work", type=Path, required=True, help="directory with the trained networks")
    parser.add_argument("--output", type=Path, help="JSON file; by default in benchmarks/results")
    parser.add_argument("--only", help="repeat the parts whose names, such as vgg.pgd.0/attacks, contain this")
    parser.add_argument("--threads", type=int, default=1, help="these networks are too small for more")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore")
    images, labels = (part[: arguments.features] for part in load(arguments.dataset, arguments.data, train=False))
    output = arguments.output or RESULTS / f"paper_tables_{arguments.dataset}.json"
    measure(plan(), arguments, output, images, labels)
