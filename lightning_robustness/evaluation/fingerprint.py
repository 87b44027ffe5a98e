"""Fingerprints of weights and data, the same in whatever batches and processes the data comes."""

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from lightning_robustness.measurement.subject import Samples

_SIZE = 8  # bytes


def fingerprint_weights(model: nn.Module) -> str:
    """Return a hash of all parameters and buffers, with their names."""
    digest = hashlib.blake2b(digest_size=_SIZE)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {value.dtype}".encode())
        if not isinstance(value, nn.UninitializedParameter | nn.UninitializedBuffer):
            digest.update(f" {tuple(value.shape)}".encode())
            digest.update(_bytes(value))
    return digest.hexdigest()


class DataFingerprint:
    """Hashes of the labels of all samples and of the inputs of a few, added up, so that their order does not matter."""

    def __init__(self) -> None:
        self.count = self.labels = self.inputs = 0

    def add_labels(self, positions: np.ndarray, y: Tensor | None) -> None:
        """Add the labels of a batch."""
        self.count += len(positions)
        if y is not None:
            pairs = np.stack([positions, y.cpu().numpy().astype(np.int64)], axis=1)
            self.labels += sum(_hash(pair.tobytes()) for pair in pairs)

    def add_inputs(self, samples: Samples) -> None:
        """Add the inputs of samples."""
        for position, x in zip(samples.positions.tolist(), samples.x, strict=True):
            self.inputs += _hash(position.to_bytes(_SIZE, "little") + _bytes(x))

    @staticmethod
    def describe(parts: "Iterable[DataFingerprint]") -> dict[str, str]:
        """Describe the data, given the fingerprints of its shares."""
        parts = list(parts)
        labels, inputs = (
            sum(getattr(part, name) for part in parts) % 2 ** (8 * _SIZE) for name in ("labels", "inputs")
        )
        return {
            "number of samples": str(sum(part.count for part in parts)),
            "labels": f"{labels:016x}",
            "inputs": f"{inputs:016x}",
        }


def hash_tensor(tensor: Tensor) -> int:
    """Return a hash of the values of a tensor."""
    return _hash(_bytes(tensor))


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=_SIZE).digest(), "little")


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
