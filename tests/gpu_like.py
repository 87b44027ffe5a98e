"""A CPU that rounds as a GPU does."""

import traceback
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default}
CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}


class GpuLike(TorchDispatchMode):
    """Round float32 as a GPU would: to TF32 where torch is set to it, and differently in batches of different sizes.

    Convolutions are in TF32 unless cuDNN's setting forbids it; matrix products and attention where the setting of
    matrix products allows it. Everything is deterministic: one operation on one batch always gives the same.

    Args:
        tf32_noise: Relative difference between batches of different sizes, for which other kernels are chosen, in TF32.
        float32_noise: The same in float32.

    Attributes:
        num_rounded: Number of operations in TF32.
        num_precise: Number of operations in float32.

    """

    def __init__(self, tf32_noise=1e-4, float32_noise=5e-7):
        super().__init__()
        self.tf32_noise, self.float32_noise = tf32_noise, float32_noise
        self.num_rounded = self.num_precise = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten._euclidean_dist.default:
            return self._distances(*args)
        if func in CONVOLUTIONS:
            return self._compute(func, args, kwargs, convolves_in_tf32())
        if func in PRODUCTS or func in ATTENTION:
            return self._compute(func, args, kwargs, multiplies_in_tf32())
        return func(*args, **kwargs)

    def _compute(self, func, args, kwargs, in_tf32):
        first = 1 if func in (aten.addmm.default, aten.baddbmm.default) else 0  # the bias is added in float32
        if not is_single(args[first]):
            return func(*args, **kwargs)
        self.num_rounded, self.num_precise = self.num_rounded + in_tf32, self.num_precise + (not in_tf32)
        if in_tf32:
            args = [*args[:first], *(to_tf32(value) if is_single(value) else value for value in args[first:])]
        result, size = func(*args, **kwargs), len(args[first])
        noise = self.tf32_noise if in_tf32 else self.float32_noise
        if isinstance(result, torch.Tensor):
            return perturb(result, size, noise)
        return tuple(perturb(value, size, noise) if is_single(value) else value for value in result)

    def _distances(self, x, y):
        """Pairwise distances as a GPU computes them, by one matrix product."""
        one = torch.ones_like
        squares, other_squares = x.square().sum(-1, keepdim=True), y.square().sum(-1, keepdim=True)
        first, second = (
            torch.cat([-2 * x, squares, one(squares)], -1),
            torch.cat([y, one(other_squares), other_squares], -1),
        )
        product = self._compute(aten.mm.default, (first, second.mT), {}, multiplies_in_tf32())
        return product.clamp_min(0).sqrt()


def multiplies_in_tf32():
    """Whether a GPU's matrix products would be in TF32."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return torch.backends.cuda.matmul.allow_tf32 if precision is None else precision == "tf32"


def convolves_in_tf32():
    """Whether a GPU's convolutions would be in TF32."""
    conv = getattr(torch.backends.cudnn, "conv", None)
    return torch.backends.cudnn.allow_tf32 if conv is None else conv.fp32_precision == "tf32"


def to_tf32(values):
    """Round to a mantissa of 10 bits, half to even."""
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def perturb(values, size, noise):
    """Change each value by a share up to the noise, which depends on its channel and the batch size.

    Not on its place in an image: there, kernels give the same for the same, and max-pooling needs these ties.
    """
    if values.ndim < 2:
        return values
    factors = 1 + noise * torch.sin(12.9898 * torch.arange(values.shape[1], dtype=torch.float64) + 78.233 * size)
    return values * factors.to(values.dtype).view(-1, *[1] * (values.ndim - 2))


def is_single(value):
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.ndim > 0


WAITING = {
    aten._local_scalar_dense.default,  # item, bool, int, float
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten._unique2.default,
}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
COPIES = {torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.numpy}


class Synchronisations:
    """Count what would make a GPU's program wait for the GPU, by the line of the package that does it.

    These are values that become Python's (``item``, ``bool``, ``tolist``), results whose size depends on values
    (``nonzero``, boolean indices, ``unique``) and copies to the host. Copies of what would be there already count too,
    since a CPU cannot tell.

    Attributes:
        places: Number of times, by file and line.

    """

    def __init__(self):
        self.places = Counter()
        self._stack = ExitStack()

    def __enter__(self):
        self._stack.enter_context(_Copies(self))
        self._stack.enter_context(_Waits(self))
        return self

    def __exit__(self, *error):
        self._stack.close()

    @property
    def total(self):
        return self.places.total()

    def note(self):
        frames = [frame for frame in traceback.extract_stack() if "lightning_robustness" in Path(frame.filename).parts]
        if frames:  # the user's own are theirs
            parts = Path(frames[-1].filename).parts
            path = "/".join(parts[len(parts) - parts[::-1].index("lightning_robustness") :])
            self.places[f"{path}:{frames[-1].lineno}"] += 1


class _Copies(TorchFunctionMode):
    def __init__(self, counter):
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in COPIES:
            self._counter.note()
        return func(*args, **(kwargs or {}))


class _Waits(TorchDispatchMode):
    def __init__(self, counter):
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        has_mask = func in INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1])
        if func in WAITING or has_mask:
            self._counter.note()
        return func(*args, **(kwargs or {}))


class WithoutFloat64(TorchFunctionMode):
    """Refuse float64 and eigenvalues wherever a tensor was not moved to the CPU before, as on Apple's GPUs."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        values = [part for value in (*args, *kwargs.values()) for part in (value if is_list(value) else [value])]
        is_move = func is torch.Tensor.cpu or (func is torch.Tensor.to and values[1] in ("cpu", torch.device("cpu")))
        on_host = is_move or any(getattr(value, "on_host", False) for value in values)
        is_double = func is torch.Tensor.double or torch.float64 in [v for v in values if isinstance(v, torch.dtype)]
        if not on_host and (is_double or func in (torch.linalg.eigh, torch.linalg.eigvalsh, torch.frexp)):
            raise TypeError(f"{func.__name__}: this device has no float64")
        result = func(*args, **kwargs)
        if on_host and isinstance(result, torch.Tensor):
            result = result.view_as(result) if is_move else result  # of the same memory, as the CPU would return itself
            result.on_host = True
        return result


def is_list(value):
    return isinstance(value, (list, tuple))
