import pytest
import torch
from torch import nn

from lightning_robustness._measurement.samples import Samples
from lightning_robustness._model.batch import Batch
from lightning_robustness.evaluation.resume import DataFingerprint, fingerprint_weights


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def test_weights():
    expected = fingerprint_weights(network())
    assert fingerprint_weights(network()) == expected
    changes = {
        "a weight": lambda net: net[0].weight.data[1, 2].add_(1e-6),
        "a buffer": lambda net: net[1].running_mean.add_(1e-6),
        "precision": lambda net: net.double(),
        "half precision": lambda net: net.bfloat16(),
        "a name": lambda net: net.add_module("2", net._modules.pop("1")),
    }
    found = {expected}
    for change in changes.values():
        net = network()
        change(net)
        found.add(fingerprint_weights(net))
    assert len(found) == 1 + len(changes)


def test_lazy_layers_have_no_weights_yet():
    assert fingerprint_weights(nn.LazyLinear(3)) == fingerprint_weights(nn.LazyLinear(3))


def describe(shares, x, y):
    """The description of data that comes in shares, each a list of batches of positions."""
    parts = []
    for batches in shares:
        part = DataFingerprint()
        for rows in batches:
            positions = torch.tensor(rows, dtype=torch.long)
            part.add_labels(Batch(x[rows], None if y is None else y[rows], positions=positions))
            part.add_inputs(Samples(x[rows], None, positions))
        parts.append(part)
    return DataFingerprint.describe(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.long])
def test_data(dtype):
    x, y = torch.arange(12).reshape(6, 2).to(dtype), torch.tensor([0, 1, 2, 0, 1, 2])
    expected = describe([[[0, 1, 2], [3, 4, 5]]], x, y)
    assert expected["number of samples"] == "6"
    # Neither batches nor processes matter
    assert describe([[[4], [5, 3]], [], [[2, 0, 1]]], x, y) == expected
    other = describe([[[0, 1, 2], [3, 4, 5]]], x, y[[0, 1, 2, 1, 0, 2]])
    assert {name for name in expected if other[name] != expected[name]} == {"labels"}
    other = describe([[[0, 1, 2], [3, 4, 5]]], x[[0, 1, 2, 4, 3, 5]], y)
    assert {name for name in expected if other[name] != expected[name]} == {"inputs"}
    assert int(describe([[[0, 1, 2]]], x, None)["labels"], 16) == 0
