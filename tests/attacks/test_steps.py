import math

import numpy as np
import pytest
import torch

from lightning_robustness.attacks import PGD
from lightning_robustness.attacks._steps import checkpoints
from lightning_robustness.input_space import InputSpace


@pytest.mark.parametrize("steps", [1, 7, 10, 20, 40, 100, 1000])
def test_checkpoints_are_those_of_the_paper(steps):
    """Equation 2 of the paper, in exact arithmetic: in hundredths."""
    shares = [0, 22]
    while shares[-1] <= 100:
        shares.append(shares[-1] + max(shares[-1] - shares[-2] - 3, 6))
    assert checkpoints(steps) == [math.ceil(share * steps / 100) for share in shares[1:-1]]


def auto_pgd(value_and_gradient, x, eps, steps):
    """Algorithm 1 of the paper in the l-infinity norm, for one sample; after a halving, momentum starts anew."""

    def project(point):
        return np.clip(point, x - eps, x + eps)

    size, previous, point = 2 * eps, x, x
    points, values, gradients = [], [], []
    last, best_then, was_halved = 0, -np.inf, False
    for k in range(steps):
        value, gradient = value_and_gradient(point)
        points.append(point), values.append(value), gradients.append(gradient)
        if k in checkpoints(steps):
            rises = sum(values[i] > values[i - 1] for i in range(last + 1, k + 1))
            best = int(np.argmax(values))
            halve = rises < 0.75 * (k - last) or (not was_halved and values[best] <= best_then)
            if halve:
                size, point, gradient, previous = size / 2, points[best], gradients[best], points[best]
            last, best_then, was_halved = k, values[best], halve
        step = project(point + size * np.sign(gradient))
        if k > 0:
            step = project(point + 0.75 * (step - point) + 0.25 * (point - previous))
        previous, point = point, step
    return point


@pytest.mark.parametrize("steps", [3, 10, 25, 60])
@pytest.mark.parametrize("loss", ["margin", "cross_entropy"])
def test_adaptive_steps_are_those_of_the_paper(steps, loss):
    torch.manual_seed(1)
    network = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).double()
    network.requires_grad_(False)
    network[0].weight *= 4
    x, y = torch.randn(6, 5, dtype=torch.float64), torch.randint(4, (6,))

    def value_and_gradient(point, label):
        point = torch.tensor(point, requires_grad=True)
        logits = network(point)
        rivals = torch.cat([logits[:label], logits[label + 1 :]])
        value = torch.nn.functional.cross_entropy(logits, label) if loss != "margin" else rivals.max() - logits[label]
        value.backward()
        return value.item(), point.grad.numpy()

    attack = PGD(eps=0.7, steps=steps, start="clean", loss=loss, schedule="adaptive", all_steps=True)
    result = attack(network, x, y, input_space=InputSpace(low=None, high=None))
    for row, label, point in zip(x, y, result, strict=True):
        expected = auto_pgd(lambda p, label=label: value_and_gradient(p, label), row.numpy(), 0.7, steps)
        np.testing.assert_allclose(point.numpy(), expected, atol=1e-9)
