"""One figure for each paper, and one for the price of robustness."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cmmr_paper
from plan import BASE, TRAININGS
from rdi_paper import mean_error
from results import LABELS, Results

from lightning_robustness._display.drawing import new_figure

NATURAL, ROBUST, OTHER = "#8c8c8c", "#1f77b4", "#d62728"


def _scatter(axes: Any, results: Results, metric: str, is_logarithmic: bool = False) -> None:
    """A metric against the verdict of the cascade."""
    for group, color in {"natural": NATURAL, "robust": ROBUST}.items():
        networks = results.groups()[group]
        x, y = [network[metric] for network in networks], [network.adv_acc for network in networks]
        axes.scatter(x, y, s=24, color=color, label=group)
    if is_logarithmic:
        axes.set_xscale("log")
    axes.set(xlabel=metric, ylabel=f"accuracy under cascade, eps {results.eps:g}", title=results.title)
    axes.grid(alpha=0.3)


def rdi(figure: Any, everything: list[Results]) -> None:
    """Figures 3 and 5 of the RDI paper."""
    axes = figure.subplots(2, len(everything), squeeze=False)
    for column, results in enumerate(everything):
        networks = sorted(results.convolutional(), key=lambda network: network.swept)
        names = [LABELS[network.architecture].removesuffix("-like") for network in networks]
        top = axes[0][column]
        top.plot(names, [network["rdi"] for network in networks], "o-", color=ROBUST, label="RDI")
        top.plot(names, [network["roby_all"] for network in networks], "s-", color=OTHER, label="ROBY")
        top.plot(names, [network.swept for network in networks], "^-", color="black", label="accuracy, mean over sweep")
        top.plot(names, [1 - mean_error(network) for network in networks], "v:", color="black", label="paper's attacks")
        top.set(title=f"{results.title}: Figure 3", ylim=(0, 1))
        bottom = axes[1][column]
        pairs = results.pairs()
        for shift, (label, color) in enumerate({"natural": NATURAL, "PGD-trained": ROBUST}.items()):
            heights = [pair[shift]["rdi"] for pair in pairs]
            bottom.bar([place + 0.4 * shift for place in range(len(pairs))], heights, 0.38, color=color, label=label)
        labels = [LABELS[natural.architecture].removesuffix("-like") for natural, _ in pairs]
        bottom.set_xticks([place + 0.2 for place in range(len(pairs))], labels)
        bottom.set(title=f"{results.title}: Figure 5", ylabel="RDI")
        for axis in (top, bottom):
            axis.tick_params(axis="x", rotation=30)
            axis.grid(alpha=0.3)
    for row, place in zip(axes, ("upper left", "lower left"), strict=True):
        row[0].legend(fontsize=8, loc=place)


def roby(figure: Any, everything: list[Results]) -> None:
    """ROBY of clean and of adversarial samples against robust accuracy."""
    axes = figure.subplots(2, len(everything), squeeze=False)
    for column, results in enumerate(everything):
        for row, metric in enumerate(("roby", "roby_adversarial")):
            _scatter(axes[row][column], results, metric)
    axes[0][0].legend()


def cmmr(figure: Any, everything: list[Results]) -> None:
    """CMMR and accuracy over the twenty budgets."""
    axes = figure.subplots(2, len(everything), squeeze=False)
    for column, results in enumerate(everything):
        report = cmmr_paper.comparison(results)
        for network in cmmr_paper.compared(results):
            style = {"color": NATURAL if network.training == "natural" else ROBUST, "lw": 1}
            axes[0][column].plot(report.budgets, report.curves[network.label], **style)
            axes[1][column].plot(report.budgets, network.entry["sweep"]["worst"], **style)
        axes[0][column].set(title=results.title, ylabel="CMMR")
        axes[1][column].set(xlabel="eps", ylabel="accuracy, worst of four attacks")
        for row in axes:
            row[column].grid(alpha=0.3)
    for label, color in {"natural": NATURAL, "trained to be robust": ROBUST}.items():
        axes[0][0].plot([], [], color=color, label=label)
    axes[0][0].legend()


def fisher(figure: Any, everything: list[Results]) -> None:
    """Fisher information and distance to the boundary against robust accuracy."""
    axes = figure.subplots(2, len(everything), squeeze=False)
    for column, results in enumerate(everything):
        _scatter(axes[0][column], results, "fim", is_logarithmic=True)
        _scatter(axes[1][column], results, "boundary_acc")
        axes[1][column].plot([0, 1], [0, 1], ":", color="black", lw=1)
    axes[0][0].legend()


def cost(figure: Any, everything: list[Results]) -> None:
    """Seconds of training against robust accuracy, for one architecture."""
    axes = figure.subplots(1, len(everything), squeeze=False)[0]
    for axis, results in zip(axes, everything, strict=True):
        for training in TRAININGS:
            network = results.get(BASE, training)
            if network is None:
                continue
            color = OTHER if training.startswith("free") else NATURAL if training == "natural" else ROBUST
            axis.scatter(network.seconds, network.adv_acc, s=28, color=color)
            axis.annotate(training, (network.seconds, network.adv_acc), (4, 4), textcoords="offset points", fontsize=8)
        axis.set(
            xlabel="seconds of training", ylabel=f"accuracy under cascade, eps {results.eps:g}", title=results.title
        )
        axis.margins(x=0.18)
        axis.grid(alpha=0.3)


FIGURES: dict[str, tuple[Callable[[Any, list[Results]], None], float]] = {
    "rdi": (rdi, 7.5),
    "roby": (roby, 7),
    "cmmr": (cmmr, 7),
    "fisher": (fisher, 7),
    "cost": (cost, 3.8),
}


def draw(name: str, everything: list[Results], path: Path) -> None:
    """Draw a figure and save it."""
    make, height = FIGURES[name]
    figure = new_figure(10, height)
    make(figure, everything)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90, metadata={"Software": None})
