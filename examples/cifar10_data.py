"""CIFAR-10 for ``cifar10_resnet18.py``: its Python version, read without running pickled code."""

import pickle
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from lightning_robustness import InputSpace

SPACE = InputSpace(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
ARRAYS = {"_reconstruct": np.empty(0).__reduce__()[0], "ndarray": np.ndarray, "dtype": np.dtype}


class ArrayUnpickler(pickle.Unpickler):
    """Reader of arrays and plain values alone: a pickle that names other code is refused, and none of it runs."""

    def find_class(self, module: str, name: str) -> object:
        if module.partition(".")[0] == "numpy" and name in ARRAYS:
            return ARRAYS[name]
        raise pickle.UnpicklingError(f"Expected nothing but NumPy arrays in CIFAR-10, but got {module}.{name}")


def load(directory: Path, *names: str) -> TensorDataset:
    """Read batches as normalised images and labels."""
    batches = []
    for name in names:
        with (directory / name).open("rb") as file:
            batches.append(ArrayUnpickler(file, encoding="bytes").load())
    images = np.concatenate([batch[b"data"] for batch in batches]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([batch[b"labels"] for batch in batches])
    return TensorDataset(SPACE.normalize(torch.from_numpy(images) / 255), torch.from_numpy(labels).long())


def cifar10(directory: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Training and test images; without a directory, torchvision downloads them into ``data``."""
    if directory is None:
        from torchvision.datasets import CIFAR10

        CIFAR10("data", download=True)
        directory = Path("data") / "cifar-10-batches-py"
    return load(directory, *(f"data_batch_{number}" for number in range(1, 6))), load(directory, "test_batch")


def random_images() -> tuple[TensorDataset, TensorDataset]:
    """Twenty random images, twice, to try a run without the data set."""
    images = SPACE.normalize(torch.rand(20, 3, 32, 32))
    dataset = TensorDataset(images, torch.arange(20) % 10)
    return dataset, dataset
