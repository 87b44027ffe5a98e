"""Attacks of all kinds, with small budgets and few steps, and a network that they must leave as it was."""

import copy
import random

import foolbox
import numpy as np
import torch
from torch import nn

from lightning_robustness.attacks import CW, DDN, PGD, Cascade, MinimumNormCW, Square, get_attack

BUILT_IN = {
    "pgd": PGD(eps=0.1, steps=3),
    "pgd_l2": PGD(eps=1.0, steps=3, norm="l2", restarts=2),
    "mifgsm": get_attack("mifgsm", eps=0.1, steps=3),
    "cw": CW(steps=5, lr=0.05, binary_search_steps=2),
    "minimum_norm_cw": MinimumNormCW(steps=5, lr=0.05, binary_search_steps=2, initial_steps=5),
    "ddn": DDN(steps=5),
    "square": Square(eps=0.1, num_queries=5),
    "square_l2": Square(eps=1.0, num_queries=5, norm="l2"),
    "cascade": Cascade(attacks=(PGD(eps=0.1, steps=3), Square(eps=0.1, num_queries=5))),
}


def foolbox_fgsm(model, x, y):
    return foolbox.attacks.FGSM()(foolbox.PyTorchModel(model, bounds=(0, 1), device=x.device), x, y, epsilons=0.1)[1]


def careless(model, x, y):
    """Does to the model and to random states what it should not."""
    model.train()
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    for p in model.parameters():
        p.requires_grad_(True)
    nn.functional.cross_entropy(model(x), y).backward()
    return x


def failing(model, x, y):
    careless(model, x, y)
    raise RuntimeError("in the middle of it")


FOREIGN = {
    "torchattacks:Square": get_attack("torchattacks:Square", eps=0.1, n_queries=5),
    "torchattacks:APGD": get_attack("torchattacks:APGD", eps=0.1, steps=3),
    "torchattacks:CW": get_attack("torchattacks:CW", steps=3),
    "torchattacks:PGD": get_attack("torchattacks:PGD", eps=0.1, steps=3),
    "foolbox": foolbox_fgsm,
    "careless": careless,
    "failing": failing,
}


def network_in_training(digits_network):
    """A network in the middle of training: gradients, a frozen parameter, a frozen batch norm, dropout."""
    network = nn.Sequential(copy.deepcopy(digits_network), nn.Dropout(0.5)).requires_grad_(True).train()
    network[0][1].eval()
    network[0][0].bias.requires_grad_(False)
    for p in network.parameters():
        p.grad = torch.randn_like(p) if p.requires_grad else None
    return network
