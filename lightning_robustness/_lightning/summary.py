import math
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import TextWrapper
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import Self

from lightning_robustness._display.page import Page
from lightning_robustness._display.provenance import describe_run
from lightning_robustness._display.table import Table, glossary
from lightning_robustness._lightning.settings import MonitorSettings
from lightning_robustness._measurement.keys import KEYS, PARTS, attack_free_metrics, find_key, get_key
from lightning_robustness._measurement.plan import FINAL, WORST
from lightning_robustness._measurement.statistics import (
    MIN_EVALUATIONS,
    Evaluation,
    candidates,
    comparable,
    measure_trust,
    pick,
)
from lightning_robustness._measurement.threat_model import ThreatModel
from lightning_robustness._measurement.verdict import Kept, kept_epoch
from lightning_robustness._numbers import write_distance
from lightning_robustness.input_space import InputSpace, check_input_space

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Characters of a line in a terminal
_WIDTH = 120
# Attack-free values that the summary speaks of
_HEADLINES = ("rdi", "fim", "boundary_acc")
# Kendall's tau from which a value went along with the attacks
_TRUSTED = 0.5


class Choice(NamedTuple):
    """The epoch that a key would have picked, and what that costs."""

    epoch: int
    cost: float
    guarded_epoch: int
    guarded_cost: float
    trust: float | None


@dataclass(frozen=True)
class RunSummary:
    """A training run in five lines: a verdict, the attack-free values, masking, what was given up, the cost.

    The verdict is about the epoch that a checkpoint kept, else the one that ``RobustModelCheckpoint`` would keep.
    """

    history: Sequence[Evaluation]
    input_space: InputSpace
    kept: Kept | None
    notes: Sequence[str]

    @classmethod
    def of(
        cls,
        history: Sequence[Evaluation],
        input_space: InputSpace | None = None,
        kept: Kept | None = None,
        notes: Sequence[str] = (),
    ) -> Self:
        """Summarise the evaluations of a run, as the monitor keeps them; distances are in units of the input space."""
        return cls(tuple(history), check_input_space(input_space), kept or kept_epoch(history), tuple(notes))

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that each part took."""
        names = dict.fromkeys(name for entry in self.history for name in entry if name.startswith("seconds/"))
        return {name.removeprefix("seconds/"): sum(own.get(name, 0.0) for own in self.history) for name in names}

    @property
    def epoch(self) -> int:
        """The epoch of the verdict; 0 if no attack ran."""
        return 0 if self.kept is None else int(self.kept.entry["epoch"])

    @property
    def accuracy(self) -> float:
        """Its accuracy under attack; 0 if no attack ran."""
        return 0.0 if self.kept is None else self.kept.accuracy

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of that accuracy."""
        return (0.0, 1.0) if self.kept is None else (self.kept.low, self.kept.high)

    @property
    def choices(self) -> dict[str, Choice]:
        """The epochs that attack-free metrics would have picked."""
        return {} if self.kept is None else _choices(self.history, self.kept.reference)

    @property
    def masked_epochs(self) -> list[int]:
        """Epochs with signs of gradient masking."""
        return list(dict.fromkeys(int(entry["epoch"]) for entry in self._checked if entry["masking"]))

    @property
    def tried(self) -> str:
        """The attacks that looked for masking; empty if none did."""
        names = dict.fromkeys(key.partition("/")[2] for own in self._checked for key in own if "adv_acc/" in key)
        attacks = ", ".join(name for name in names if name not in (WORST, FINAL))
        return f"{attacks} in {len(self._checked)} evaluations" if self._checked else ""

    @property
    def _checked(self) -> list[Evaluation]:
        return [] if self.kept is None else [entry for entry in self.history if "masking" in entry]

    def lines(self) -> list[tuple[str, str]]:
        """Return what there is to say, each with a title."""
        parts = sorted(self.seconds.items(), key=lambda part: -part[1])
        spent = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts if seconds >= 0.05)
        return [
            ("verdict", "not known, as no attack ran" if self.kept is None else self.kept.describe()),
            ("attack-free values", self._words()),
            ("gradient masking", self._masking()),
            ("notes", "; ".join(self.notes) or "none"),
            ("monitoring overhead", f"{sum(self.seconds.values()):.1f} s{f' ({spent})' if spent else ''}"),
        ]

    def table(self) -> Table:
        """Return the epochs that attack-free metrics would have picked; ``to_text()`` writes it."""
        return Table(
            "Epochs that attack-free metrics would have picked",
            ["metric", "epoch", "points lost", "guarded epoch", "points lost, guarded", "trust"],
            [
                [get_key(name).label, c.epoch, c.cost, c.guarded_epoch, c.guarded_cost, c.trust]
                for name, c in self.choices.items()
            ],
            note="Points lost: accuracy under attack below the highest. Guarded: only epochs within two points of the "
            "best clean accuracy count. Trust: Kendall's tau-b with accuracy under attack.",
        )

    def __str__(self) -> str:
        width = max(len(title) for title, _ in self.lines()) + 2
        wrap = TextWrapper(width=_WIDTH, subsequent_indent=" " * width, break_on_hyphens=False).fill
        return "\n".join(wrap(f"{title:{width}s}{text}") for title, text in self.lines())

    def _words(self) -> str:
        """Say of the headline values whether they went along with the attacks."""
        if self.kept is None:
            return "no attack to compare them with"
        choices = self.choices
        known = {get_key(name).label: choices[name] for name in _HEADLINES if name in choices}
        if not known:
            return "not measured"
        if all(choice.trust is None for choice in known.values()):
            return f"too few evaluations with attacks to judge them: {MIN_EVALUATIONS} are needed"
        words = [f"{label} {_agreement(choice)}" for label, choice in known.items()]
        if "boundary" in self.kept.entry:
            has_pixels = (self.input_space.low, self.input_space.high) == (0, 1)
            words.append(f"median distance to the boundary {write_distance(self.kept.entry['boundary'], has_pixels)}")
        return "; ".join(words)

    def _masking(self) -> str:
        if self.masked_epochs:
            return f"signs in epochs {', '.join(map(str, self.masked_epochs))}: accuracy under attack is too high"
        return f"no sign found by {self.tried}; other attacks may find more" if self.tried else "not checked"


