"""A fixed sample of a data set, spread over the whole of it."""

import numpy as np
import torch
from torch import Tensor


def spread_indices(size: int, total: int, seed: int = 0) -> np.ndarray:
    """Draw indices that are spread evenly: one by chance from each of ``size`` equal parts.

    A loader that is sorted by class gives a sample of all classes; and so does one whose classes take turns, where
    equal steps might meet the same class again and again.

    Args:
        size: Number of indices; all where there are not as many.
        total: Number of samples to draw from.
        seed: Seed of the choice, which depends on nothing else.

    Returns:
        Increasing integers below ``total``.

    Example:
        >>> from lightning_robustness.utilities.sample import spread_indices
        >>> spread_indices(4, 100).tolist()
        [15, 31, 51, 75]

    """
    size = min(size, total)
    edges = np.arange(size + 1, dtype=np.int64) * total // max(size, 1)
    return edges[:-1] + (np.random.default_rng(seed).random(size) * np.diff(edges)).astype(np.int64)


class SpreadSample:
    """Collect a sample from batches that pass by.

    With a known number of samples, that of ``spread_indices``. Without, as for streams, every sample gets a number by
    its index, as if by chance, and those with the smallest are kept.

    Args:
        size: Number of samples to keep.
        total: Number of samples that will come, or None if it is not known.
        seed: Seed of the choice.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> from lightning_robustness.utilities.sample import SpreadSample
        >>> sample = SpreadSample(size=4, total=100)
        >>> for indices in np.arange(100).reshape(5, 20):
        ...     sample.add(indices, x=torch.tensor(indices).unsqueeze(1), y=torch.tensor(indices % 10))
        >>> x, y = sample.collect()
        >>> x.flatten(), y
        (tensor([15, 31, 51, 75]), tensor([5, 1, 1, 5]))
        >>> sample.rows(2)
        array([1, 2])

    """

    def __init__(self, size: int, total: int | None, seed: int = 0) -> None:
        self._size = size
        self._seed = seed
        self._chosen = None if total is None else spread_indices(size, total, seed)
        self._indices = np.zeros(0, dtype=np.int64)
        self._limit = np.uint64(2**64 - 1)
        self._x: list[Tensor] = []
        self._y: list[Tensor] = []
        self._has_labels: bool | None = None
        self._nothing: tuple[Tensor, Tensor | None] = torch.zeros(0, 0), None

    def add(self, indices: np.ndarray, x: Tensor, y: Tensor | None) -> None:
        """Keep those rows that belong to the sample, on the CPU.

        Args:
            indices: Index of each row in the data set, larger than those before.
            x: Inputs.
            y: Labels, or None if there are none.

        Raises:
            ValueError: If only some of the batches have labels.

        """
        if self._has_labels not in (None, y is not None):
            raise ValueError("Expected labels in all batches or in none but only some have them.")
        self._has_labels = y is not None
        chosen = self._chosen
        wanted = _draw(indices, self._seed) <= self._limit if chosen is None else np.isin(indices, chosen)
        rows = np.flatnonzero(wanted)
        self._indices = np.concatenate([self._indices, indices[rows]])
        self._x += _rows(x, rows)
        self._y += [] if y is None else _rows(y, rows)
        self._nothing = x[:0].detach().cpu(), None if y is None else y[:0].detach().cpu()
        if len(self._x) > 2 * self._size:
            self._keep(self.rows(self._size))
            self._limit = _draw(self._indices, self._seed).max(initial=0)

    @property
    def indices(self) -> np.ndarray:
        """Index in the data set of each row that is kept."""
        return self._indices

    def rows(self, size: int) -> np.ndarray:
        """Rows, of those kept, that make up a smaller sample, which is as evenly spread."""
        if self._chosen is None:
            return np.sort(np.argsort(_draw(self._indices, self._seed), kind="stable")[:size])
        chosen = self._chosen[spread_indices(size, len(self._chosen), self._seed)]
        return np.flatnonzero(np.isin(self._indices, chosen))

    def collect(self) -> tuple[Tensor, Tensor | None]:
        """Return inputs and labels, in the order of the data set; of nothing, what has their shapes.

        Raises:
            ValueError: If the inputs differ in shape.

        """
        self._keep(self.rows(self._size))
        if not self._x:
            return self._nothing
        shapes = sorted({tuple(row.shape) for row in self._x})
        if len(shapes) > 1:
            raise ValueError(
                f"Expected samples of one shape but got {len(shapes)}, from {shapes[0]} to {shapes[-1]}. Pass "
                "`batch_fn=`, a callable that pads or cuts inputs and returns them with the labels, or do without "
                "Fisher information and attacks: `fim_samples=0, attacks=()`."
            )
        return torch.stack(self._x), torch.stack(self._y) if self._y else None

    def _keep(self, rows: np.ndarray) -> None:
        self._indices = self._indices[rows]
        self._x = [self._x[row] for row in rows]
        self._y = [self._y[row] for row in rows] if self._y else []


def _rows(tensor: Tensor, rows: np.ndarray) -> list[Tensor]:
    """Copies on the CPU: a row that is a view would keep all those that it was cut from."""
    return [row.clone() for row in tensor[torch.as_tensor(rows, device=tensor.device)].detach().cpu()]


def _draw(indices: np.ndarray, seed: int) -> np.ndarray:
    """Number in the order of which indices are as if drawn by chance (SplitMix64)."""
    z = (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
