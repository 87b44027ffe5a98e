"""Tables of the ROBY paper, with the numbers measured here beside the published ones."""

from statistics import mean

from agreement import agreement, pearson
from published import ROBY_CROSS, ROBY_MODELS, ROBY_PEARSON, ROBY_ROBUST, ROBY_WIDTHS
from results import LABELS, Measured, Results
from table import markdown, number, signed

# The norm of an attack and of the metric: suffix of the metrics, and the attack
NORMS = {"linf": ("_linf", "pgd"), "l2": ("", "pgd_l2")}


def table_1(results: Results) -> str:
    """Success of PGD and the metrics in both norms, in the order of the success."""
    rows = []
    for network in sorted(results.natural(), key=lambda network: network.success("pgd_l2")):
        published = ROBY_MODELS.get(results.dataset, {}).get(network.architecture)
        row = [network.label, number(network["acc"])]
        for suffix, attack in NORMS.values():
            values = [network.success(attack), *(network[f"{name}{suffix}"] for name in ("fsa", "fsd", "roby"))]
            row += [number(value) for value in values]
        rows.append([*row, *(["-", "-"] if published is None else [number(published[3]), number(published[7])])])
    header = ["network", "accuracy", "ASR∞", "FSA∞", "FSD∞", "ROBY∞", "ASR2", "FSA2", "FSD2", "ROBY2"]
    return markdown([*header, "paper: ROBY∞", "paper: ROBY2"], rows)


def correlate(networks: list[Measured], metric: str, attack: str) -> float:
    """Pearson's correlation of a metric with the success of an attack."""
    series = [network[metric] for network in networks], [network.success(attack) for network in networks]
    return agreement(pearson, *series).value


def tables_2_to_4(everything: list[Results]) -> str:
    """Pearson's correlation of the metrics with the success of PGD."""
    rows = []
    for norm, (suffix, attack) in NORMS.items():
        for results in everything:
            published = ROBY_PEARSON[norm].get(results.dataset)
            ours = [correlate(results.natural(), f"{name}{suffix}", attack) for name in ("fsa", "fsd", "roby")]
            name = f"{'II' if norm == 'linf' else 'III'}: {norm}, {results.title}"
            rows.append([name, *map(signed, ours), *map(signed, published or [None] * 3)])
    other = {"l2": "", "linf": "_linf"}
    for norm, (_, attack) in NORMS.items():
        for suffix_name, published in zip(other, ROBY_CROSS[norm], strict=True):
            ours = mean(correlate(results.natural(), f"roby{other[suffix_name]}", attack) for results in everything)
            rows.append([f"IV: ROBY in {suffix_name}, ASR in {norm}", "", "", signed(ours), "", "", signed(published)])
    return markdown(["table", "FSA", "FSD", "ROBY", "paper: FSA", "paper: FSD", "paper: ROBY"], rows)


def table_5(results: Results) -> str:
    """ROBY of natural networks and of those trained against PGD, on clean and on adversarial samples."""
    rows = []
    for natural, robust in results.pairs():
        published = ROBY_ROBUST.get(results.dataset, {}).get(natural.architecture)
        ours = [
            network.entry["adversarial_features"][kind]["roby"]
            for kind in ("clean", "adversarial")
            for network in (natural, robust)
        ]
        rows.append([LABELS[natural.architecture], *map(number, ours), *map(number, published or [None] * 4)])
    kinds = ["clean, natural", "clean, PGD", "adversarial, natural", "adversarial, PGD"]
    return markdown(["network", *kinds, *(f"paper: {kind}" for kind in kinds)], rows)


def table_6(results: Results) -> str:
    """Fully connected networks of several widths and depths."""
    rows = []
    for network in results.natural():
        if not network.architecture.startswith("fc"):
            continue
        published = ROBY_WIDTHS.get(network.architecture) if results.dataset == "mnist" else None
        values = [network["acc"], network.success("pgd"), network.success("pgd_l2"), network.adv_acc, network["roby"]]
        rows.append([network.label, *map(number, values), *map(number, (published or [None] * 3)[1:])])
    header = ["network", "accuracy", "ASR∞", "ASR2", "under cascade", "ROBY", "paper: ASR", "paper: ROBY"]
    return markdown(header, rows)