def _choices(history: Sequence[Evaluation], reference: str) -> dict[str, Choice]:
    trust, choices = measure_trust(history), dict[str, Choice]()
    for name, key in attack_free_metrics().items():
        entries = comparable(history, name, reference)
        if key.higher_is_better is None or not entries:
            continue
        costs = [_choose(rows, name, key.higher_is_better, reference) for rows in (entries, candidates(entries))]
        choices[name] = Choice(*costs[0], *costs[1], trust[name].tau if name in trust else None)
    return choices


def _choose(entries: Sequence[Evaluation], name: str, higher_is_better: bool, reference: str) -> tuple[int, float]:
    picked, best = pick(entries, name, higher_is_better), pick(entries, reference)
    return int(picked["epoch"]), 100 * (best[reference] - picked[reference])


def _agreement(choice: Choice) -> str:
    if choice.trust is None:
        return "cannot be judged"
    words = "followed the attacks" if choice.trust >= _TRUSTED else "said little about them"
    words = "contradicted them" if choice.trust < 0 else words
    return f"{words} (tau {choice.trust:+.2f}, its epoch {choice.cost:.1f} points lower)"


def run_page(history: Sequence[Evaluation], settings: MonitorSettings, figure: "Figure", summary: RunSummary) -> Page:
    """Make the page of a training run."""
    plan = settings.plan
    samples = plan.attack_samples if summary.kept is None else int(summary.kept.entry["samples_attacks"])
    l2_budget = next((entry["l2_budget"] for entry in reversed(history) if "l2_budget" in entry), None)
    threat = ThreatModel.of(plan.attacks, plan.input_space, samples, l2_budget=l2_budget)
    names = list(dict.fromkeys(name for entry in history for name in entry))
    return Page(
        title=f"Training run, {settings.prefix}",
        verdict=run_verdict(summary, history, threat.budget),
        facts=threat.describe(),
        figures={"The run": figure} if history else {},
        tables=[table for table in _tables(history, summary, settings, names) if table.rows],
        glossary=glossary(names),
        provenance=describe_run() | {"seed": str(plan.seed)},
    )


def run_verdict(summary: RunSummary, history: Sequence[Evaluation], budget: str) -> str:
    """Say in one sentence which epoch was kept or is the most robust, and whether that can be trusted."""
    if not history:
        return "Nothing was measured: there was no validation epoch to watch."
    if summary.kept is None:
        return f"The most robust of {len(history)} evaluations is unknown, as no attack ran."
    epochs = ", ".join(map(str, summary.masked_epochs))
    if epochs:
        masking = f"signs of masked gradients in epochs {epochs}, so the true value may be lower"
    else:
        masking = "no signs of masked gradients" if summary.tried else "masked gradients were not checked"
    sentence = summary.kept.describe(budget)
    return f"{sentence[0].upper()}{sentence[1:]}; {masking}."


def _tables(
    history: Sequence[Evaluation], summary: RunSummary, settings: MonitorSettings, names: Sequence[str]
) -> list[Table]:
    return [
        summary.table(),
        *(
            _history_table(title, history, [name for name in names if _part(name) == part])
            for part, title in PARTS.items()
        ),
        Table("Time", ["part", "seconds"], [[name, value] for name, value in summary.seconds.items()], folded=True),
        Table("Settings", ["setting", "value"], list(settings.describe().items()), folded=True),
    ]


def _part(name: str) -> str:
    key = find_key(name)  # None for epoch and step
    return "" if key is None or key.role == "bookkeeping" else key.part


def _history_table(title: str, history: Sequence[Evaluation], names: Sequence[str]) -> Table:
    order = {key.name.partition("<")[0]: number for number, key in enumerate(KEYS)}
    names = sorted(names, key=lambda name: order.get(name, order.get(f"{name.partition('/')[0]}/", len(order))))
    rows = [[int(entry["epoch"]), *(entry.get(name, math.nan) for name in names)] for entry in history]
    return Table(title, ["epoch", *names], rows if names else [], folded=True)
