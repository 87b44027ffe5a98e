"""Dense matrices to compare with, one sample at a time."""

import math

import numpy as np
import torch


def jacobian(model, x, create_graph=False):
    """Jacobian of the logits of each sample, shape ``(N, K, n)``."""
    dense = torch.autograd.functional.jacobian
    return torch.stack([dense(lambda t: model(t[None])[0], sample, create_graph) for sample in x]).flatten(2)


def information(model, x):
    """Fisher information G of each sample in float64, shape ``(N, n, n)``."""
    return information_of(jacobian(model, x), model(x).detach())


def information_of(jacobian, logits):
    p, J = logits.double().softmax(dim=1), jacobian.double()  # noqa: N806
    return J.mT @ (torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)) @ J


def largest_eigenvalue(model, x):
    return torch.linalg.eigvalsh(information(model, x))[:, -1]


def layer_norm(layer, shape):
    """Largest singular value of the matrix whose columns are the images of the unit vectors."""
    units = torch.eye(math.prod(shape), dtype=torch.double).reshape(-1, *shape)
    matrix = (layer(units) - layer(torch.zeros(1, *shape, dtype=torch.double))).flatten(1)
    return np.linalg.svd(matrix.detach().numpy(), compute_uv=False)[0]


def matrix_norm(weight):
    return torch.linalg.matrix_norm(weight.double(), ord=2).item()


def jacobian_norm(function, x):
    """Spectral norm of the Jacobian at a single input."""
    jacobian = torch.autograd.functional.jacobian(function, x)
    return matrix_norm(jacobian.reshape(-1, x.numel()))
