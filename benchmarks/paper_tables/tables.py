"""Print the tables of ``docs/evidence.md`` from the JSON files in ``benchmarks/results``.

``python benchmarks/paper_tables/tables.py`` prints all tables; ``--only claims`` those with this in their names; and
``--write`` puts them into ``docs/evidence.md``, between the markers with their names, and draws its figures.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import attack_free
import claims
import cmmr_paper
import correlations
import fisher_paper
import rdi_paper
import roby_paper
from figures import FIGURES, draw
from results import RESULTS, Results, read_results, read_speech
from table import markdown

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "evidence.md"
MARKED = r"(<!-- {name} -->\n)(.*?)(<!-- end -->)"


def overview(results: Results) -> str:
    """All networks of a data set, the most robust last."""
    header = ["network", "training, s", "accuracy", "under cascade", "mean over sweep", "RDI", "RDI, embedding"]
    header += ["ROBY", "Fisher", "Lipschitz", "CLEVER", "boundary", "to first order"]
    rows = [
        [
            network.label,
            f"{network.seconds:.0f}",
            *(f"{value:.3f}" for value in (network["acc"], network.adv_acc, network.swept)),
            *(f"{network[name]:.3f}" for name in ("rdi", "rdi_embedding", "roby")),
            *(f"{network[name]:.2f}" for name in ("fim", "lipschitz", "clever")),
            f"{network['boundary']:.3f}",
            f"{network['boundary_acc']:.3f}",
        ]
        for network in sorted(results.networks.values(), key=lambda network: network.adv_acc)
    ]
    return markdown(header, rows)


def sizes(all_results: list[Results]) -> str:
    """Numbers of networks and samples."""
    rows = []
    for results in all_results:
        sizes, networks = results.document["sizes"], list(results.networks.values())
        trained = networks[0].entry["train_settings"]
        robust = [network for network in networks if network.training != "natural"]
        rows.append(
            [
                results.title,
                f"{len(networks)}, of which {len(robust)} trained to be robust",
                f"{trained['samples']:,} images, {trained['epochs']} epochs",
                f"{min(n.entry['parameters'] for n in networks):,} to {max(n.entry['parameters'] for n in networks):,}",
                f"{mean(n['acc'] for n in networks if n.training == 'natural'):.3f}",
                f"{sizes['features']:,}",
                sizes["fisher"],
                sizes["attacks"],
                sizes["sweep"],
                sizes["adversarial"],
                f"{sizes['clever']}, against {sizes['clever_rivals']} rivals",
            ]
        )
    header = ["data", "networks", "trained on", "parameters", "mean natural accuracy", "test images for RDI, ROBY"]
    header += ["Fisher, boundary", "attacks", "sweep", "adversarial ROBY", "CLEVER"]
    return markdown(["", *(row[0] for row in rows)], [list(line) for line in zip(header, *rows, strict=True)][1:])


def tables(directory: Path = RESULTS) -> dict[str, Callable[[], str]]:
    """All tables, by the names of their markers."""
    everything, speech = read_results(directory), read_speech(directory)
    found: dict[str, Callable[[], str]] = {
        "claims": lambda: claims.claims(everything, speech),
        "sizes": lambda: sizes(everything),
        "correlations-summary": lambda: correlations.summary(everything),
        "early": lambda: correlations.early(everything),
        "directions": lambda: correlations.directions(everything),
        "attack-free": lambda: attack_free.benefit(everything),
        "within-run": attack_free.within_run,
        "rdi-table-1": lambda: rdi_paper.table_1(everything),
        "rdi-table-4": lambda: rdi_paper.table_4(speech),
        "roby-table-2-4": lambda: roby_paper.tables_2_to_4(everything),
        "cmmr-table-3": lambda: cmmr_paper.table_3(everything),
        "cmmr-validation": lambda: cmmr_paper.validation(everything),
    }
    per_data_set: dict[str, Callable[[Results], str]] = {
        "networks": overview,
        "correlations": correlations.correlations,
        "correlations-sweep": correlations.correlations_with_sweep,
        "rdi-table-2": rdi_paper.table_2,
        "rdi-table-3": rdi_paper.table_3,
        "rdi-figure-5": rdi_paper.figure_5,
        "roby-table-1": roby_paper.table_1,
        "roby-table-5": roby_paper.table_5,
        "roby-table-6": roby_paper.table_6,
        "cmmr-scores": cmmr_paper.scores,
        "fisher-table-3": fisher_paper.table_3,
        "fisher-table-4": fisher_paper.table_4,
        "fisher-table-7": fisher_paper.table_7,
    }
    for results in everything:
        for name, make in per_data_set.items():
            found[f"{name} {results.dataset}"] = lambda make=make, results=results: make(results)
    return found


def write(made: dict[str, str], path: Path = DOCUMENT) -> None:
    """Put tables between their markers."""
    text = path.read_text()
    for name, table in made.items():
        text = re.sub(MARKED.format(name=re.escape(name)), lambda m, t=table: m[1] + t + "\n" + m[3], text, flags=re.S)
    path.write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the tables with this in their names")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory with the JSON files")
    parser.add_argument("--write", action="store_true", help="write them to docs/evidence.md, with its figures")
    arguments = parser.parse_args()
    made = {name: make() for name, make in tables(arguments.results).items() if arguments.only in name}
    for name, table in made.items():
        print(f"## {name}\n\n{table}\n")
    if arguments.write:
        write(made)
        for name in FIGURES:
            draw(name, read_results(arguments.results), ROOT / "docs" / "images" / f"evidence_{name}.png")
