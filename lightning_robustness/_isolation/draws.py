"""Random numbers that belong to samples, not to batches or processes."""

import math

import numpy as np
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


class Draws:
    """Random numbers for samples, each a function of a seed, the position of its sample in the data set and a counter.

    So a sample gets the same numbers whatever else is in its batch, in whichever process it is, and whatever was drawn
    before. A 64-bit key per sample and draw (SplitMix64) is mixed with the index of each number by two rounds of
    multiplication and shifts, which gives 32 random bits. All of it is integer arithmetic on tensors: the same on every
    device, and faster than the generator of the CPU.

    Example:
        >>> import torch
        >>> from lightning_robustness._isolation.draws import Draws
        >>> Draws(torch.tensor([4, 7]), seed=1).signs(0, (3,))
        tensor([[-1.,  1.,  1.],
                [ 1., -1., -1.]])
        >>> Draws(torch.tensor([7]), seed=1).signs(0, (3,))
        tensor([[ 1., -1., -1.]])

    """

    def __init__(self, positions: Tensor, seed: int = 0, index: int = 0) -> None:
        low, high = np.random.SeedSequence([seed, index]).generate_state(2, np.uint32).tolist()
        self._keys = _scramble(_scramble(positions.long()) + _signed(high << 32 | low))

    def __len__(self) -> int:
        return len(self._keys)

    def rows(self, rows: Tensor | slice) -> "Draws":
        """Select samples by their rows."""
        return self._of(self._keys[rows])

    def stream(self, number: int) -> "Draws":
        """Return other random numbers for the same samples, for instance for each of several attacks."""
        return self._of(_scramble(~self._keys + _signed(number * _GOLDEN)))

    def bits(self, counter: int, shape: tuple[int, ...]) -> Tensor:
        """Draw 32 random bits for each entry of a tensor of shape ``(N, *shape)``, as signed integers."""
        keys = _scramble(self._keys + _signed((counter + 1) * _GOLDEN)).unsqueeze(1)
        low, high = keys.int(), (keys >> 32).int()
        x = torch.arange(math.prod(shape), dtype=torch.int32, device=keys.device) ^ low
        x ^= (x >> 16) & 0xFFFF
        x *= 0x7FEB352D
        x ^= high
        x ^= (x >> 15) & 0x1FFFF
        x *= 0x846CA68B - 2**32
        x ^= (x >> 16) & 0xFFFF
        return x.reshape(len(self), *shape)

    def uniform(
        self,
        counter: int,
        shape: tuple[int, ...],
        low: float = 0.0,
        high: float = 1.0,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Draw from the uniform distribution on ``[low, high]``; rounding may give either end."""
        return self.bits(counter, shape).to(dtype).mul_((high - low) / 2**32).add_((low + high) / 2)

    def normal(self, counter: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw from the standard normal distribution, by the inverse of its distribution function."""
        largest = 1 - torch.finfo(torch.float32).eps / 2
        uniform = self.uniform(counter, shape, -1.0, 1.0, dtype).clamp_(-largest, largest)
        return uniform.erfinv_().mul_(math.sqrt(2))

    def signs(self, counter: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw -1 or 1 with equal probability."""
        return ((self.bits(counter, shape) >> 31) | 1).to(dtype)

    def _of(self, keys: Tensor) -> "Draws":
        draws = object.__new__(type(self))
        draws._keys = keys
        return draws


def hash_positions(positions: Tensor, seed: int) -> Tensor:
    """Hash each position to a pseudo-random 64-bit integer, whatever batch or process it is in."""
    # Signed integers in the order of unsigned ones, in which SplitMix64 is defined
    return _scramble((positions + 1) * _GOLDEN + seed) ^ -(2**63)


def _scramble(keys: Tensor) -> Tensor:
    """Map 64-bit integers one to one to others that look random (the output function of SplitMix64)."""
    keys = (keys ^ _shift(keys, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    keys = (keys ^ _shift(keys, 27)) * (0x94D049BB133111EB - 2**64)
    return keys ^ _shift(keys, 31)


def _shift(keys: Tensor, number: int) -> Tensor:
    """Shift to the right and fill with zeros, where torch would fill with the sign."""
    return (keys >> number) & ((1 << (64 - number)) - 1)


def _signed(value: int) -> int:
    """Return the signed integer with the lowest 64 bits of a value."""
    return (value + 2**63) % 2**64 - 2**63
