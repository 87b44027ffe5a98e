"""The one table of all values that the monitor and ``evaluate`` produce; reports, charts and docs are made from it."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

# Parts of a measurement, and the titles of their tables on the page of a run; the others have none
PARTS = {
    "attacks": "Attacks, by epoch",
    "features": "RDI, ROBY and accuracy, by epoch",
    "fim": "Fisher information and distance to the boundary, by epoch",
    "clever": "CLEVER, by epoch",
}
# Ends of the groups in which values are logged, and what names of values in them start with
GROUPS = {"": "", "_details": "", "_trust": "trust/"}
# Charts that a board opens with, by the family of a value, and the name of the line unless it is the attack's name
_COMBINED: dict[str, tuple[str, str | None]] = {
    "acc": ("1 accuracy", "clean"),
    "adv_acc": ("1 accuracy", None),
    "asr": ("2 success rate", None),
    **{name: ("3 RDI, ROBY, Fisher", name) for name in ("rdi", "roby", "fim")},
}
Role = Literal["metric", "context", "warning", "bookkeeping"]


@dataclass(frozen=True)
class Key:
    """One measured value, or a family of values such as ``asr/<attack>``."""

    name: str
    part: str
    label: str
    unit: str
    higher_is_better: bool | None
    chart: str | None
    glossary: str
    role: Role = "metric"
    is_detail: bool = False

    @property
    def direction(self) -> str:
        """``"higher"`` or ``"lower"``, whichever is more robust; empty if neither is."""
        return {True: "higher", False: "lower", None: ""}[self.higher_is_better]

    @property
    def axis_label(self) -> str:
        """Label with the direction that is more robust."""
        return f"{self.label} ({self.direction} is more robust)" if self.direction else self.label

    @property
    def group(self) -> str:
        """End of the group that it is logged in: none for what ranks or warns; other groups sort after it."""
        if self.part == "trust":
            return "_trust"
        return "_details" if self.is_detail or self.role == "bookkeeping" else ""


class Chart(NamedTuple):
    """A chart of one or more values; all lines of a run have the same colour in TensorBoard."""

    title: str
    names: list[str]
    group: str = "other values"


# fmt: off
# First line: name, part, label, unit, whether higher is more robust, chart; second line: glossary, role
KEYS: tuple[Key, ...] = (
    Key("rdi", "features", "RDI", "", True, "RDI",
        "RDI of the logits: distance between the classes compared with their spread, from -1 to 1"),
    Key("rdi_intra", "features", "RDI, spread", "logits", None, None,
        "spread of the classes in `rdi`", "context", is_detail=True),
    Key("rdi_inter", "features", "RDI, distance", "logits", None, None,
        "distance between the classes in `rdi`", "context", is_detail=True),
    Key("rdi_embedding", "features", "RDI of the embedding", "", True, None,
        "RDI of the embedding; `rdi` follows robustness more closely", is_detail=True),
    Key("roby", "features", "ROBY", "", False, "ROBY",
        "ROBY: overlap of the classes in the embedding, from 0 to 1"),
    Key("fsa", "features", "FSA", "", True, None,
        "compactness of the classes in ROBY", is_detail=True),
    Key("fsd", "features", "FSD", "", True, None,
        "distance between the classes in ROBY", is_detail=True),
    Key("acc", "features", "accuracy", "share", None, "Clean accuracy",
        "clean accuracy, if there are labels", "context"),
    Key("fim", "fim", "Fisher information", "1/input²", False, "Fisher information",
        "mean spectral norm of the Fisher information of the input"),
    Key("fim_geometric", "fim", "Fisher, geometric mean", "1/input²", None, None,
        "geometric mean of these norms; depends on confidence, so it does not rank models", is_detail=True),
    Key("fim_inverse", "fim", "Fisher, inverse", "input²", None, None,
        "mean inverse of these norms, the Fisher paper's score; saturated samples dominate it"),
    Key("lipschitz", "fim", "Lipschitz constant", "1/input", False, None,
        "mean local Lipschitz constant of the probabilities, if the Jacobian is exact (few classes)", is_detail=True),
    Key("boundary", "fim", "distance to the boundary", "input", True, "Distance to the boundary",
        "median distance to the decision boundary, to first order; too high if gradients are masked"),
    Key("boundary_acc", "fim", "robust accuracy to first order", "share", True, "Robust accuracy to first order",
        "share of samples that are right and farther than eps from the boundary, estimated for all samples; too high "
        "if gradients are masked"),
    Key("clever", "clever", "CLEVER", "input, l2", True, "CLEVER",
        "mean CLEVER score: estimated size below which no perturbation changes the prediction"),
    Key("adv_acc/<attack>", "attacks", "accuracy under the <attack> attack", "share", True,
        "Accuracy under the <attack> attack, 95 % interval",
        "robust accuracy: share of all samples that are correct under the attack, estimated from the attacked ones and "
        "the margins of all"),
    Key("asr/<attack>", "attacks", "success rate of the <attack> attack", "share", False, None,
        "attack success rate: share of the correctly classified samples that the attack breaks; the RDI paper's ASR, "
        "errors over all samples, is 1 - `adv_acc`"),
    Key("distortion/<attack>", "attacks", "distortion of the <attack> attack", "input, l2", True,
        "Distortion of the <attack> attack",
        "median size of the perturbation over all correct samples, failures counting as infinite; absent if most fail"),
    Key("masking", "attacks", "gradient masking", "0 or 1", None, None,
        "1 if there is a sign of gradient masking: success rates are then too low", "warning"),
    Key("trust/<key>", "trust", "trust in <key>", "-1 to 1", None, "Trust",
        "Kendall's tau-b of `<key>` with accuracy under attack over this run: 1 if they rank all epochs alike",
        "context"),
    Key("skipped", "run", "skipped", "0 or 1", None, None,
        "1 if the epoch is left out, for example because of NaN", "bookkeeping"),
    Key("adv_acc_low/<attack>", "attacks", "lower end, accuracy under the <attack> attack", "share", None, None,
        "lower end of the 95 % confidence interval of `adv_acc/<attack>`", "bookkeeping"),
    Key("adv_acc_high/<attack>", "attacks", "upper end, accuracy under the <attack> attack", "share", None, None,
        "upper end of that interval; `asr/<attack>` has the interval 1 - interval / `acc`", "bookkeeping"),
    Key("adv_acc_plain/<attack>", "attacks", "plain share, accuracy under the <attack> attack", "share", None, None,
        "share of the attacked samples that are correct under the attack, which per-sample tables average to",
        "bookkeeping"),
    Key("boundary_acc_low", "fim", "lower end, robust accuracy to first order", "share", None, None,
        "lower end of the 95 % confidence interval of `boundary_acc`", "bookkeeping"),
    Key("boundary_acc_high", "fim", "upper end, robust accuracy to first order", "share", None, None,
        "upper end of that interval", "bookkeeping"),
    Key("boundary_acc_plain", "fim", "plain share, robust accuracy to first order", "share", None, None,
        "share of the samples of `fim` that are right and farther than eps from the boundary", "bookkeeping"),
    Key("samples", "features", "samples", "samples", None, None,
        "number of samples behind RDI and ROBY", "bookkeeping"),
    Key("samples_fim", "fim", "samples, Fisher", "samples", None, None,
        "number of samples behind `fim`", "bookkeeping"),
    Key("samples_clever", "clever", "samples, CLEVER", "samples", None, None,
        "number of samples behind `clever`", "bookkeeping"),
    Key("l2_budget", "attacks", "l2 budget", "input, l2", None, None,
        "l2 size within which success of attacks without a budget of their own, such as C&W, counts", "bookkeeping"),
    Key("samples_attacks", "attacks", "samples, attacks", "samples", None, None,
        "number of attacked samples", "bookkeeping"),
    Key("seconds/<part>", "run", "time, <part>", "s", None, None,
        "time spent on a part, on an attack or on the figures", "bookkeeping"),
)
# fmt: on


def get_key(name: str) -> Key:
    """Return the table entry of a value, with the placeholder of a family filled in."""
    key = find_key(name)
    if key is None:
        raise ValueError(f"Expected one of {', '.join(key.name for key in KEYS)} but got {name!r}.")
    return key


def find_key(name: str) -> Key | None:
    """Return the table entry of a value as ``get_key`` does, None if there is none."""
    for key in KEYS:
        family, placeholder = _split(key.name)
        if name == key.name and not placeholder:
            return key
        if placeholder and name.startswith(family) and name != family:
            member = name.removeprefix(family)
            label, chart = (text and text.replace(f"<{placeholder}>", member) for text in (key.label, key.chart))
            return replace(key, name=name, label=label or "", chart=chart)
    return None


def attack_free_metrics() -> dict[str, Key]:
    """Return the metrics that need no attack, by name."""
    return {key.name: key for key in KEYS if key.role == "metric" and key.part != "attacks"}


def logged_keys(parts: Collection[str], attacks: Sequence[str]) -> list[str]:
    """Return the names of the metrics, and of the values that help to read them, which a measurement produces."""
    measured = _produced(parts, attacks)
    ranked = [key.name for key in measured if key.name in attack_free_metrics() and key.direction]
    members = {"": [""], "attack": [*attacks, "worst"], "key": ranked}
    families = [_split(key.name) for key in measured if key.role in ("metric", "context")]
    return [family + member for family, placeholder in families for member in members[placeholder]]


def tag(prefix: str, name: str) -> str:
    """Return the tag under which a value, or a family of values, is logged."""
    return f"{prefix}{get_key(name).group}/{name.removeprefix('trust/')}"


def name_of(prefix: str, text: str) -> str | None:
    """Return the name of the value of the table that is logged under this tag; None if there is none."""
    for group, start in GROUPS.items():
        name = start + text.removeprefix(f"{prefix}{group}/")
        if find_key(name) is not None and tag(prefix, name) == text:
            return name
    return None


def charts(
    parts: Collection[str], attacks: Sequence[str], unbounded: Collection[str] = (), has_details: bool = True
) -> list[Chart]:
    """Return the charts of a measurement, attacks first; details are intervals and trust."""
    accuracies = ["worst", *attacks] if len(attacks) > 1 else ["worst"] if attacks else []
    successes = [f"asr/{name}" for name in attacks]
    shown = [Chart(f"Success rate: {', '.join(attacks)}", successes, group="success of attacks")] if attacks else []
    ends = ("", "_low", "_high") if has_details else ("",)
    for name in accuracies:
        shown.append(_chart([f"adv_acc{end}/{name}" for end in ends], "accuracy under attack"))
    shown += [_chart([key.name]) for key in _produced(parts, ()) if key.chart and "<" not in key.name]
    shown += [_chart([f"distortion/{name}"]) for name in attacks if name in unbounded]
    trusted = {f"trust/{name}" for name in ("rdi", "boundary_acc") if has_details}
    names = [name for name in logged_keys(parts, attacks) if name in trusted]
    return [*shown, _chart(names)] if names else shown


def combined_charts(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the charts that a board opens with: by title, and then the name of each line, the name of its value.

    Example:
        >>> from lightning_robustness._measurement.keys import combined_charts
        >>> combined_charts(["acc", "rdi", "adv_acc/pgd"])
        {'1 accuracy': {'clean': 'acc', 'pgd': 'adv_acc/pgd'}, '3 RDI, ROBY, Fisher': {'rdi': 'rdi'}}

    """
    found: dict[str, dict[str, str]] = {}
    for name in names:
        family, _, member = name.partition("/")
        title, line = _COMBINED.get(family, ("", None))
        if title:
            found.setdefault(title, {})[line or member] = name
    return dict(sorted(found.items()))


def _split(name: str) -> tuple[str, str]:
    """Split a family into what all its names start with and its placeholder, which is empty for a single value."""
    family, _, placeholder = name.partition("<")
    return family, placeholder.removesuffix(">")


def _chart(names: list[str], group: str = "other values") -> Chart:
    return Chart(get_key(names[0]).chart or "", names, group)


def _produced(parts: Collection[str], attacks: Sequence[str]) -> list[Key]:
    produced = {*parts, "run", *(["attacks"] if attacks else [])}
    return [key for key in KEYS if key.part in produced]
