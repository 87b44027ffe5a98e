import re
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_robustness import RobustnessMonitor
from lightning_robustness._measurement import keys
from lightning_robustness._measurement.keys import (
    KEYS,
    Chart,
    Key,
    attack_free_metrics,
    charts,
    get_key,
    logged_keys,
    name_of,
    tag,
)
from lightning_robustness.evaluation import evaluate

ROOT = Path(__file__).parents[2]
FEATURES = ["rdi", "rdi_intra", "rdi_inter", "rdi_embedding", "roby", "fsa", "fsd", "acc"]
FISHER = ["fim", "fim_geometric", "fim_inverse", "lipschitz", "boundary", "boundary_acc"]
NEW = Key("sharpness", "fim", "sharpness", "input", True, "Sharpness", "median sharpness")


def markdown_table(table):
    """The table in the docs."""
    rows = [(f"`{tag('robustness', k.name)}`", k.glossary, k.unit, k.direction, k.part) for k in table]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(["| key | value | unit | more robust | part |", "|---|---|---|---|---|", *lines])


@pytest.mark.parametrize(
    ("page", "table"),
    [("docs/monitor.md", KEYS), ("README.md", [key for key in KEYS if key.higher_is_better is not None])],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_docs_have_the_table(page, table):
    expected = markdown_table(table)
    (shown,) = re.findall(r"(?:^\| key \|.*\n)(?:^\|.*\n)*", (ROOT / page).read_text(), flags=re.MULTILINE)
    assert shown.rstrip() == expected, f"Replace the table of keys in {page} by:\n{expected}"


def test_names_are_unique_and_families_have_one_placeholder():
    assert len({key.name for key in KEYS}) == len(KEYS)
    for key in KEYS:
        placeholders = re.findall(r"<(\w+)>", key.name)
        assert placeholders == re.findall(r"<(\w+)>", key.label)
        assert placeholders in ([], ["attack"], ["part"], ["key"])
        assert key.name.endswith(">") == bool(placeholders)


def test_every_measured_value_is_in_the_table(digits, digits_network):
    loader, sizes = [(digits[0][:40], digits[1][:40])], {"fim_samples": 8, "attack_samples": 8, "clever_samples": 1}
    metrics = evaluate(digits_network, loader, ["fgsm"], eps=0.3, clever_radius=0.1, progress=False, **sizes).metrics
    entries = {name: get_key(name) for name in metrics}
    assert {name for name, key in entries.items() if key.role in ("metric", "context")} == set(
        logged_keys(["features", "fim", "clever"], ["fgsm"])
    )
    assert {key.part for key in entries.values()} == {"features", "fim", "clever", "attacks", "run"}


@pytest.mark.parametrize(("name", "word"), [("distortion/cw", "higher"), ("lipschitz", "lower"), ("trust/rdi", "")])
def test_directions(name, word):
    """The table in the docs has all of them."""
    key = get_key(name)
    assert key.direction == word
    assert key.axis_label == (f"{key.label} ({word} is more robust)" if word else key.label)


def test_family_takes_the_name_of_the_attack():
    key = get_key("asr/deep/fool")
    assert (key.name, key.label) == ("asr/deep/fool", "success rate of the deep/fool attack")
    assert replace(key, name="asr/<attack>", label="success rate of the <attack> attack") in KEYS


@pytest.mark.parametrize("name", ["rdi2", "asr", "asr/", "asr_low/pgd", ""])
def test_unknown_names(name):
    with pytest.raises(ValueError, match=f"rdi, .*seconds/<part> .*'{name}'"):
        get_key(name)


def test_attack_free_metrics():
    expected = ["rdi", "rdi_embedding", "roby", "fsa", "fsd", *FISHER, "clever"]
    assert {name: key.name for name, key in attack_free_metrics().items()} == {name: name for name in expected}


def test_logged_keys():
    attacked = [f"{kind}/{name}" for kind in ("adv_acc", "asr", "distortion") for name in ("pgd", "cw", "worst")]
    assert logged_keys(["features", "fim"], ["pgd", "cw"]) == [*FEATURES, *FISHER, *attacked]
    assert logged_keys(["features"], []) == FEATURES
    assert logged_keys(["clever"], []) == ["clever"]


def test_monitor_has_the_keys_of_its_parts():
    assert RobustnessMonitor(attacks=(), fim_samples=0, prefix="r").keys == [tag("r", name) for name in FEATURES]
    monitor = RobustnessMonitor(attacks=("pgd",))
    assert monitor.keys == [tag("robustness", name) for name in logged_keys(["features", "fim", "trust"], ["pgd"])]
    assert "robustness_trust/rdi" in monitor.keys
    assert "robustness_trust/acc" not in monitor.keys


def test_one_entry_is_enough_for_a_new_value(monkeypatch):
    monkeypatch.setattr(keys, "KEYS", (*KEYS, NEW))
    trusted = [
        "rdi",
        "rdi_embedding",
        "roby",
        "fsa",
        "fsd",
        "fim",
        "lipschitz",
        "boundary",
        "boundary_acc",
        "sharpness",
    ]
    trust = [f"trust/{name}" for name in trusted]
    assert logged_keys(["features", "fim", "trust"], []) == [*FEATURES, *FISHER, *trust, "sharpness"]
    assert Chart("Sharpness", ["sharpness"]) in charts(["features", "fim", "trust"], ["pgd"])
    assert get_key("trust/rdi").label == "trust in rdi"
    assert attack_free_metrics()["sharpness"] == NEW
    assert (
        "| `robustness/sharpness` | median sharpness | input | higher | fim |" in markdown_table(keys.KEYS).splitlines()
    )


def interval_chart(name):
    names = [f"adv_acc/{name}", f"adv_acc_low/{name}", f"adv_acc_high/{name}"]
    return Chart(f"Accuracy under the {name} attack, 95 % interval", names, "accuracy under attack")


def test_charts_have_the_values_of_their_parts():
    assert charts(["features", "fim", "trust"], ["cw", "pgd", "square"], unbounded=["cw"]) == [
        Chart("Success rate: cw, pgd, square", ["asr/cw", "asr/pgd", "asr/square"], group="success of attacks"),
        *(interval_chart(name) for name in ("worst", "cw", "pgd", "square")),
        Chart("RDI", ["rdi"]),
        Chart("ROBY", ["roby"]),
        Chart("Clean accuracy", ["acc"]),
        Chart("Fisher information", ["fim"]),
        Chart("Distance to the boundary", ["boundary"]),
        Chart("Robust accuracy to first order", ["boundary_acc"]),
        Chart("Distortion of the cw attack", ["distortion/cw"]),
        Chart("Trust", ["trust/rdi", "trust/boundary_acc"]),
    ]
    assert charts(["clever"], []) == [Chart("CLEVER", ["clever"])]


def test_one_attack_has_one_accuracy():
    success = Chart("Success rate: pgd", ["asr/pgd"], group="success of attacks")
    assert charts([], ["pgd"]) == [success, interval_chart("worst")]


@pytest.mark.parametrize("name", [re.sub("<.*>", "pgd", key.name) for key in KEYS])
def test_a_value_is_found_by_its_tag(name):
    """The table in the docs says which group each is in."""
    own, headline = tag("a/b", name), f"a/b/{name}"
    assert name_of("a/b", own) == name
    assert name_of("b", own) is None
    assert name_of("a/b", headline) == (name if own == headline else None)


def test_tags_are_in_the_table():
    with pytest.raises(ValueError, match=r"Expected one of rdi, .* but got 'loss'"):
        tag("r", "loss")
    assert name_of("r", "s/rdi") is name_of("r", "r_details/rdi") is None
