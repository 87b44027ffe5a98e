"""Tables of the CMMR paper, with the numbers measured here beside the published ones."""

from functools import cache

from plan import BASE
from published import CMMR_WEIGHTS
from results import Measured, Results
from table import markdown, number, signed

from lightning_robustness.evaluation import ComparisonReport, RobustnessReport, SweepReport

BALANCE = 0.08
BUDGETS = (0.01, 0.05, 0.1, 0.15, 0.2)


def compared(results: Results) -> list[Measured]:
    """Natural networks and robust ones of the same architecture, as the paper compares."""
    chosen = [network for pair in results.pairs() for network in pair]
    chosen += [network for network in results.robust() if network.architecture == BASE]
    return list(dict.fromkeys(chosen))


@cache
def comparison(results: Results) -> ComparisonReport:
    """CMMR of these networks, by the package."""
    reports = {
        network.label: RobustnessReport(
            network.name,
            10,
            {name: value for name, value in network.entry["features"].items() if name in ("rdi", "roby", "acc")},
            sweep=SweepReport(
                **{"budgets" if name == "eps" else name: own for name, own in network.entry["sweep"].items()}
            ),
        )
        for network in compared(results)
    }
    return ComparisonReport(reports, balance=BALANCE)


def table_3(everything: list[Results]) -> str:
    """Weights of the metrics."""
    weights = [comparison(results).weights for results in everything]
    rows = [[name, *(number(found[name], 2) for found in weights), value] for name, value in CMMR_WEIGHTS.items()]
    rows.append(["balance", *[f"{BALANCE:.2f}"] * len(weights), f"{BALANCE:.2f}"])
    return markdown(["metric", *(results.title for results in everything), "paper: CIFAR-10"], rows)


def scores(results: Results) -> str:
    """CMMR at some budgets and on average, in its order, beside robust accuracy."""
    report = comparison(results)
    places = [report.budgets.index(eps) for eps in BUDGETS]
    rows = [
        [
            network.label,
            *(number(report.curves[network.label][place]) for place in places),
            number(report.scores[network.label]),
            number(report.mean_robust_accuracy[network.label]),
            number(network.adv_acc),
        ]
        for network in sorted(compared(results), key=lambda network: -report.scores[network.label])
    ]
    header = ["network", *(f"CMMR at {eps:g}" for eps in BUDGETS), "CMMR, mean", "accuracy, mean", "under cascade"]
    return markdown(header, rows)


def validation(everything: list[Results]) -> str:
    """Lowest correlations of the composite with its parts, and Kendall's W."""
    rows = []
    for results in everything:
        report = comparison(results)
        by_metric = [value for values in report.metric_pearson.values() for value in values.values() if value == value]
        rows.append(
            [
                results.title,
                signed(min(by_metric)),
                signed(min(report.attack_pearson.values())),
                number(report.concordance),
            ]
        )
    rows.append(["paper: CIFAR-10", "above +0.60", "above +0.90", "-"])
    header = ["data", "lowest Pearson of M with a metric", "lowest Pearson of CMMR with M of an attack", "Kendall's W"]
    return markdown(header, rows)
