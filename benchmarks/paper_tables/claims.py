"""The claims of the papers, what came out here, and a verdict by a rule.

A claim about a correlation holds if the 95 % intervals of all data sets are above 0, holds in part if all coefficients
are positive and an interval is above 0, fails if an interval is below 0, and is not shown otherwise. A claim about
pairs of networks holds if all pairs agree, mostly holds from three quarters on, fails below one quarter, and is not
shown between.
"""

from collections.abc import Callable, Iterable
from statistics import mean
from typing import Any, NamedTuple

import cmmr_paper
from agreement import Agreement, agreement, pearson, spearman
from attack_free import gain
from correlations import at_equal_accuracy, rank_agreement
from plan import BASE
from published import CMMR_WEIGHTS
from results import LABELS, Measured, Results
from table import markdown, number

WIDTHS = ("fc-2x100", "fc-2x500", "fc-2x1000", "fc-2x2000")


class Claim(NamedTuple):
    """A row of the table."""

    claim: str
    source: str
    result: str
    verdict: str


def judge(found: Iterable[Agreement]) -> str:
    """The verdict on correlations, one for each data set."""
    found = list(found)
    if any(agreement.high < 0 for agreement in found):
        return "fails"
    if all(agreement.low > 0 for agreement in found):
        return "holds"
    if all(agreement.value > 0 for agreement in found) and any(agreement.low > 0 for agreement in found):
        return "holds in part"
    return "not shown"


def judge_pairs(agreeing: int, number: int) -> str:
    """The verdict on pairs."""
    share = agreeing / number
    if share == 1:
        return "holds"
    return "mostly holds" if share >= 0.75 else "fails" if share < 0.25 else "not shown"


def _correlation(
    claim: str,
    source: str,
    everything: list[Results],
    compute: Callable[[Results], Agreement],
    name: str = "Spearman",
) -> Claim:
    found = {results.title: compute(results) for results in everything}
    return Claim(claim, source, f"{name} " + ", ".join(f"{k} {v}" for k, v in found.items()), judge(found.values()))


def _pairs(claim: str, source: str, everything: list[Results], agrees: Callable[[Measured, Measured], bool]) -> Claim:
    counts = {
        results.title: (sum(agrees(*pair) for pair in results.pairs()), len(results.pairs())) for results in everything
    }
    agreeing, total = (sum(count[place] for count in counts.values()) for place in (0, 1))
    result = ", ".join(f"{title} {count} of {among} architectures" for title, (count, among) in counts.items())
    return Claim(claim, source, result, judge_pairs(agreeing, total))


def _adversarial(network: Measured, kind: str) -> float:
    return network.entry["adversarial_features"][kind]["roby"]


