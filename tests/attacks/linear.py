"""Linear models: whether an attack can succeed on them is known in closed form."""

import torch


def linear(weight, bias=None):
    """A linear model with these weights."""
    weight = torch.as_tensor(weight, dtype=torch.float32)
    model = torch.nn.Linear(weight.shape[1], weight.shape[0])
    model.weight.data = weight
    model.bias.data = torch.zeros(len(weight)) if bias is None else torch.as_tensor(bias, dtype=torch.float32)
    return model


def random_linear(seed, num_classes=3, num_inputs=6):
    """A random linear model."""
    generator = torch.Generator().manual_seed(seed)
    return linear(torch.randn(num_classes, num_inputs, generator=generator))


def closest_boundary(model, x, y, norm):
    """Distance of each sample to the closest other class, without bounds on the inputs."""
    own = torch.arange(len(model.weight)) == y.unsqueeze(1)
    logits = model(x)
    margins = logits.gather(1, y.unsqueeze(1)) - logits
    difference = model.weight[y].unsqueeze(1) - model.weight
    slope = difference.abs().sum(dim=2) if norm == "linf" else difference.norm(dim=2)
    return (margins / slope).masked_fill(own, torch.inf).amin(dim=1).detach()
