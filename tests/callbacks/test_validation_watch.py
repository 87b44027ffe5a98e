import numpy as np
import pytest
import torch
from torch import nn

from lightning_robustness.callbacks.validation_watch import ValidationWatch
from lightning_robustness.measurement.feature_meter import FeatureMeter
from lightning_robustness.utilities.head import HeadTap
from lightning_robustness.utilities.loader_share import LoaderShare
from lightning_robustness.utilities.logits_route import find_route
from lightning_robustness.utilities.sample import SpreadSample

CPU = torch.device("cpu")


PASSES = []


class Counted(nn.Module):
    """Counts its forward passes, outside of the module, whose attributes the sandbox restores."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
        PASSES.clear()

    def forward(self, x):
        PASSES.append(len(x))
        return self.net(x)


def make_watch(model, share=None, sample=None):
    route = find_route(model, torch.rand(2, 4))
    PASSES.clear()
    return ValidationWatch(model, model, route, FeatureMeter(3, "exact", CPU), share or LoaderShare(None), sample)


def batches(number=3):
    generator = torch.Generator().manual_seed(1)
    return [(torch.rand(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(number)]


def measured(model, data):
    meter = FeatureMeter(3, "exact", CPU)
    for x, y in data:
        meter.update(HeadTap(model, "net.2").run(model, x), y)
    return meter.compute()


def test_features_come_from_the_passes_of_others():
    model, data = Counted(), batches()
    watch = make_watch(model)
    for x, y in data:
        watch.before(x, y)
        model(x)
        assert not watch.after()
    assert len(PASSES) == 3
    assert watch.meter.compute() == pytest.approx(measured(model, data))
    watch.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_batch_that_nobody_runs_gets_a_pass():
    model, data = Counted(), batches()
    watch = make_watch(model)
    for x, y in data:
        watch.before(x, y)
        assert watch.after()
    assert len(PASSES) == 3
    assert watch.meter.compute() == pytest.approx(measured(model, data))


def test_repeated_samples_do_not_count():
    model, data, sample = Counted(), batches(2), SpreadSample(100, 31)
    watch = make_watch(model, LoaderShare(total=31, num_replicas=2, rank=1), sample)
    for x, y in data:
        watch.before(x, y)
        model(x)
        watch.after()
    assert watch.meter.compute()["samples"] == 15  # 1, 3, ..., 29; the sampler repeats a sample as number 31
    assert np.array_equal(sample.indices, np.arange(1, 31, 2))


def test_divergence():
    model, ((x, y), *_) = Counted(), batches()
    watch = make_watch(model)
    watch.before(torch.full_like(x, torch.nan), y)
    model(torch.full_like(x, torch.nan))
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        watch.after()
    assert not watch.after()
