import math

import numpy as np
import pytest
import torch

from lightning_robustness._measurement.assisted import Assisted, assist
from lightning_robustness._measurement.rows import Rows
from lightning_robustness._measurement.verdict import kept_epoch, rival, tied, ties_of_models


def outcome(robust):
    rows = Rows(torch.arange(len(robust)), {})
    return assist(None, 0, rows, torch.as_tensor(robust))


def robust_share(share, number=256, seed=0):
    return outcome(np.random.default_rng(seed).permutation(number) < share * number)


def run(shares, clean, outcomes=None):
    """Make the history of a run, and outcomes that have these shares."""
    known = outcomes or {epoch: robust_share(share, seed=1) for epoch, share in enumerate(shares)}
    history = [
        {"epoch": epoch, "step": epoch, "acc": acc, "adv_acc/pgd": own.estimate().value, "samples_attacks": 256}
        for (epoch, own), acc in zip(known.items(), clean, strict=True)
    ]
    return history, {epoch: {"pgd": own} for epoch, own in known.items()}


def test_ties_by_holm_step_down_from_the_smallest_p_value():
    assert tied({"a": 0.01, "b": 0.02, "c": 0.04}) == []
    assert tied({"a": 0.01, "b": 0.03, "c": 0.04}) == ["b", "c"]
    assert tied({}) == []


def test_a_model_is_not_distinguishable_from_itself_but_from_a_much_weaker_one():
    models = {"a": robust_share(0.6), "b": robust_share(0.6), "c": robust_share(0.2)}
    assert ties_of_models(models, ["a", "b", "c"]) == ["b"]
    assert ties_of_models({"a": models["a"], "c": models["c"]}, ["a", "c"]) == []


def test_other_samples_are_compared_without_pairs():
    first, second = robust_share(0.6), robust_share(0.6)
    second = second._replace(positions=second.positions + 1)
    gap, low, high, p = rival(first, second)
    width = math.sqrt(2) * (first.estimate().high - first.estimate().low) / 2
    assert (gap, low, high, p) == (0, pytest.approx(-width), pytest.approx(width), 1)


def test_kept_epoch_is_that_of_the_checkpoint():
    history, outcomes = run([0.3, 0.5, 0.4], [0.7, 0.8, 0.9])
    assert kept_epoch(history, outcomes).entry["epoch"] == 1
    kept = kept_epoch(history, outcomes, ("rdi", 2))
    assert (kept.entry["epoch"], kept.is_checkpoint, kept.is_corrected) == (2, True, False)
    assert kept.accuracy == history[2]["adv_acc/pgd"]
    assert kept_epoch(history, outcomes, ("adv_acc/pgd", 1)).is_corrected


def test_ties_of_an_epoch():
    history, outcomes = run([0.1, 0.5, 0.495, 0.2], [0.7, 0.8, 0.9, 0.9])
    kept = kept_epoch(history, outcomes)
    assert (kept.entry["epoch"], [entry["epoch"] for entry in kept.ties]) == (2, [1])


def test_without_outcomes_there_are_neither_ties_nor_a_correction():
    history, outcomes = run([0.3, 0.5], [0.7, 0.8])
    del outcomes[0]
    kept = kept_epoch(history, outcomes)
    assert (kept.ties, kept.is_corrected, kept.accuracy) == ((), False, history[1]["adv_acc/pgd"])
    assert kept_epoch([{"epoch": 0, "step": 1, "rdi": 0.5}]) is None


@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_samples_of_one_half_give_no_correction(number):
    outcomes = {epoch: outcome(torch.arange(number) < epoch) for epoch in range(2)}
    kept = kept_epoch(*run(None, [0.8] * 2, outcomes))
    assert kept.entry["epoch"] == 1
    assert kept.is_corrected == (len(outcomes[0].folds.unique()) == 2)


def test_correction_removes_the_optimism_of_the_choice():
    """Of thirty epochs that are equally robust, the best looks better than it is."""
    generator, naive, corrected = np.random.default_rng(0), [], []
    for _ in range(20):
        epochs = {epoch: outcome(generator.random(256) < 0.5) for epoch in range(30)}
        history, outcomes = run(None, [0.8] * 30, epochs)
        kept = kept_epoch(history, outcomes)
        naive.append(kept.entry["adv_acc/pgd"])
        corrected.append(kept.accuracy)
    assert np.mean(naive) > 0.55
    assert np.mean(corrected) == pytest.approx(0.5, abs=0.02)


def test_outcomes_survive_json():
    margins = Rows(torch.arange(500), {"margin": torch.rand(500), "right": torch.ones(500, dtype=torch.bool)})
    assisted = assist(margins, 0, Rows(torch.arange(0, 500, 4), {}), torch.rand(125) < margins["margin"][::4])
    again = Assisted.from_plain(assisted.to_plain())
    assert again.estimate() == assisted.estimate()
    assert assisted.estimate().is_assisted