def _rdi_claims(everything: list[Results], speech: dict[str, Any]) -> list[Claim]:
    def over_natural(metric: str) -> Callable[[Results], Agreement]:
        return lambda results: rank_agreement(results.natural(), metric)

    ratios = [
        network.entry["cost"]["pgd"] / network.entry["cost"]["rdi"]
        for results in everything
        for network in results.convolutional()
        if "cost" in network.entry
    ]
    many = [results.document["classes"]["200"] for results in everything if "classes" in results.document]
    slower = mean(cost["roby"] for cost in many) / mean(cost["rdi"] for cost in many)
    natural = [entry for name, entry in speech["networks"].items() if name.endswith(".natural")]
    siren = {
        attack: agreement(
            spearman,
            [entry["metrics"]["rdi"] for entry in natural],
            [-entry["rates"][attack]["error_rate"] for entry in natural],
        )
        for attack in ("siren", "siren_small")
    }
    robust = [network for results in everything for network in results.robust()]
    flagged = [network for network in robust if "black_box_beats_white_box" in network.entry["attacks"]["signs"]]
    gained = {results.title: (results, results.get(BASE, "free-rdi")) for results in everything}
    points = {title: gain(results, network) or 0.0 for title, (results, network) in gained.items() if network}
    return [
        _correlation("RDI of the logits orders natural networks", "RDI, Figure 3", everything, over_natural("rdi")),
        _correlation("RDI of the embedding does", "RDI, section 3.2", everything, over_natural("rdi_embedding")),
        _correlation(
            "RDI of the logits does at equal accuracy",
            "ours",
            everything,
            lambda results: at_equal_accuracy(results.natural(), "rdi"),
            "partial Spearman",
        ),
        _correlation(
            "RDI of the logits orders natural and robust networks together",
            "RDI, Figures 3 and 5",
            everything,
            lambda results: rank_agreement(results.groups()["all"], "rdi"),
        ),
        _pairs(
            "Adversarial training raises RDI of the logits",
            "RDI, Figure 5",
            everything,
            lambda natural, robust: robust["rdi"] > natural["rdi"],
        ),
        _pairs(
            "Adversarial training raises RDI of the embedding",
            "RDI, Figure 5",
            everything,
            lambda natural, robust: robust["rdi_embedding"] > natural["rdi_embedding"],
        ),
        Claim(
            "Success of PGD with 40 steps of 0.01 is a gold standard",
            "RDI, section 4.2",
            f"Square, without gradients, breaks more in {len(flagged)} of {len(robust)} robust networks",
            "fails" if flagged else "holds",
        ),
        Claim(
            "RDI takes 1/30 of the time of PGD",
            "RDI, Table 2",
            f"1/{min(ratios):.0f} to 1/{max(ratios):.0f}, PGD with 40 steps",
            "holds" if mean(ratios) >= 30 else "fails",
        ),
        Claim(
            "ROBY takes 25 times as long as RDI for 200 classes",
            "RDI, Table 1",
            f"{slower:.1f} times, without the network",
            "holds" if slower > 10 else "fails: it is the implementation",
        ),
        Claim(
            "RDI follows SirenAttack on waveforms",
            "RDI, Table 4",
            f"Spearman at 0.5: {siren['siren']}, at {speech['eps']}: {siren['siren_small']}; {len(natural)} networks",
            judge(siren.values()),
        ),
        Claim(
            "RDI in the loss makes networks robust without an attack",
            "RDI, section 5",
            ", ".join(f"{title} {value:+.0f} points" for title, value in points.items()),
            "holds" if points and min(points.values()) > 5 else "fails",
        ),
    ]


def _roby_claims(everything: list[Results]) -> list[Claim]:
    def with_success(results: Results) -> Agreement:
        networks = results.natural()
        series = [network["roby"] for network in networks], [network.success("pgd_l2") for network in networks]
        return agreement(pearson, *series)

    widths, metrics = list(range(len(WIDTHS))), []
    for results in everything:
        networks = [network for network in map(results.get, WIDTHS) if network is not None]
        if len(networks) == len(WIDTHS):
            accuracy = agreement(spearman, widths, [network.adv_acc for network in networks]).value
            roby = agreement(spearman, widths, [-network["roby"] for network in networks]).value
            metrics.append((results.title, accuracy, roby))
    is_monotone = all(accuracy == roby == 1 for _, accuracy, roby in metrics)
    return [
        _correlation("ROBY goes with the success of PGD in l2", "ROBY, Table III", everything, with_success, "Pearson"),
        _correlation(
            "ROBY orders natural networks by robust accuracy",
            "ROBY, Table I",
            everything,
            lambda results: rank_agreement(results.natural(), "roby"),
        ),
        _correlation(
            "ROBY of logits and true labels does so",
            "the authors' later code",
            everything,
            lambda results: rank_agreement(results.natural(), "roby_logits"),
        ),
        _correlation(
            "ROBY of these does so as the RDI paper normalises it",
            "RDI, supplement A",
            everything,
            lambda results: rank_agreement(results.natural(), "roby_all_logits"),
        ),
        _pairs(
            "Robust networks have a lower ROBY",
            "ROBY, Table V",
            everything,
            lambda natural, robust: _adversarial(robust, "clean") < _adversarial(natural, "clean"),
        ),
        _pairs(
            "They have a lower ROBY on adversarial samples",
            "ROBY, Table V",
            everything,
            lambda natural, robust: _adversarial(robust, "adversarial") < _adversarial(natural, "adversarial"),
        ),
        Claim(
            "Wider networks are more robust, and have a lower ROBY",
            "ROBY, Table VI",
            "; ".join(f"{t}: Spearman of width {a:+.1f} with accuracy, {r:+.1f} with ROBY" for t, a, r in metrics),
            "holds" if is_monotone else "fails" if all(a <= 0 for _, a, _ in metrics) else "not shown",
        ),
    ]


