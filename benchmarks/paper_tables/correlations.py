"""How metrics go with robust accuracy: over networks, and from natural to robust ones."""

from collections.abc import Callable
from statistics import mean, stdev

from agreement import Agreement, agreement, kendall, partial_spearman, pearson, spearman
from plan import BASE
from results import METRICS, Measured, Results
from table import markdown, number, signed

Reference = Callable[[Measured], float]


def oriented(networks: list[Measured], metric: str) -> list[float]:
    """Values of a metric, with the sign that makes higher more robust according to the papers."""
    is_higher = METRICS.get(metric, False)  # others are forms of ROBY
    return [network[metric] if is_higher else -network[metric] for network in networks]


def rank_agreement(networks: list[Measured], metric: str) -> Agreement:
    """Spearman's correlation of a metric with the verdict of the cascade."""
    return agreement(spearman, oriented(networks, metric), [network.adv_acc for network in networks])


def at_equal_accuracy(networks: list[Measured], metric: str) -> Agreement:
    """Spearman's partial correlation of a metric with the verdict of the cascade, given clean accuracy."""
    series = [network.adv_acc for network in networks], [network["acc"] for network in networks]
    return agreement(partial_spearman, oriented(networks, metric), *series)


def correlations(results: Results) -> str:
    """All coefficients with the verdict of the cascade, within and across groups of networks."""
    rows = []
    for group, networks in results.groups().items():
        robust = [network.adv_acc for network in networks]
        for metric in METRICS:
            values = oriented(networks, metric)
            coefficients = [agreement(coefficient, values, robust) for coefficient in (pearson, spearman, kendall)]
            given = "" if metric == "acc" else at_equal_accuracy(networks, metric)
            rows.append([f"{group} ({len(networks)})", f"`{metric}`", *coefficients, given])
    return markdown(["networks", "metric", "Pearson", "Spearman", "Kendall", "Spearman at equal accuracy"], rows)


def correlations_with_sweep(results: Results) -> str:
    """Spearman's coefficient with accuracy averaged over the budgets of the sweep."""
    rows = []
    for metric in METRICS:
        found = [
            agreement(spearman, oriented(networks, metric), [network.swept for network in networks])
            for networks in results.groups().values()
        ]
        rows.append([f"`{metric}`", *found])
    groups = [f"{group} ({len(networks)})" for group, networks in results.groups().items()]
    return markdown(["metric", *groups], rows)


def summary(everything: list[Results]) -> str:
    """Spearman's coefficient of each metric with the verdict of the cascade, and in brackets at equal accuracy."""
    rows = []
    for metric in METRICS:
        row = [f"`{metric}`"]
        for results in everything:
            for networks in results.groups().values():
                value = signed(rank_agreement(networks, metric).value)
                row.append(
                    value if metric == "acc" else f"{value} ({signed(at_equal_accuracy(networks, metric).value)})"
                )
        rows.append(row)
    header = [f"{results.title}, {group}" for results in everything for group in results.groups()]
    return markdown(["metric", *header], rows)


DIRECTIONS: dict[str, tuple[Callable[[Measured], float], bool]] = {
    **{f"`{name}`": ((lambda network, name=name: network[name]), higher) for name, higher in METRICS.items()},
    "accuracy under cascade": (lambda network: network.adv_acc, True),
    "success of cascade": (lambda network: network.success("cascade"), False),
    "success of PGD-20": (lambda network: network.success("pgd20"), False),
    "success of FGSM": (lambda network: network.success("fgsm"), False),
    "success of PGD, 0.3": (lambda network: network.success("pgd"), False),
    "success of RFGSM, 0.3": (lambda network: network.success("rfgsm"), False),
    "success of Square, 0.3": (lambda network: network.success("square"), False),
    "success of PGD in l2": (lambda network: network.success("pgd_l2"), False),
    "success of C&W": (lambda network: network.success("cw"), False),
    "success of C&W with search": (lambda network: network.success("cw_search"), False),
}


def directions(everything: list[Results]) -> str:
    """Natural against PGD-trained networks over seeds: means with standard deviations."""
    rows = []
    for name, (read, higher) in DIRECTIONS.items():
        row = [name, "higher" if higher else "lower"]
        for results in everything:
            natural, robust = (
                [read(network) for network in results.seeds(training)] for training in ("natural", "pgd")
            )
            pairs = list(zip(natural, robust, strict=False))
            agreeing = sum((after > before) if higher else (after < before) for before, after in pairs)
            row += [_spread(natural), _spread(robust), f"{agreeing} of {len(pairs)}"]
        rows.append(row)
    header = [f"{results.title}, {kind}" for results in everything for kind in ("natural", "PGD", "as claimed")]
    return markdown(["", "robust should be", *header], rows)


def _spread(values: list[float]) -> str:
    return f"{number(mean(values))} ± {number(stdev(values) if len(values) > 1 else None)}"


# What earlier measurements on public MNIST networks found, with the error under PGD-20 at 0.1
EARLY = {"fim": "well", "rdi": "roughly", "rdi_embedding": "no", "roby": "no"}


def early(everything: list[Results]) -> str:
    """Spearman's coefficient with accuracy under PGD-20, beside what was found earlier."""
    rows = []
    for metric, finding in EARLY.items():
        row = [f"`{metric}`", finding]
        for results in everything:
            for networks in _compared(results).values():
                robust = [1 - network.error("pgd20") for network in networks]
                row.append(agreement(spearman, oriented(networks, metric), robust))
        rows.append(row)
    header = [f"{results.title}, {group}" for results in everything for group in _compared(results)]
    return markdown(["metric", "ordered networks earlier", *header], rows)


def _compared(results: Results) -> dict[str, list[Measured]]:
    same = [network for network in results.networks.values() if network.architecture == BASE]
    attacked = [network for network in same if not network.training.startswith("free")]
    groups = {"natural": results.natural(), "all": results.groups()["all"]}
    groups |= {"one architecture": same, "one architecture, attack-free training left out": attacked}
    return {f"{name} ({len(networks)})": networks for name, networks in groups.items()}
