"""Helpers for the tests of the head and of the route to the logits, for networks of the zoo."""

import torch

from lightning_robustness._model.head import HeadTap
from lightning_robustness._model.route import find_route
from tests import zoo


def inputs(number=5, dtype=torch.float32, shape=(1, 2, 4), seed=0):
    return torch.rand(number, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double).to(dtype)


def inputs_of(network, number=5):
    """Inputs of a network of the zoo."""
    if isinstance(network, zoo.Tokens):
        return torch.randint(20, (number, *network.shape), generator=torch.Generator().manual_seed(0))
    return inputs(number, next(network.parameters()).dtype, network.shape)


def count_hooks(network):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in network.modules())


def expected_call(network, x):
    """What enters the head, and what the network returns."""
    with torch.no_grad():
        return (network.pooled(x) if network.has_embedding else None), network.read(network(x))


def find_head(network, x, forward=None, head=None):
    return find_route(network, x, forward, head).head


def tap_of(network, x):
    route = find_route(network, x)
    return HeadTap(network, route.head, route.sources, route.entry)


def assert_call(call, expected, **tolerance):
    torch.testing.assert_close(tuple(call), tuple(expected), **tolerance)