def _cmmr_claims(everything: list[Results]) -> list[Claim]:
    reports = {results: cmmr_paper.comparison(results) for results in everything}
    weights = {results.title: report.weights["accuracy"] for results, report in reports.items()}
    largest = [max(report.weights, key=lambda name: report.weights[name]) for report in reports.values()]
    counts = [
        report.scores[robust.label] > report.scores[natural.label]
        for results, report in reports.items()
        for natural, robust in results.pairs()
    ]
    by_metric = [v for report in reports.values() for d in report.metric_pearson.values() for v in d.values() if v == v]
    by_attack = [value for report in reports.values() for value in report.attack_pearson.values()]
    best = {}
    for results, report in reports.items():
        trainings = ("pgd-half", "pgd", "pgd-double", "pgd-triple")
        networks = [network for training in trainings if (network := results.get(BASE, training)) is not None]
        best[results.title] = max(networks, key=lambda network: report.scores[network.label]).training
    agreements = [
        agreement(
            spearman,
            [report.scores[network.label] for network in cmmr_paper.compared(results)],
            [network.adv_acc for network in cmmr_paper.compared(results)],
        )
        for results, report in reports.items()
    ]
    listed = ", ".join(f"{results.title} {value}" for results, value in zip(reports, agreements, strict=True))
    is_largest = all(name == "accuracy" for name in largest)
    return [
        Claim(
            "Robust networks have a higher CMMR",
            "CMMR, Figure 10",
            f"{sum(counts)} of {len(counts)} architectures and data sets",
            judge_pairs(sum(counts), len(counts)),
        ),
        Claim("CMMR orders networks by robust accuracy", "CMMR, section 4", f"Spearman {listed}", judge(agreements)),
        Claim(
            f"Accuracy has the largest weight, {CMMR_WEIGHTS['accuracy']}",
            "CMMR, Table 3",
            ", ".join(f"{title} {number(weight, 2)}" for title, weight in weights.items())
            + f"; the largest is that of {' and '.join(dict.fromkeys(largest))}",
            "holds" if is_largest else "fails",
        ),
        Claim(
            "M correlates above 0.6 with each metric, CMMR above 0.9 with each attack",
            "CMMR, Figures 8 and 9",
            f"at least {min(by_metric):+.2f} and {min(by_attack):+.2f}",
            "holds" if min(by_metric) > 0.6 and min(by_attack) > 0.9 else "fails",
        ),
        Claim(
            "A larger training budget need not give a better CMMR",
            "CMMR, Figure 11",
            ", ".join(f"{title}: best is {training}" for title, training in best.items()),
            "holds" if any(training != "pgd-triple" for training in best.values()) else "not shown",
        ),
    ]


