"""The papers' small experiments, each in seconds on a CPU: ``python benchmarks/papers.py`` writes results/papers.json.

Tables of docs/papers.md are printed from that file by ``python docs/make_papers.py``.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from directions import train
from sklearn.datasets import load_digits
from timing import seconds
from torch import Tensor, nn

from lightning_robustness import InputSpace
from lightning_robustness.attacks import CW, PGD, get_attack, run_attack
from lightning_robustness.functional import clever_score, fisher_spectral_norm, lipschitz_constant, roby

RESULTS = Path(__file__).parent / "results" / "papers.json"
UNBOUNDED = InputSpace(low=None, high=None)
Table = dict[str, list]


def information(network: nn.Module, x: Tensor) -> Tensor:
    """Dense Fisher information of one input in float64, from the gradients of log p."""
    gradients = torch.autograd.functional.jacobian(lambda t: network(t[None])[0].log_softmax(0), x).flatten(1)
    return gradients.T @ (network(x[None])[0].softmax(0).unsqueeze(1) * gradients)


def variance_of_gradients() -> Table:
    """Table 13 of the Fisher paper: the variance of gradients of log p of sampled labels tends to G."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 10)).double()
    x = torch.rand(1, 8, 8, dtype=torch.double)
    gradients = torch.autograd.functional.jacobian(lambda t: network(t[None])[0].log_softmax(0), x).flatten(1)
    p, expected = network(x[None])[0].softmax(0).detach(), information(network, x).detach()
    errors = []
    for size in (32, 64, 128, 256, 512, 1024):
        repeats = [gradients[torch.multinomial(p, size, replacement=True)] for _ in range(50)]
        estimates = torch.stack([torch.cov(sample.T, correction=0) for sample in repeats])
        errors.append(((estimates - expected).norm(dim=(1, 2)).mean() / expected.norm()).item())
    return {"samples": [32, 64, 128, 256, 512, 1024], "relative error": errors}


def divergence(network: nn.Module, x: Tensor, y: Tensor) -> Table:
    """Theorem 1, Tables 9 and 10: |KL - d^T G d / 2| for FGSM's d, beside the norm of G."""
    network, x = network.double(), x[:100].double()
    sizes, kl, errors = (1, 2, 4, 8), [], []
    for size in sizes:
        delta = run_attack(network, get_attack("fgsm", eps=size / 255, all_steps=True), x, y[:100]).x_adv - x
        log_p, moved = (network(t).log_softmax(1).detach() for t in (x, x + delta))
        exact = (log_p.exp() * (log_p - moved)).sum(1)
        half = [(d.flatten() @ information(network, t) @ d.flatten() / 2).item() for t, d in zip(x, delta, strict=True)]
        kl.append(exact.mean().item())
        errors.append((exact - torch.tensor(half)).abs().mean().item())
    norm = fisher_spectral_norm(network, x).mean().item()
    network.float()
    return {
        "eps * 255": list(sizes),
        "mean KL": kl,
        "mean error": errors,
        "error / mean norm": [e / norm for e in errors],
    }


def linear(num_classes: int, width: int, seed: int = 0) -> tuple[nn.Linear, Tensor]:
    """Return a Gaussian linear classifier, whose Q is Gaussian as in the paper, and an input."""
    torch.manual_seed(seed)
    network = nn.Linear(width, num_classes, bias=False)
    nn.init.normal_(network.weight)
    return network, torch.randn(1, width) / width**0.5


def solvers() -> Table:
    """Table 17: seconds of the solvers by the number of classes, 10,000 dimensions."""
    table: Table = {"classes": [10, 100, 1000], "exact": [], "power": [], "Rayleigh, 200": [], "Lanczos": []}
    for num_classes in table["classes"]:
        network, x = linear(num_classes, 10_000)
        options = {"input_space": UNBOUNDED, "num_directions": 200, "max_steps": 1000}
        methods = {"exact": "exact", "power": "power", "Rayleigh, 200": "rayleigh", "Lanczos": "lanczos"}
        run = {n: partial(fisher_spectral_norm, network, x, method, **options) for n, method in methods.items()}
        for name, time in seconds(run, 2).items():
            table[name].append(time)
    return table


def error(num_classes: int, width: int, number: int, **options: object) -> float:
    """Mean relative error of a random method, in percent, over five classifiers."""
    errors = []
    for seed in range(5):
        network, x = linear(num_classes, width, seed)
        run: Callable[..., Tensor] = partial(fisher_spectral_norm, network, x, input_space=UNBOUNDED)
        found = run(num_directions=number, seed=1000 + seed, **options)  # not the seed of the weights
        errors.append((1 - found / run("lanczos")).item() * 100)
    return sum(errors) / len(errors)


