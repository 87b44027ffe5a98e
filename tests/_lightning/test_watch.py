import numpy as np
import pytest
import torch
from torch import nn

from lightning_robustness._lightning.watch import Watch
from lightning_robustness._measurement.feature_pass import FeaturePass
from lightning_robustness._measurement.samples import FixedSample, LoaderShare
from lightning_robustness._model.batch import Batch
from lightning_robustness._model.head import HeadTap
from lightning_robustness._model.route import find_route
from lightning_robustness._processes import Processes
from tests._measurement.subjects import CPU, subject

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


def make_watch(model, share=None, sample=None, **options):
    route = find_route(model, torch.rand(2, 4))
    PASSES.clear()
    return Watch(subject(model), route, FeaturePass(3, "exact", CPU), share or LoaderShare(None), sample, **options)


def batches(number=3):
    generator = torch.Generator().manual_seed(1)
    return [
        Batch(torch.rand(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(number)
    ]


def measured(model, data):
    features = FeaturePass(3, "exact", CPU)
    for number, batch in enumerate(data):
        batch = batch._replace(positions=8 * number + torch.arange(8))
        features.add(batch, HeadTap(model, "net.2").run(model, batch.x))
    return features.compute(Processes())


def assert_equal(watch, expected):
    found = watch.features.compute(Processes())
    assert found.values == pytest.approx(expected.values)
    assert torch.equal(found.margins.positions, expected.margins.positions)
    torch.testing.assert_close(found.margins["margin"], expected.margins["margin"])


def test_features_come_from_the_passes_of_others():
    model, data = Counted(), batches()
    watch = make_watch(model)
    for batch in data:
        watch.before(batch)
        model(batch.x)
        assert not watch.after()
    assert len(PASSES) == 3
    assert_equal(watch, measured(model, data))
    watch.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_batch_that_nobody_runs_gets_a_pass():
    model, data = Counted(), batches()
    watch = make_watch(model)
    for batch in data:
        watch.before(batch)
        assert watch.after()
    assert len(PASSES) == 3
    assert_equal(watch, measured(model, data))


def test_repeated_samples_do_not_count():
    model, data, sample = Counted(), batches(2), FixedSample(100, 31)
    watch = make_watch(model, LoaderShare(total=31, num_replicas=2, rank=1), sample)
    for batch in data:
        watch.before(batch)
        model(batch.x)
        watch.after()
    # 1, 3, ..., 29; the sampler repeats a sample as number 31
    assert watch.features.compute(Processes()).values["samples"] == 15
    assert np.array_equal(sample.positions, np.arange(1, 31, 2))


def test_divergence():
    model, (batch, *_) = Counted(), batches()
    watch = make_watch(model)
    batch = batch._replace(x=torch.full_like(batch.x, torch.nan))
    watch.before(batch)
    model(batch.x)
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        watch.after()
    assert not watch.after()


def test_a_process_that_does_not_count_takes_part_without_samples():
    model, (batch, *_), sample = Counted(), batches(), FixedSample(100, 0)
    watch = make_watch(model, LoaderShare(0, num_replicas=2), sample)
    watch.before(batch)
    model(batch.x)
    watch.after()
    found = watch.features.compute(Processes())
    assert (found.values["samples"], len(found.margins), len(sample.positions)) == (0, 0, 0)


def test_without_passes_of_its_own_a_batch_that_nobody_runs_is_an_error():
    batch, *_ = batches()
    watch = make_watch(Counted(), has_passes=False)
    watch.before(batch)
    with pytest.raises(ValueError, match="`validation_step` to run the network on the unchanged inputs of its batch"):
        watch.after()
