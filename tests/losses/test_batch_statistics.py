import copy

import pytest
import torch
from torch import nn

from lightning_robustness.losses._passes import find_training_layers, held_batch_statistics

LAYERS = {
    "1d": (nn.BatchNorm1d(3), (6, 3)),
    "signals": (nn.BatchNorm1d(3), (6, 3, 5)),
    "images": (nn.BatchNorm2d(3), (6, 3, 4, 4)),
    "volumes": (nn.BatchNorm3d(3), (6, 3, 2, 2, 2)),
    "without weights": (nn.BatchNorm2d(3, affine=False), (6, 3, 4, 4)),
    "large eps": (nn.BatchNorm2d(3, eps=0.5), (6, 3, 4, 4)),
}


def changed(layer):
    layer = copy.deepcopy(layer)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


@pytest.mark.parametrize(("layer", "shape"), LAYERS.values(), ids=LAYERS.keys())
def test_output_of_train_mode(layer, shape):
    layer, x = changed(layer), 2 * torch.randn(shape) + 3
    expected = layer.train()(x)
    layer.eval()
    with held_batch_statistics([layer], lambda: layer(x)):
        torch.testing.assert_close(layer(x), expected)
    assert not torch.allclose(layer(x), expected)  # the hook is gone


def test_samples_are_by_themselves():
    layer, x = changed(nn.BatchNorm1d(3)).eval(), torch.randn(6, 3)
    moved = torch.cat([x[:1] + 1, x[1:]])
    with held_batch_statistics([layer], lambda: layer(x)):
        y = layer(moved)
    with held_batch_statistics([layer], lambda: layer(x)):
        expected = layer(x)
    torch.testing.assert_close(y[1:], expected[1:])
    assert not torch.allclose(y[0], expected[0])


def test_a_layer_that_is_used_twice():
    layer, x = changed(nn.BatchNorm1d(3)), torch.randn(6, 3)

    def network(x):
        return layer(layer(x).square())

    expected = network(x)
    layer.eval()
    with held_batch_statistics([layer], lambda: network(x)):
        torch.testing.assert_close(network(x), expected)


def test_hooks_go_after_an_exception():
    layer = nn.BatchNorm1d(3).eval()
    with pytest.raises(ZeroDivisionError), held_batch_statistics([layer], lambda: layer(torch.randn(6, 3))):
        raise ZeroDivisionError
    assert not layer._forward_hooks


def test_layers_in_train_mode_are_found():
    network = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.BatchNorm2d(3).eval(), nn.Sequential(nn.BatchNorm3d(3)))
    assert find_training_layers(network) == [network[0], network[3][0]]
    assert find_training_layers(lambda x: network(x)) == [network[0], network[3][0]]
    assert find_training_layers(network.eval()) == []


def test_nothing_runs_without_layers():
    with held_batch_statistics([], lambda: 1 / 0):
        pass
