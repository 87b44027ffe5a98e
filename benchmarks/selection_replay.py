"""Points of robust accuracy that are lost by the epoch that is kept, replayed on published training runs.

Reads epoch series of adversarial training: one CSV file per run with the columns ``epoch``, ``lr``,
``clean_accuracy`` and ``robust_accuracy``, or a clone of the repository of Rice, Wong and Kolter (2020,
locuslab/robust_overfitting), which has a log of each run in ``experiments``. A module logs each series in a Trainer,
with its learning rates, and ``RobustModelCheckpoint`` chooses as it would in training; ``RobustEarlyStopping`` then
stops further runs of them. Prints a table, and writes the epoch that each rule keeps of each run to a JSON file. Takes
about three minutes for 44 runs, on one core: ``python benchmarks/selection_replay.py DIRECTORY``. ``--only mixup``
takes the runs with this in their names, ``--table`` prints the table of the file alone.
"""

import argparse
import csv
import json
import logging
import re
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_robustness import RobustEarlyStopping, RobustModelCheckpoint

RESULTS = Path(__file__).parent / "results" / "selection_replay.json"
# By name, options of the callback
RULES = {
    "guard, `guard_tolerance=0.02`": {"guard": "robustness/acc", "guard_tolerance": 0.02, "tie_margin": 0.0},
    "no guard, `tie_margin=0`": {"tie_margin": 0.0},
    "no guard, `tie_margin=0.005` (default)": {},
}
LAST = "last epoch"
# By name, options of early stopping with the default checkpoint; the epoch that was kept when it stops counts
STOPS = {
    "stop, `patience=10`, `start_from_epoch=0`": {"patience": 10, "start_from_epoch": 0},
    "stop, `patience=10`": {"patience": 10},
    "stop, `patience=20`": {"patience": 20},
}
# By name, the columns of the authors' logs
COLUMNS = {"epoch": "Epoch", "lr": "LR", "clean_accuracy": "Test Acc", "robust_accuracy": "Test Robust Acc"}
Row = dict[str, float]
Runs = dict[str, dict[str, Row]]


def monitors() -> list[str]:
    """A key of its own for each rule: a Trainer takes one checkpoint callback per key."""
    return [f"robustness/adv_acc/{number}" for number in range(len(RULES))]


class Replay(L.LightningModule):
    """Logs a series instead of learning."""

    def __init__(self, series: list[Row]) -> None:
        super().__init__()
        self.series = series
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """A step on nothing."""
        return self.weight.sum()

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """Log what was measured in the epoch."""
        row = self.series[self.current_epoch]
        robust = dict.fromkeys(monitors(), row["robust_accuracy"])
        self.log_dict({**robust, "robustness/acc": row["clean_accuracy"]})

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LambdaLR]]:
        """The learning rates of the series."""
        rates = [row["lr"] for row in self.series]
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: rates[min(epoch, len(rates) - 1)])
        ]


def find(directory: Path) -> dict[str, Path]:
    """The files of a directory, or the logs of a clone, by the name of their run."""
    logs = {f"{path.parts[-3]}__{path.parts[-2]}": path for path in directory.glob("experiments/*/*/output.log")}
    return dict(sorted((logs or {path.stem: path for path in directory.glob("*.csv")}).items()))


def read(path: Path) -> list[Row]:
    """The series in a file."""
    with path.open() as file:
        if path.suffix == ".log":
            return read_log(file)
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def read_log(lines: Iterable[str]) -> list[Row]:
    """The series in a log; a run that was resumed wrote some epochs again, of which the last counts."""
    header: list[str] = []
    rows: dict[int, Row] = {}
    for line in lines:
        # Tabs, and in some places as many spaces
        cells = [cell.strip() for cell in re.split(r"\t|\s{2,}", line.partition(" - ")[2]) if cell.strip()]
        if cells[:1] == ["Epoch"]:
            header = cells
        elif cells and cells[0].isdigit() and len(cells) == len(header):
            found = dict(zip(header, map(float, cells), strict=True))
            rows[int(cells[0])] = {name: found[title] for name, title in COLUMNS.items()}
    return [rows[epoch] for epoch in sorted(rows)]