def _fisher_claims(everything: list[Results]) -> list[Claim]:
    def lowest_and_highest(results: Results) -> str:
        networks = sorted(results.convolutional(), key=lambda network: network.swept)
        return f"{results.title}: {LABELS[networks[0].architecture]} least, {LABELS[networks[-1].architecture]} most"

    def with_lipschitz(results: Results) -> Agreement:
        networks = results.natural()
        return agreement(spearman, [n["fim"] for n in networks], [n["lipschitz"] for n in networks])

    def cheapest(results: Results) -> str:
        costs = [network.entry["cost"] for network in results.convolutional() if "cost" in network.entry]
        return min(("lipschitz", "clever", "fisher"), key=lambda name: mean(cost[name] for cost in costs))

    names = [cheapest(results) for results in everything]
    order = [max(results.convolutional(), key=lambda network: network["fim"]).architecture for results in everything]
    return [
        _pairs(
            "Adversarial training lowers the Fisher norm",
            "Fisher, Table 3",
            everything,
            lambda natural, robust: robust["fim"] < natural["fim"],
        ),
        _pairs(
            "It raises the mean inverse of the norm",
            "Fisher, Table 3",
            everything,
            lambda natural, robust: robust["fim_inverse"] > natural["fim_inverse"],
        ),
        _correlation(
            "The Fisher norm orders natural networks",
            "Fisher, Table 4",
            everything,
            lambda results: rank_agreement(results.natural(), "fim"),
        ),
        _correlation(
            "It orders natural and robust networks together",
            "Fisher, Tables 3 and 4",
            everything,
            lambda results: rank_agreement(results.groups()["all"], "fim"),
        ),
        _correlation(
            "The mean inverse orders natural networks",
            "Fisher, Table 4",
            everything,
            lambda results: rank_agreement(results.natural(), "fim_inverse"),
        ),
        _correlation("Fisher norm and Lipschitz constant agree", "Fisher, Table 4", everything, with_lipschitz),
        Claim(
            "DenseNet has the largest Fisher norm",
            "Fisher, Table 4",
            ", ".join(f"{r.title}: {LABELS[name]}" for r, name in zip(everything, order, strict=True)),
            "holds" if all(name == "densenet" for name in order) else "fails",
        ),
        Claim(
            "DenseNet is least robust, VGG and ViT most",
            "Fisher, Table 4",
            "; ".join(map(lowest_and_highest, everything)),
            "holds" if all(_is_as_ranked(results) for results in everything) else "fails",
        ),
        Claim(
            "CLEVER is the fastest of the metrics",
            "Fisher, Table 7",
            f"the fastest is: {', '.join(dict.fromkeys(names))}",
            "holds" if all(name == "clever" for name in names) else "fails: their CLEVER is another quantity",
        ),
    ]


def _is_as_ranked(results: Results) -> bool:
    networks = sorted(results.convolutional(), key=lambda network: network.swept)
    return networks[0].architecture == "densenet" and networks[-1].architecture in ("vgg", "vit")


def _own_claims(everything: list[Results]) -> list[Claim]:
    rows = [
        _correlation(
            f"The distance to the boundary orders {group} networks",
            "ours",
            everything,
            lambda results, group=group: rank_agreement(results.groups()[group], "boundary_acc"),
        )
        for group in ("natural", "robust", "all")
    ]
    rows.append(
        _pairs(
            "Adversarial training raises the distance to the boundary",
            "ours",
            everything,
            lambda natural, robust: robust["boundary"] > natural["boundary"],
        )
    )
    for training in ("free-fisher", "free-boundary"):
        found = {results: results.get(BASE, training) for results in everything}
        points = {results.title: gain(results, network) or 0.0 for results, network in found.items() if network}
        rows.append(
            Claim(
                f"`{training}` makes networks robust without an attack",
                "ours",
                ", ".join(f"{title} {value:+.0f} points" for title, value in points.items()),
                "holds" if points and min(points.values()) > 5 else "fails",
            )
        )
    return rows


def claims(everything: list[Results], speech: dict[str, Any]) -> str:
    """All claims."""
    rows = [
        *_rdi_claims(everything, speech),
        *_roby_claims(everything),
        *_cmmr_claims(everything),
        *_fisher_claims(everything),
        *_own_claims(everything),
    ]
    return markdown(["claim", "paper", "our result", "verdict"], [(*row[:3], f"**{row.verdict}**") for row in rows])
