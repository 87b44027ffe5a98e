import math

import pytest
import torch
from scipy.stats import binomtest

from lightning_robustness.metrics import AttackSuccessRate
from tests.metrics.tester import update_in_batches


def data(num_samples=60):
    generator = torch.Generator().manual_seed(0)
    preds, adv_preds, target = torch.randint(3, (3, num_samples), generator=generator)
    return preds, adv_preds, target, torch.rand(num_samples, generator=generator)


@pytest.mark.parametrize("batch_size", [1, 7, 60])
def test_components(batch_size):
    metric = update_in_batches(AttackSuccessRate(confidence=0.9), batch_size, *data())
    samples = list(zip(*(value.tolist() for value in data()), strict=True))
    flipped = [d for k, a, y, d in samples if k == y and a != y]
    correct = sum(k == y for k, _, y, _ in samples)
    wrong = sum(a != y for _, a, y, _ in samples)
    interval = binomtest(len(flipped), correct).proportion_ci(0.9, method="wilson")
    parts = {name: value.item() for name, value in metric.compute_components().items()}
    assert parts == pytest.approx(
        {
            "asr": len(flipped) / correct,
            "asr_low": interval.low,
            "asr_high": interval.high,
            "error_rate": wrong / 60,
            "adv_acc": 1 - wrong / 60,
            "distortion": sorted(flipped + [math.inf] * (correct - len(flipped)))[(correct - 1) // 2],
            "flipped": len(flipped),
            "correct": correct,
            "wrong": wrong,
            "count": 60,
        },
        abs=1e-6,
    )


def test_distortion_is_the_median_over_correct_samples_with_failures_as_infinite():
    metric = AttackSuccessRate()
    zeros, ones = torch.zeros(2, dtype=torch.long), torch.ones(2, dtype=torch.long)
    metric.update(zeros, ones, zeros)
    assert metric.compute_components()["distortion"].isnan()
    metric.update(zeros, ones, zeros, distortion=torch.tensor([0.5, 1.5], dtype=torch.double))
    metric.update(ones, ones, zeros, distortion=torch.tensor([0.1, 0.1]))  # wrong before the attack
    assert metric.compute_components()["distortion"] == 0.5
    metric.update(zeros, zeros, zeros, distortion=torch.tensor([0.2, 0.2]))  # not flipped
    assert metric.compute_components()["distortion"] == 1.5
    metric.update(zeros[:1], zeros[:1], zeros[:1], distortion=torch.tensor([0.2]))
    assert metric.compute_components()["distortion"].isinf()


def test_no_correct_sample_is_zero_of_zero():
    metric = AttackSuccessRate()
    metric.update(torch.tensor([1, 1]), torch.tensor([0, 1]), torch.tensor([0, 0]))
    parts = metric.compute_components()
    assert metric.compute() == 0
    assert (parts["asr"], parts["correct"], parts["error_rate"], parts["adv_acc"]) == (0, 0, 0.5, 0.5)
    assert [parts["asr_low"].item(), parts["asr_high"].item()] == pytest.approx([0, 1])


@pytest.mark.parametrize("distortion", [torch.ones(3), torch.ones(60, 1)])
def test_distortion_is_checked(distortion):
    metric = AttackSuccessRate()
    with pytest.raises(ValueError, match=r"`distortion` .*\(60,\)"):
        metric.update(*data()[:3], distortion=distortion)
    assert not metric.metric_state["rows"]
