import pickle
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def load_cifar10(directory: str, train: bool) -> tuple[Tensor, Tensor]:
    """Images in [0, 1] of shape (N, 3, 32, 32) and labels.

    Args:
        directory: Where the data set's Python files lie, ``data_batch_1`` to ``data_batch_5`` and ``test_batch``.
        train: The 50,000 training images, or the 10,000 test images.

    """
    names = [f"data_batch_{number}" for number in range(1, 6)] if train else ["test_batch"]
    batches = [pickle.loads((Path(directory) / name).read_bytes(), encoding="bytes") for name in names]
    pixels = np.concatenate([batch[b"data"] for batch in batches]).reshape(-1, 3, 32, 32)
    labels = [label for batch in batches for label in batch[b"labels"]]
    return torch.from_numpy(pixels.astype(np.float32) / 255), torch.tensor(labels)
