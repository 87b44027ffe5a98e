"""Spectral norms of convolutions from the Fourier transform of their kernels."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Number of complex values to hold in memory at a time
_CHUNK = 2**22

Pads = list[tuple[int, int]]


def convolution_norm(options: Any, x: Tensor, y: Tensor) -> tuple[float, bool]:
    """Compute the spectral norm of a convolution in 1, 2 or 3 dimensions.

    It is exact for circular padding that keeps the size, and for kernels of size 1. Otherwise it is an upper bound:
    zero padding selects rows and columns of a larger circular convolution, and padding by copies stretches the input.

    Args:
        options: Object with the attributes weight, stride, padding, dilation, groups and perhaps padding_mode.
        x: An input of shape ``(..., C, *sizes)``.
        y: The output for this input.

    Returns:
        The norm, and whether it is exact.

    """
    weight, stride, dilation, reach = _geometry(options)
    pads = _pads(options.padding, reach)
    mode = getattr(options, "padding_mode", "zeros")
    inputs, outputs = list(x.shape[-len(reach) :]), list(y.shape[-len(reach) :])
    keeps_size = all(sum(p) == r and n % s == 0 for p, r, n, s in zip(pads, reach, inputs, stride, strict=True))
    if mode == "circular" and keeps_size:
        return _circular_norm(weight, options.groups, inputs, stride, dilation), True
    copies = 1.0
    if mode != "zeros":
        copies = math.prod(padding_norm(n, p, mode) for n, p in zip(inputs, pads, strict=True))
        inputs, pads = [n + sum(p) for n, p in zip(inputs, pads, strict=True)], [(0, 0)] * len(pads)
    sizes = _embedding_sizes(reach, inputs, outputs, pads, stride)
    return copies * _circular_norm(weight, options.groups, sizes, stride, dilation), copies == 1 and not any(reach)


def transposed_convolution_norm(options: Any, x: Tensor, y: Tensor) -> tuple[float, bool]:
    """Compute the spectral norm of a transposed convolution as that of its adjoint, a convolution."""
    weight, stride, dilation, reach = _geometry(options)
    outputs, inputs = list(x.shape[-len(reach) :]), list(y.shape[-len(reach) :])
    sizes = _embedding_sizes(reach, inputs, outputs, _pads(options.padding, reach), stride)
    return _circular_norm(weight, options.groups, sizes, stride, dilation), not any(reach)


def padding_norm(size: int, pads: tuple[int, int], mode: str) -> float:
    """Compute the spectral norm of padding one dimension by copies: the root of the largest number of copies."""
    positions = functional.pad(torch.arange(size).double().reshape(1, 1, -1), pads, mode=mode)
    return math.sqrt(positions.long().flatten().bincount().max().item())


def _geometry(options: Any) -> tuple[Tensor, list[int], list[int], list[int]]:
    """Return weight, stride, dilation, and how far the kernel reaches beyond its first tap."""
    weight = options.weight.detach().cpu().double()
    num_dims = weight.ndim - 2
    stride, dilation = per_dimension(options.stride, num_dims), per_dimension(options.dilation, num_dims)
    return weight, stride, dilation, [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]


def per_dimension(value: int | Sequence[int], num_dims: int) -> list[int]:
    """Return one number per dimension, where a single one may be given for all."""
    values = [value] if isinstance(value, int) else list(value)
    return values * num_dims if len(values) == 1 else values


def _pads(padding: str | int | Sequence[int], reach: list[int]) -> Pads:
    if padding == "same":
        return [(r // 2, r - r // 2) for r in reach]
    return [(p, p) for p in per_dimension(0 if isinstance(padding, str) else padding, len(reach))]


def _embedding_sizes(
    reach: list[int], inputs: list[int], outputs: list[int], pads: Pads, stride: list[int]
) -> list[int]:
    """Find sizes of a circular convolution whose matrix contains that of the zero-padded one.

    The padding must not wrap around into the input, no two outputs may coincide, and the stride must divide the size.
    With a kernel of size 1 all frequencies are alike, so the smallest size is enough.
    """
    return [
        math.ceil(max(n + max(p), (m - 1) * s + 1) / s) * s if r else s
        for r, n, m, p, s in zip(reach, inputs, outputs, pads, stride, strict=True)
    ]


def _circular_norm(weight: Tensor, groups: int, sizes: list[int], stride: list[int], dilation: list[int]) -> float:
    """Compute the largest singular value of a circular convolution whose stride divides its sizes.

    The Fourier transform makes it block-diagonal, with one matrix of output by input channels per frequency. A stride
    of s adds up the s frequencies that are size / s apart: their matrices stand side by side, divided by sqrt(s).
    """
    num_outputs, num_inputs = weight.shape[:2]
    spacing = [n // s for n, s in zip(sizes, stride, strict=True)]
    # Weights are real: frequencies f and -f have the same singular values
    frequencies = _grid([*spacing[:-1], spacing[-1] // 2 + 1])
    aliases = _grid(stride) * torch.tensor(spacing)
    taps = _grid(list(weight.shape[2:])) * torch.tensor(dilation) / torch.tensor(sizes)
    kernels = weight.reshape(groups, num_outputs // groups, num_inputs, -1).to(torch.complex128)
    largest = 0.0
    for f in frequencies.split(max(1, _CHUNK // (num_outputs * num_inputs * len(aliases)))):
        angles = -2 * math.pi * (f.unsqueeze(1) + aliases) @ taps.T
        phases = torch.polar(torch.ones_like(angles), angles)
        blocks = torch.einsum("goit,frt->gfoir", kernels, phases).flatten(3) / math.sqrt(len(aliases))
        if blocks.shape[2] > blocks.shape[3]:
            blocks = blocks.mT
        largest = max(largest, torch.linalg.eigvalsh(blocks @ blocks.mH)[..., -1].max().item())
    return math.sqrt(largest)


def _grid(sizes: list[int]) -> Tensor:
    """List all combinations of indices, shape ``(product of sizes, number of sizes)``."""
    return torch.cartesian_prod(*(torch.arange(n, dtype=torch.double) for n in sizes)).reshape(-1, len(sizes))