def directions() -> Table:
    """Tables 18 and 20: error in percent by the number and the distribution of the vectors, 10 classes."""
    numbers = [10, 100, 1000]
    gaussian, rademacher = (
        [error(10, 100, number, method="rayleigh", distribution=name) for number in numbers]
        for name in ("gaussian", "rademacher")
    )
    return {"vectors": numbers, "Gaussian, % off": gaussian, "Rademacher, % off": rademacher}


def sides() -> Table:
    """Table 19: error in percent of 200 vectors on the K x K and on the d x d side, 1,000 dimensions."""
    classes = [10, 100]
    indirect = [error(k, 1000, 200, method="rayleigh") for k in classes]
    direct = [error(k, 1000, 200, method="blackbox", rayleigh_ritz=False) for k in classes]
    return {"classes": classes, "K x K, % off": indirect, "d x d, % off": direct}


def spread(network: nn.Module, x: Tensor) -> Table:
    """Tables 21 and 22: mean and standard deviation over five samples of 250 images."""
    table: Table = {"metric": [], "mean": [], "standard deviation": []}
    for name, values in {
        "Fisher norm": fisher_spectral_norm(network, x),
        "Lipschitz": lipschitz_constant(network, x),
    }.items():
        means = torch.stack([values[torch.randperm(len(x))[:250]].mean() for _ in range(5)])
        table["metric"].append(name)
        table["mean"].append(means.mean().item())
        table["standard deviation"].append(means.std().item())
    return table


def steps(network: nn.Module, x: Tensor, y: Tensor) -> Table:
    """After Theorem 1: accuracy after one step along the principal eigenvector, beside FGSM."""
    table: Table = {"norm": ["linf", "linf", "l2", "l2"], "eps": [0.05, 0.1, 0.5, 1.0], "Fisher step": [], "FGSM": []}
    for norm, eps in zip(table["norm"], table["eps"], strict=True):
        for column, name in {"Fisher step": "fisher", "FGSM": "fgsm"}.items():
            attack = get_attack(name, eps, norm=norm)
            table[column].append((run_attack(network, attack, x, y).adv_preds == y).double().mean().item())
    return table


def costs(network: nn.Module, x: Tensor, y: Tensor) -> Table:
    """Table 7: milliseconds per image of metrics and attacks, 20 random directions."""
    cw = CW(steps=20, all_steps=True)
    functions: dict[str, Callable[[], object]] = {
        "Lipschitz": lambda: lipschitz_constant(network, x),
        "CLEVER, 5 batches of 20 points": lambda: clever_score(
            network, x[:50], 2.0, num_batches=5, points_per_batch=20
        ),
        "Fisher, exact": lambda: fisher_spectral_norm(network, x, "exact"),
        "Fisher, Algorithm 2": lambda: fisher_spectral_norm(network, x, "rayleigh"),
        "Fisher, black box": lambda: fisher_spectral_norm(network, x, "blackbox"),
        "PGD, 20 steps": lambda: run_attack(network, PGD(eps=8 / 255, steps=20, all_steps=True), x, y),
        "C&W, 20 steps": lambda: run_attack(network, cw, x, y),
    }
    sizes = {name: 50 if name.startswith("CLEVER") else len(x) for name in functions}
    times = {name: 1000 * time / sizes[name] for name, time in seconds(functions, 2).items()}
    return {"metric": list(times), "ms per image": list(times.values())}


def cost_of_roby(network: nn.Sequential, x: Tensor, y: Tensor) -> Table:
    """Table X of the ROBY paper: seconds of ROBY, the forward pass included, and of PGD with 40 steps."""

    @torch.no_grad()
    def measure() -> Tensor:
        embedding = network[:-1](x)
        return roby(embedding, network[-1](embedding).argmax(1))

    times = seconds({"ROBY": measure, "PGD": lambda: run_attack(network, PGD(eps=0.3, alpha=0.01, steps=40), x, y)}, 3)
    return {
        "data": ["digits"],
        **{name: [time] for name, time in times.items()},
        "ratio": [times["PGD"] / times["ROBY"]],
    }


if __name__ == "__main__":
    digits = load_digits()
    pixels, targets = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(digits.target)
    network, x, y = train(pixels[:1200], targets[:1200], 0.0, seed=0), pixels[1200:], targets[1200:]
    results = {
        "fisher-13": variance_of_gradients(),
        "fisher-9-10": divergence(network, x, y),
        "fisher-17": solvers(),
        "fisher-18-20": directions(),
        "fisher-19": sides(),
        "fisher-21-22": spread(network, x),
        "fisher-step": steps(network, x, y),
        "fisher-7": costs(network, x, y),
        "roby-X": cost_of_roby(network, x, y),
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    for name, table in results.items():
        print(name, table)