def replay(series: list[Row]) -> dict[str, tuple[int, float]]:
    """The position in the series that each rule keeps, and the share of the epochs that were trained."""
    with tempfile.TemporaryDirectory() as directory:
        checkpoints = {
            name: RobustModelCheckpoint(key, dirpath=Path(directory, key), save_weights_only=True, **options)
            for key, (name, options) in zip(monitors(), RULES.items(), strict=True)
        }
        train(series, list(checkpoints.values()), directory)
        kept = {name: (kept_by(checkpoint), 1.0) for name, checkpoint in checkpoints.items()}
        for number, (name, options) in enumerate(STOPS.items()):
            folder = Path(directory, f"stop{number}")
            checkpoint = RobustModelCheckpoint(monitors()[0], dirpath=folder, save_weights_only=True)
            trained = train(series, [checkpoint, RobustEarlyStopping(monitors()[0], **options)], directory)
            kept[name] = kept_by(checkpoint), trained / len(series)
    return {LAST: (len(series) - 1, 1.0), **kept}


def train(series: list[Row], callbacks: list[L.Callback], directory: str) -> int:
    """Log a series in a Trainer, and return the number of epochs that it ran for."""
    loader = DataLoader(TensorDataset(torch.zeros(1, 1)))
    trainer = L.Trainer(
        max_epochs=len(series),
        callbacks=callbacks,
        default_root_dir=directory,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Replay(series), loader, loader)
    return trainer.current_epoch


def kept_by(checkpoint: RobustModelCheckpoint) -> int:
    """The epoch whose checkpoint was kept."""
    return int(torch.load(checkpoint.best_model_path, weights_only=True)["epoch"])


def replay_all(paths: dict[str, Path]) -> Runs:
    """Points lost, and points of clean accuracy won, by the epoch that each rule keeps of each run."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    runs: Runs = {}
    for name, path in paths.items():
        start, series = time.perf_counter(), read(path)
        best = max(series, key=lambda row: row["robust_accuracy"])
        runs[name] = {
            rule: {
                "epoch": int(series[position]["epoch"]),
                "lost": round(100 * (best["robust_accuracy"] - series[position]["robust_accuracy"]), 4),
                "clean": round(100 * (series[position]["clean_accuracy"] - best["clean_accuracy"]), 4),
                "trained": round(trained, 4),
            }
            for rule, (position, trained) in replay(series).items()
        }
        print(f"{name}: {len(series)} epochs, {time.perf_counter() - start:.1f} s", flush=True)
    return runs


def print_table(runs: Runs) -> None:
    """Print points lost against the best epoch, and points of clean accuracy won, as Markdown."""
    print(f"\n{len(runs)} runs; points against the epoch with the highest robust accuracy\n")
    print(
        "| rule | points lost, mean | worst | runs above 1 point | clean accuracy | epochs trained |\n"
        "|---|---|---|---|---|---|"
    )
    for rule in (LAST, *RULES, *STOPS):
        lost, won = (np.array([run[rule][name] for run in runs.values()]) for name in ("lost", "clean"))
        worst = f"{lost.max():.1f} ({list(runs)[lost.argmax()]})" if lost.max() > 0 else "0.0"
        above = int((lost > 1 + 1e-6).sum())
        trained = 100 * np.mean([run[rule]["trained"] for run in runs.values()])
        print(f"| {rule} | {lost.mean():.2f} | {worst} | {above} | {won.mean():+.2f} | {trained:.0f} % |")


def main() -> None:
    """Replay every file of a directory, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", help="directory with one CSV file per run, or the clone")
    parser.add_argument("--only", default="", help="take the runs whose names contain this")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the table of the file and replay nothing")
    arguments = parser.parse_args()
    if not arguments.table:
        paths = {name: path for name, path in find(arguments.data or Path()).items() if arguments.only in name}
        if not paths:
            parser.error(f"found no run of this name in {arguments.data}; pass the directory of the runs, or the clone")
        arguments.output.write_text(json.dumps(replay_all(paths), indent=1) + "\n")
    print_table(json.loads(arguments.output.read_text()))


if __name__ == "__main__":
    main()
