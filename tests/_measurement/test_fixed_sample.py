import numpy as np
import torch

from lightning_robustness._measurement.fixed_sample import FixedSample
from lightning_robustness._measurement.samples import SpreadSample, spread_indices


def collected(size, total, labelled=True):
    sample, rows = SpreadSample(size, total), torch.arange(total)
    for part in rows.split(7):
        sample.add(part.numpy(), part.unsqueeze(1).float(), part % 3 if labelled else None)
    return sample


def test_samples_are_those_of_their_positions():
    sample = FixedSample(collected(10, 100))
    assert sample.samples.positions.tolist() == spread_indices(10, 100).tolist()
    for samples in (sample.samples, sample.take(4)):
        assert torch.equal(samples.x.flatten().long(), samples.positions)
        assert torch.equal(samples.y, samples.positions % 3)
    assert len(sample.take(4).x) == 4
    assert set(sample.take(4).positions.tolist()) < set(sample.samples.positions.tolist())


def test_each_process_gives_a_part():
    assert len(FixedSample(collected(10, 100), num_parts=3).take(10).x) == 4


def test_without_labels_and_without_samples():
    assert FixedSample(collected(10, 100, labelled=False)).take(3).y is None
    nothing = FixedSample(SpreadSample(0, None)).take(5)
    assert (len(nothing.x), nothing.labels().tolist(), nothing.positions.tolist()) == (0, [], [])
    assert np.prod(nothing.x.shape) == 0
