"""Tables of the RDI paper, with the numbers measured here beside the published ones."""

from statistics import mean
from typing import Any

from published import RDI_CLASSES, RDI_MODELS, RDI_SECONDS, RDI_SPEECH
from results import LABELS, RDI_ATTACKS, Measured, Results
from table import markdown, number


def mean_error(network: Measured) -> float:
    """Mean over the four attacks of the paper's success rate, whose denominator is all samples."""
    return mean(network.error(attack) for attack in RDI_ATTACKS)


def table_1(everything: list[Results]) -> str:
    """Time of RDI and ROBY by the number of classes."""
    rows = []
    for classes, (rdi, roby) in RDI_CLASSES.items():
        ours = [results.document["classes"][str(classes)] for results in everything if "classes" in results.document]
        times = [mean(costs[name] for costs in ours) for name in ("rdi", "roby")]
        rows.append(
            [
                classes,
                *(f"{1000 * time:.0f}" for time in times),
                f"{times[1] / times[0]:.1f}",
                rdi,
                roby,
                f"{roby / rdi:.1f}",
            ]
        )
    header = ["classes", "RDI, ms", "ROBY, ms", "ratio", "paper: RDI, s", "paper: ROBY, s", "paper: ratio"]
    return markdown(header, rows)


def table_2(results: Results) -> str:
    """Time of RDI and of PGD by model."""
    rows = []
    for network in results.convolutional():
        cost = network.entry.get("cost")
        if cost is None:
            continue
        published = RDI_SECONDS.get(network.architecture)
        theirs = ["-", "-", "-"] if published is None else [*published, f"{published[1] / published[0]:.0f}"]
        rows.append(
            [network.label, f"{cost['rdi']:.2f}", f"{cost['pgd']:.2f}", f"{cost['pgd'] / cost['rdi']:.0f}", *theirs]
        )
    header = [
        "network",
        "RDI, ms per image",
        "PGD, ms per image",
        "ratio",
        "paper: RDI, s",
        "paper: PGD, s",
        "paper: ratio",
    ]
    return markdown(header, rows)


def table_3(results: Results) -> str:
    """Success of four attacks, RDI and ROBY, in the order of the mean success."""
    rows = []
    for network in sorted(results.natural(), key=mean_error, reverse=True):
        published = RDI_MODELS.get(results.dataset, {}).get(network.architecture)
        rows.append(
            [
                network.label,
                *(number(network[name]) for name in ("acc", "roby_all", "rdi")),
                *(number(network.error(attack)) for attack in RDI_ATTACKS),
                number(mean_error(network)),
                *(["-", "-", "-"] if published is None else [number(value) for value in published[1:]]),
            ]
        )
    header = ["network", "accuracy", "ROBY", "RDI", "PGD", "RFGSM", "Square", "C&W", "mean success"]
    return markdown([*header, "paper: ROBY", "paper: RDI", "paper: mean success"], rows)


def figure_5(results: Results) -> str:
    """RDI of natural and adversarially trained networks."""
    rows = [
        [
            LABELS[natural.architecture],
            *(number(value) for value in (natural["rdi"], robust["rdi"], robust["rdi"] - natural["rdi"])),
            *(number(value) for value in (natural["rdi_embedding"], robust["rdi_embedding"])),
            *(number(value) for value in (natural.adv_acc, robust.adv_acc)),
        ]
        for natural, robust in results.pairs()
    ]
    header = ["network", "RDI, natural", "RDI, PGD", "change", "of the embedding, natural", "of the embedding, PGD"]
    return markdown([*header, "under cascade, natural", "under cascade, PGD"], rows)


def table_4(speech: dict[str, Any]) -> str:
    """Waveforms: RDI, ROBY, Fisher information, boundary and SirenAttack."""
    rows = []
    for name, entry in speech["networks"].items():
        architecture, training = name.rsplit(".", 1)
        metrics, rates = entry["metrics"], entry["rates"]
        published = RDI_SPEECH[architecture] if training == "natural" else None
        rows.append(
            [
                f"{architecture}-like" + (", PGD" if training == "pgd" else ""),
                *(number(metrics[key]) for key in ("acc", "roby", "rdi", "fim")),
                number(metrics["boundary"], 4),
                *(number(rates[attack]["error_rate"]) for attack in ("siren", "siren_small", "pgd")),
                *(["-", "-", "-"] if published is None else [number(value) for value in published[1:]]),
            ]
        )
    header = ["network", "accuracy", "ROBY", "RDI", "Fisher", "boundary", "SirenAttack, 0.5"]
    header += [f"SirenAttack, {speech['eps']}", f"strong PGD, {speech['eps']}"]
    return markdown([*header, "paper: ROBY", "paper: RDI", "paper: SirenAttack"], rows)
