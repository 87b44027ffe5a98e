import math

import torch

from lightning_robustness.attacks import PGD, run
from lightning_robustness.measurement.attack_outcome import AttackOutcome, worst_case


def outcome(adv_preds, l2, linf=None, l2_budget=math.inf):
    """Samples of class 0 that are right before the attack."""
    adv_preds, l2 = torch.tensor(adv_preds), torch.tensor(l2)
    zeros, yes = torch.zeros_like(adv_preds), torch.ones_like(adv_preds, dtype=torch.bool)
    return AttackOutcome(
        y=zeros,
        preds=zeros,
        adv_preds=adv_preds,
        eligible=yes,
        success=adv_preds != 0,
        l2=l2,
        l2_budget=torch.full_like(l2, l2_budget),
        linf=l2 if linf is None else torch.tensor(linf),
        queries=zeros,
        tells_gradients=yes,
        zero_gradients=~yes,
        probabilities=~yes,
        deterministic=yes,
    )


def test_batches_are_those_of_run_in_a_row():
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 3), torch.rand(7, 4)
    y = model(x).argmax(dim=1)
    results = [run(model, PGD(eps=0.3), rows, labels) for rows, labels in zip(x.split(3), y.split(3), strict=True)]
    parts = [AttackOutcome.of(result, labels) for result, labels in zip(results, y.split(3), strict=True)]
    whole = AttackOutcome.concatenate([AttackOutcome.empty(x.device), *parts])
    for name in ("preds", "adv_preds", "eligible", "success", "queries", "zero_gradients"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(result, name) for result in results])), name
    torch.testing.assert_close(whole.l2, torch.cat([result.l2 for result in results]).double())
    assert torch.equal(whole.y, y)
    assert whole.tells_gradients.all()
    assert whole.deterministic.all()
    assert not whole.probabilities.any()
    assert all(torch.equal(part, other) for part, other in zip(whole.gather(), whole, strict=True))


def test_the_worst_case_is_the_closest_success():
    near, far = outcome([1, 0, 0, 2], [0.2, 0.1, 0.4, 0.3]), outcome([2, 0, 1, 1], [0.1, 0.3, 0.5, 0.4])
    worst = worst_case({"near": near, "far": far}, {"near": [("linf", 0.5)], "far": [("linf", 0.5)]})
    assert worst.adv_preds.tolist() == [2, 0, 1, 2]
    torch.testing.assert_close(worst.l2, torch.tensor([0.1, 0.1, 0.5, 0.3]))


def test_success_counts_within_the_l2_budget():
    found = outcome([1, 2, 1, 0], [0.25, 0.3, 0.5, 0.0], l2_budget=0.3)
    counted = found.counted()
    assert counted.success.tolist() == [True, True, False, False]
    assert counted.adv_preds.tolist() == [1, 2, 0, 0]
    assert torch.equal(counted.l2, found.l2)
    # Beside attacks with a budget, theirs counts; without any, the l2 budget
    failed, budgets = outcome([0] * 4, [0.1] * 4), {"failed": [("linf", 0.5)], "found": [None]}
    worst = worst_case({"failed": failed, "found": found}, budgets)
    assert worst.success.tolist() == worst.counted().success.tolist() == [True, True, True, False]
    assert worst_case({"found": found}, {"found": [None]}).success.tolist() == [True, True, False, False]


def test_attacks_without_a_budget_count_within_that_of_others():
    bounded, free = outcome([0, 0, 0], [0.1, 0.1, 0.1]), outcome([1, 1, 1], [0.2, 0.4, 0.9], [0.1, 0.3, 0.2])
    outcomes = {"bounded": bounded, "free": free}
    assert worst_case(outcomes, {"bounded": [("linf", 0.2)], "free": [None]}).success.tolist() == [True, False, True]
    assert worst_case(outcomes, {"bounded": [("l2", 0.5)], "free": [None]}).success.tolist() == [True, True, False]
    mixed = {"bounded": [("l2", 0.5)], "free": [("linf", 0.1), ("l2", 0.2)]}  # a cascade of two norms has budgets too
    assert worst_case(outcomes, mixed).success.tolist() == [True, True, True]
    assert worst_case(outcomes, {"bounded": [None], "free": [None]}).success.tolist() == [True, True, True]
