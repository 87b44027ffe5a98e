"""Everything about a network that an attack must leave as it was."""

import copy
import random

import numpy as np
import torch
from torch import nn


def network_in_training(digits_network):
    """A network in the middle of training: gradients, a frozen parameter, a frozen batch norm, dropout."""
    network = nn.Sequential(copy.deepcopy(digits_network), nn.Dropout(0.5)).requires_grad_(True).train()
    network[0][1].eval()
    network[0][0].bias.requires_grad_(False)
    for p in network.parameters():
        p.grad = torch.randn_like(p) if p.requires_grad else None
    return network


def snapshot(network):
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    tensors = {name: t.detach().clone() for name, t in network.state_dict().items()}
    tensors |= {f"{name}.grad": p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
    flags = [p.requires_grad for p in network.parameters()], [module.training for module in network.modules()]
    return states, flags, tensors


def assert_same(first, second):
    assert first[:2] == second[:2]
    assert first[2].keys() == second[2].keys()
    assert all(torch.equal(value, second[2][name]) for name, value in first[2].items())
