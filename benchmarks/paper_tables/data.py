import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))  # the loaders of the other benchmarks

from cifar10 import load_cifar10
from fashion_mnist import load_fashion_mnist

DATA_SETS = ("mnist", "fashion-mnist", "cifar10")


def load(name: str, directory: str | None, train: bool) -> tuple[Tensor, Tensor]:
    """Images in [0, 1] and labels of a data set.

    Args:
        name: ``"mnist"``, ``"fashion-mnist"`` or ``"cifar10"``.
        directory: Where its files lie: gzipped idx files, or the Python files of CIFAR-10. By default, torchvision
            downloads them.
        train: The training images, or the test images.

    """
    if directory is None:
        from torchvision import datasets

        kind = {"mnist": datasets.MNIST, "fashion-mnist": datasets.FashionMNIST, "cifar10": datasets.CIFAR10}[name]
        dataset = kind("data", train=train, download=True)
        images, labels = torch.as_tensor(dataset.data), torch.as_tensor(dataset.targets)
        images = images.movedim(3, 1) if name == "cifar10" else images.unsqueeze(1)
        return images / 255, labels
    if name == "cifar10":
        return load_cifar10(directory, train)
    return load_fashion_mnist(directory, train)  # files of the same names and format
