"""Small networks, trained on digits in seconds."""

import torch
from torch import nn


def perturb(network, images, labels, eps, steps=5):
    """Projected gradient descent, as short as can be: what the tests compare attacks and metrics with."""
    network.eval()
    adversarial = (images + torch.empty_like(images).uniform_(-eps, eps)).clamp(0, 1)
    for _ in range(steps):
        adversarial.requires_grad_()
        (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(network(adversarial), labels), adversarial)
        adversarial = adversarial.detach() + 2 * eps / steps * gradient.sign()
        adversarial = (images + (adversarial - images).clamp(-eps, eps)).clamp(0, 1)
    return adversarial


def train_network(images, labels, eps=0.0, epochs=10, seed=0):
    """Train a convolutional network, on adversarial images where eps is positive; its last layer is the head."""
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, int(labels.max()) + 1),
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            x, y = images[batch], labels[batch]
            x = perturb(network, x, y, eps) if eps else x
            network.train()
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()
            optimizer.step()
    return network.eval().requires_grad_(False)
