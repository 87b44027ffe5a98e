import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def load_fashion_mnist(directory: str | None, train: bool) -> tuple[Tensor, Tensor]:
    """Images in [0, 1] of shape (N, 1, 28, 28) and labels.

    Args:
        directory: Where the data set's four gzipped idx files lie; by default torchvision downloads them.
        train: The 60,000 training images, or the 10,000 test images.

    """
    if directory is None:
        from torchvision.datasets import FashionMNIST

        dataset = FashionMNIST("data", train=train, download=True)
        return dataset.data.unsqueeze(1) / 255, dataset.targets
    name = "train" if train else "t10k"
    images = np.frombuffer(
        gzip.decompress((Path(directory) / f"{name}-images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16
    )
    labels = np.frombuffer(
        gzip.decompress((Path(directory) / f"{name}-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8
    )
    pixels = torch.from_numpy(images.reshape(-1, 1, 28, 28).astype(np.float32) / 255)
    return pixels, torch.from_numpy(labels.astype(np.int64))
