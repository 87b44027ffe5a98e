import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

# Number of complex values to hold in memory at a time
_CHUNK = 2**22

Pads = list[tuple[int, int]]


class SpectralNorm(NamedTuple):
    """Largest factor by which a layer stretches a distance between two inputs, in the l2 norm."""

    value: float
    exact: bool


Rule = Callable[[Any, Tensor, Tensor], SpectralNorm | None]


def convolution_norm(options: Any, x: Tensor, y: Tensor) -> SpectralNorm:
    """Compute the spectral norm of a convolution in 1, 2 or 3 dimensions.

    It is exact for circular padding that keeps the size, and for kernels of size 1. Otherwise it is an upper bound:
    zero padding selects rows and columns of a larger circular convolution, and padding by copies stretches the input.
    """
    weight, stride, dilation, reach = _geometry(options)
    pads = _pads(options.padding, reach)
    mode = getattr(options, "padding_mode", "zeros")
    inputs, outputs = list(x.shape[-len(reach) :]), list(y.shape[-len(reach) :])
    keeps_size = all(sum(p) == r and n % s == 0 for p, r, n, s in zip(pads, reach, inputs, stride, strict=True))
    if mode == "circular" and keeps_size:
        return SpectralNorm(_circular_norm(weight, options.groups, inputs, stride, dilation), exact=True)
    copies = 1.0
    if mode != "zeros":
        copies = math.prod(padding_norm(n, p, mode) for n, p in zip(inputs, pads, strict=True))
        inputs, pads = [n + sum(p) for n, p in zip(inputs, pads, strict=True)], [(0, 0)] * len(pads)
    sizes = _embedding_sizes(reach, inputs, outputs, pads, stride)
    norm = copies * _circular_norm(weight, options.groups, sizes, stride, dilation)
    return SpectralNorm(norm, exact=copies == 1 and not any(reach))


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
    """Find sizes of a circular convolution whose matrix contains the matrix of the zero-padded one.

    The padding must not wrap around into the input, no two outputs may coincide, and the stride must divide the size.
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


def layer_spectral_norm(kind: str, options: Any, x: Tensor, y: Tensor) -> SpectralNorm | None:
    """Compute the spectral norm of a layer, or None if there is no rule for it."""
    if kind in _LIPSCHITZ_CONSTANTS:
        return SpectralNorm(_LIPSCHITZ_CONSTANTS[kind], exact=True)
    return _RULES[kind](options, x, y) if kind in _RULES and options is not None else None


def matrix_spectral_norm(matrix: Tensor) -> float:
    """Compute the largest singular value of a matrix."""
    return torch.linalg.matrix_norm(_wide(matrix), ord=2).item() if matrix.numel() else 0.0


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double()


def _exact(value: Callable[[Any], float]) -> Rule:
    """Make the rule of a layer whose norm depends on its options alone."""
    return lambda options, x, y: SpectralNorm(value(options), exact=True)


def _batch_norm(options: Any, x: Tensor, y: Tensor) -> SpectralNorm | None:
    if options.training or options.running_var is None:  # statistics of the batch: samples are mixed
        return None
    return _running_scale(options)


def _running_scale(options: Any) -> SpectralNorm:
    scale = (_wide(options.running_var) + options.eps).rsqrt()
    scale = scale if options.weight is None else scale * _wide(options.weight)
    return SpectralNorm(scale.abs().max().item(), exact=True)


def _layer_norm(options: Any, x: Tensor, y: Tensor) -> SpectralNorm:
    """Bound the norm over all inputs: the divisor can be as small as sqrt(eps)."""
    weight = options.weight
    eps = torch.finfo(x.dtype).eps if options.eps is None else options.eps
    scale = 1.0 if weight is None else _wide(weight).abs().max().item()
    return SpectralNorm(scale / math.sqrt(eps) if eps else math.inf, exact=False)


def layer_norm_radius(norm: nn.LayerNorm) -> float:
    """Bound the length of what a layer norm returns for one token."""
    size = math.prod(norm.normalized_shape)
    weight = torch.ones(size) if norm.weight is None else _wide(norm.weight)
    bias = torch.zeros(size) if norm.bias is None else _wide(norm.bias)
    return math.sqrt(size) * weight.abs().max().item() + torch.linalg.vector_norm(bias).item()


def attention_norm(attention: nn.MultiheadAttention, radius: float, num_tokens: int) -> float | None:
    r"""Bound the Jacobian of self-attention of N tokens of at most length R.

    A head P X W_v with P = softmax(X A X^T) changes by P dX W_v, at most sqrt(N), since the rows of P sum to one, and
    by dP X W_v: queries pass on the covariance of X under P, at most R^2 ||A||, and keys at most R^2 ||A|| sqrt(N),
    where a bias b of the queries adds R ||W_k b||. Heads stand side by side.
    """
    if attention.in_proj_weight is None or attention.bias_k is not None or attention.add_zero_attn:
        return None
    size = attention.head_dim
    query, key, value = _wide(attention.in_proj_weight).chunk(3)
    bias = torch.zeros(len(query)) if attention.in_proj_bias is None else _wide(attention.in_proj_bias).chunk(3)[0]
    heads = []
    for q, k, v, b in zip(*(part.split(size) for part in (query, key, value, bias.double())), strict=True):
        logits = matrix_spectral_norm(q.T @ k) / math.sqrt(size)
        shift = torch.linalg.vector_norm(k.T @ b).item() / math.sqrt(size)
        by_keys = radius * (radius * logits + shift) + 1
        heads.append(matrix_spectral_norm(v) * (radius**2 * logits + math.sqrt(num_tokens) * by_keys))
    return math.hypot(*heads) * matrix_spectral_norm(attention.out_proj.weight)


def _encoder_layer(options: nn.TransformerEncoderLayer, x: Tensor, y: Tensor) -> SpectralNorm | None:
    """Bound the two residual branches of a layer that normalises first: attention, and two dense layers."""
    attention = attention_norm(options.self_attn, layer_norm_radius(options.norm1), x.numel() // x.shape[-1])
    slope = {1: 1.0, 2: _GELU_SLOPES["none"]}.get(options.activation_relu_or_gelu)
    if not options.norm_first or attention is None or slope is None:
        return None
    first, second = (_layer_norm(norm, x, y).value for norm in (options.norm1, options.norm2))
    dense = slope * matrix_spectral_norm(options.linear1.weight) * matrix_spectral_norm(options.linear2.weight)
    return SpectralNorm((1 + first * attention) * (1 + second * dense), exact=False)


def _instance_norm(options: Any, x: Tensor, y: Tensor) -> SpectralNorm:
    if getattr(options, "use_input_stats", options.running_var is None):
        return _layer_norm(options, x, y)
    return _running_scale(options)


def _pooling(options: Any, x: Tensor, name: str) -> Iterator[tuple[int, ...]]:
    """Yield kernel size, stride and another option of each dimension."""
    values = (options.kernel_size, options.stride or options.kernel_size, getattr(options, name))
    return zip(*(per_dimension(value, x.ndim - 2) for value in values), strict=True)


def _max_pool(options: Any, x: Tensor, y: Tensor) -> SpectralNorm:
    """Take the root of the number of windows that an input is in: each of them can pass on its change."""
    sizes = zip(_pooling(options, x, "dilation"), y.shape[2:], strict=True)
    windows = math.prod(min(math.ceil(k / (s // math.gcd(s, d))), m) for (k, s, d), m in sizes)
    return SpectralNorm(math.sqrt(windows), exact=windows == 1)


def _avg_pool(options: Any, x: Tensor, y: Tensor) -> SpectralNorm | None:
    """Multiply the norms of all dimensions: average pooling is a Kronecker product of one matrix per dimension."""
    if getattr(options, "divisor_override", None):
        return None
    norm = 1.0
    for (k, s, p), n in zip(_pooling(options, x, "padding"), x.shape[2:], strict=True):
        basis = torch.eye(n, dtype=torch.double).unsqueeze(1)
        pooled = functional.avg_pool1d(basis, k, s, p, options.ceil_mode, options.count_include_pad)
        norm *= matrix_spectral_norm(pooled.squeeze(1))
    return SpectralNorm(norm, exact=True)


def _adaptive_avg_pool(options: Any, x: Tensor, y: Tensor) -> SpectralNorm:
    return SpectralNorm(math.prod(map(matrix_spectral_norm, _adaptive_pool_matrices(x, y))), exact=True)


def _adaptive_max_pool(options: Any, x: Tensor, y: Tensor) -> SpectralNorm:
    windows = math.prod(int((matrix > 0).sum(dim=1).max()) for matrix in _adaptive_pool_matrices(x, y))
    return SpectralNorm(math.sqrt(windows), exact=windows == 1)


def _adaptive_pool_matrices(x: Tensor, y: Tensor) -> list[Tensor]:
    return [
        functional.adaptive_avg_pool1d(torch.eye(n, dtype=torch.double).unsqueeze(1), m).squeeze(1)
        for n, m in zip(x.shape[2:], y.shape[2:], strict=True)
    ]


def _padding(mode: str | None = None) -> Rule:
    def rule(options: Any, x: Tensor, y: Tensor) -> SpectralNorm:
        chosen = mode or options.mode
        if chosen == "constant":
            return SpectralNorm(1.0, exact=True)
        pads = options.pad if mode is None else options.padding  # pairs, from the last dimension on
        pairs = enumerate(zip(pads[::2], pads[1::2], strict=True), start=1)
        return SpectralNorm(math.prod(padding_norm(x.shape[-i], pair, chosen) for i, pair in pairs), exact=True)

    return rule


def _dropout(options: Any, x: Tensor, y: Tensor) -> SpectralNorm | None:
    return None if getattr(options, "training", True) else SpectralNorm(1.0, exact=True)


def _log_softmax(options: Any, x: Tensor, y: Tensor) -> SpectralNorm:
    """Bound the Jacobian I - 1 p^T, a projection with the norm of 1 p^T, at most the root of the number of classes."""
    return SpectralNorm(math.sqrt(max(x.shape)), exact=False)


_GELU_SLOPES = {"none": 1.1289041452, "tanh": 1.1289930687}


def _slope(name: str) -> Rule:
    return _exact(lambda options: max(1.0, torch.as_tensor(getattr(options, name)).abs().max().item()))


# Largest absolute derivatives; functions that jump, such as Hardshrink and Threshold, have none
_LIPSCHITZ_CONSTANTS = {
    **dict.fromkeys(("relu", "relu6", "hardtanh", "celu", "tanh", "softsign", "softplus", "logsigmoid"), 1.0),
    **dict.fromkeys(("tanhshrink", "softshrink", "clamp", "abs", "neg", "sin", "cos"), 1.0),
    **dict.fromkeys(("identity", "flatten", "unflatten", "pixelshuffle", "pixelunshuffle", "channelshuffle"), 1.0),
    **dict.fromkeys(("softmax", "softmin"), 0.5),
    "sigmoid": 0.25,
    "hardsigmoid": 1 / 6,
    "hardswish": 1.5,
    "selu": 1.7580993409,
    "silu": 1.0998393202,
    "mish": 1.0884981613,
}

_RULES: dict[str, Rule] = {
    "linear": _exact(lambda options: matrix_spectral_norm(options.weight)),
    "conv": convolution_norm,
    "convtranspose": lambda options, x, y: convolution_norm(options, y, x),  # the norm of its adjoint
    "batchnorm": _batch_norm,
    "syncbatchnorm": _batch_norm,
    "layernorm": _layer_norm,
    "transformerencoderlayer": _encoder_layer,
    "groupnorm": _layer_norm,
    "rmsnorm": _layer_norm,
    "instancenorm": _instance_norm,
    "maxpool": _max_pool,
    "avgpool": _avg_pool,
    "adaptiveavgpool": _adaptive_avg_pool,
    "adaptivemaxpool": _adaptive_max_pool,
    "pad": _padding(),
    "zeropad": _padding("constant"),
    "constantpad": _padding("constant"),
    "reflectionpad": _padding("reflect"),
    "replicationpad": _padding("replicate"),
    "circularpad": _padding("circular"),
    **dict.fromkeys(("dropout", "alphadropout", "featurealphadropout"), _dropout),
    "logsoftmax": _log_softmax,
    "gelu": _exact(lambda options: _GELU_SLOPES[options.approximate]),
    "leakyrelu": _slope("negative_slope"),
    "rrelu": _slope("upper"),
    "prelu": _slope("weight"),
    "elu": _slope("alpha"),
}
