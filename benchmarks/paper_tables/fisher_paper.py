"""Tables of the Fisher information paper, with the numbers measured here beside the published ones."""

from statistics import mean

from published import FISHER_COLUMNS, FISHER_MODELS, FISHER_ROBUST
from results import LABELS, Measured, Results
from table import markdown, number

HEADER = ["Lipschitz", "CLEVER", "C&W, %", "PGD, %", "Fisher", "Fisher, inverse"]
PAPER = [f"paper: {name}" for name in HEADER]


def _ours(network: Measured) -> list[float]:
    attacks = {name: 100 * network.success(f"{name}_fisher") for name in ("cw", "pgd")}
    return [attacks[name] if name in attacks else network[name] for name in FISHER_COLUMNS]


def table_3(results: Results) -> str:
    """A network before and after adversarial training with C&W."""
    pair = {training: results.get("resnet", training) for training in ("natural", "cw")}
    rows = [
        [training, *map(number, _ours(network)), *map(number, FISHER_ROBUST[training])]
        for training, network in pair.items()
        if network is not None
    ]
    if len(rows) == 2:
        ours, theirs = [_ours(network) for network in pair.values() if network], list(FISHER_ROBUST.values())
        reductions = [
            100 * (1 - after / before) for before, after in [*zip(*ours, strict=True), *zip(*theirs, strict=True)]
        ]
        rows.append(["reduction, %", *(f"{value:.0f}" for value in reductions)])
    return markdown(["training", *HEADER, *PAPER], rows)


def table_4(results: Results) -> str:
    """Architectures in the order of the Fisher norm."""
    networks = sorted(results.convolutional(), key=lambda network: -network["fim"])
    rows = []
    for network in networks:
        published = FISHER_MODELS.get(network.architecture, [None] * len(HEADER))
        rows.append(
            [
                LABELS[network.architecture],
                *map(number, _ours(network)),
                number(network.adv_acc),
                *map(number, published),
            ]
        )
    return markdown(["network", *HEADER, "under cascade", *PAPER], rows)


# As published, for 500 samples; the white box is their Algorithm 2
_TIMES = {
    **{"lipschitz": "131.09", "clever": "24.65", "rayleigh": "267.13", "blackbox": "66.16"},
    **{"pgd": "83.48", "cw": "96.12"},
}


def table_7(results: Results) -> str:
    """Time of the metrics, per sample."""
    costs = [network.entry["cost"] for network in results.convolutional() if "cost" in network.entry]
    labels = {
        "lipschitz": "Lipschitz constant",
        "clever": "CLEVER, 50 batches of 128 points, all rivals",
        "fisher": "Fisher norm, exact",
        "rayleigh": "Fisher norm, the paper's Algorithm 2",
        "blackbox": "Fisher norm, black box",
        "pgd": "PGD, all 40 steps",
        "cw": "C&W, 50 steps",
    }
    rows = [
        [label, f"{mean(cost[name] for cost in costs):.1f}" if name in costs[0] else "-", _TIMES.get(name, "-")]
        for name, label in labels.items()
    ]
    return markdown(["metric", "ms per image, mean over architectures", "paper: ResNet18"], rows)
