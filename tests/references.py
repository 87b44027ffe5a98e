"""The formulas once more, in plain Python with the papers' loops, for comparison."""

import math

import torch


def minkowski(a, b, p):
    if p == math.inf:
        return max(abs(x - y) for x, y in zip(a, b, strict=True))
    return sum(abs(x - y) ** p for x, y in zip(a, b, strict=True)) ** (1 / p)


def mean(values):
    return math.fsum(values) / len(values)


def center(vectors):
    return [mean(column) for column in zip(*vectors, strict=True)]


def norm(values):
    low, high = min(values), max(values)
    return [0.0 if high == low else (value - low) / (high - low) for value in values]


def group(features, preds):
    classes = {}
    for vector, label in zip(features.tolist(), preds.tolist(), strict=True):
        classes.setdefault(label, []).append(vector)
    return {label: classes[label] for label in sorted(classes)}


def rdi(features, preds):
    """Algorithm 1 of the RDI paper."""
    feature_vectors = group(features, preds)
    center_list, intra_list = [], []
    for vectors in feature_vectors.values():
        center_list.append(center(vectors))
        intra_list.append(mean([minkowski(v, center_list[-1], 2) for v in vectors]))
    intra = mean(intra_list)
    overall = center(center_list)
    inter = mean([minkowski(c, overall, 2) for c in center_list])
    return {"rdi": (inter - intra) / max(inter, intra), "intra": intra, "inter": inter, "distances": intra_list}


def roby(features, preds, p=2.0, normalization="pairs"):
    """Algorithm 1 of the ROBY paper."""
    feature_vectors = group(features, preds)
    center_list = [center(vectors) for vectors in feature_vectors.values()]
    fsa_list = [
        mean([minkowski(v, c, p) for v in vectors])
        for vectors, c in zip(feature_vectors.values(), center_list, strict=True)
    ]
    pairs = [(i, j) for i in range(len(center_list)) for j in range(i + 1, len(center_list))]
    fsd_list = [minkowski(center_list[i], center_list[j], p) for i, j in pairs]
    fsa, fsd = 1 - mean(norm(fsa_list)), mean(norm(fsd_list))
    if normalization == "all":
        # Supplement A of the RDI paper
        sizes = [len(vectors) for vectors in feature_vectors.values()]
        sums = norm([size * fsa_k for size, fsa_k in zip(sizes, fsa_list, strict=True)])
        fsa_list, fsd_list = [total / size for total, size in zip(sums, sizes, strict=True)], norm(fsd_list)
    roby_list = [fsa_list[i] + fsa_list[j] - d for (i, j), d in zip(pairs, fsd_list, strict=True)]
    if normalization != "none":
        roby_list = norm(roby_list)
    return {"roby": mean(roby_list), "fsa": fsa, "fsd": fsd, "pairs": roby_list}


def carlini_wagner(network, images, labels, c, steps, lr):
    """Equation 7 of Carlini and Wagner for images in [0, 1], by Kingma and Ba's Algorithm 1, in double precision.

    Return the smallest distances at which the attack succeeds, infinite without success.
    """
    images, rivals = images.double(), torch.ones(len(labels), int(labels.max()) + 1).scatter(1, labels[:, None], 0) == 1
    w = torch.atanh((2 * images - 1) * 0.999999)
    m, v, closest = torch.zeros_like(w), torch.zeros_like(w), torch.full((len(images),), math.inf)
    for t in range(1, steps + 1):
        w.requires_grad_()
        x = (torch.tanh(w) + 1) / 2
        z = network(x)
        f = z[~rivals] - z[rivals].reshape(len(z), -1).max(dim=1).values
        squared = (x - images).flatten(1).square().sum(dim=1)
        closest = torch.where(f < 0, torch.minimum(closest, squared.detach().sqrt()), closest)
        (g,) = torch.autograd.grad((squared + c * f.clamp(min=0)).sum(), w)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        w = (w - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)).detach()
    return closest
