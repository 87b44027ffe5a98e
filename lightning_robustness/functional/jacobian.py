"""Products with the Jacobian of a model's logits, for every sample of a batch at once."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_robustness.utilities.input_space import InputSpace
from lightning_robustness.utilities.logits import check_finite, compute_logits
from lightning_robustness.utilities.precision import at_least_float32


class Jacobian:
    """Jacobian J of the logits with respect to the un-normalised inputs, as an operator; use it in the sandbox.

    Args:
        model: Callable from inputs of shape ``(N, ...)`` to logits of shape ``(N, K)``.
        x: Inputs as the model sees them.
        input_space: What they mean; with its ``std`` s, the chain rule divides derivatives by s.
        twice: Whether ``gram_product`` will be used, which differentiates twice.

    Raises:
        ValueError: If the logits are not finite, do not depend on the inputs, or depend on those of other samples.

    """

    def __init__(self, model: Callable[..., Any], x: Tensor, input_space: InputSpace, twice: bool = False) -> None:
        scale = input_space.scale(x)
        self._function = lambda perturbation: compute_logits(model, x + perturbation / scale)
        self._perturbation = torch.zeros_like(x).requires_grad_()
        # The fused kernels of attention cannot be differentiated twice
        with sdpa_kernel(SDPBackend.MATH) if twice else nullcontext():
            self._logits = self._function(self._perturbation)
            if not self._logits.requires_grad:
                raise ValueError(
                    "Expected logits that can be differentiated but the model cuts the graph, by `detach`, `no_grad` "
                    "or another framework. `fisher_spectral_norm(..., method='blackbox')` needs forward passes only."
                )
            check_finite(self._logits)
        self._transposed: tuple[Tensor, Tensor] | None = None
        self._ways = [self._product_by_double_backward, self._product_by_forward_mode]

    @property
    def rounding(self) -> float:
        """Relative error of products, roughly."""
        return 10 * torch.finfo(self._logits.dtype).eps

    @property
    def logits(self) -> Tensor:
        """Logits of shape ``(N, K)``, float32 or wider, without a graph."""
        return self._logits.detach().to(at_least_float32(self._logits.dtype))

    def transposed_product(self, u: Tensor) -> Tensor:
        """Compute J^T u for u of shape ``(N, K)``, as a tensor of shape ``(N, n)``."""
        # A scale for each sample, since half precision cannot hold the tiny weights of confident samples
        size = u.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(u.dtype).tiny)
        (product,) = torch.autograd.grad(
            self._logits, self._perturbation, (u / size).to(self._logits.dtype), retain_graph=True
        )
        return product.flatten(1).to(u.dtype) * size

    def gram_product(self, u: Tensor) -> Tensor:
        """Compute J J^T u for u of shape ``(N, K)``, as a tensor of the same shape.

        Raises:
            RuntimeError: If the model can be differentiated neither twice nor in forward mode.

        """
        v = self.transposed_product(u)
        squared_norm = v.square().sum(dim=1)
        size = v.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny)
        direction = (v / size).to(self._perturbation.dtype).view_as(self._perturbation)
        cause: Exception | None = None
        while self._ways:
            try:
                result = self._ways[0](direction).to(v.dtype) * size
                # An operation may drop, without an error, what it cannot differentiate. u J J^T u shows it.
                tolerance = 10 * torch.finfo(self._logits.dtype).eps ** 0.5
                if (((u * result).sum(dim=1) - squared_norm).abs() <= tolerance * squared_norm).all():
                    return result
            except torch.OutOfMemoryError:
                raise
            except (NotImplementedError, RuntimeError) as error:
                cause = error
            del self._ways[0]
        raise RuntimeError(
            "The model has operations that can be differentiated neither twice nor in forward mode. Use "
            "`method='exact'` or `method='hutchinson'`, which need first derivatives only."
        ) from cause

    def rows(self) -> Tensor:
        """Compute J itself, shape ``(N, K, n)``."""
        rows = []
        for k in range(self._logits.shape[1]):
            (row,) = torch.autograd.grad(self._logits[:, k].sum(), self._perturbation, retain_graph=True)
            rows.append(row.flatten(1))
        return torch.stack(rows, dim=1).to(self.logits.dtype)

    def _product_by_double_backward(self, v: Tensor) -> Tensor:
        # J^T u is linear in u, and its derivative with respect to u, transposed, is J
        if self._transposed is None:
            u = torch.zeros_like(self._logits).requires_grad_()
            (product,) = torch.autograd.grad(self._logits, self._perturbation, u, create_graph=True)
            self._transposed = u, product
        u, product = self._transposed
        return torch.autograd.grad(product, u, v, retain_graph=True)[0]

    def _product_by_forward_mode(self, v: Tensor) -> Tensor:
        with torch.no_grad(), forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
            dual = forward_ad.unpack_dual(self._function(forward_ad.make_dual(self._perturbation.detach(), v)))
            return torch.zeros_like(self._logits) if dual.tangent is None else dual.tangent


def check_samples_are_independent(model: Callable[..., Any], x: Tensor) -> None:
    """Check on two samples that the logits of one do not depend on the other.

    Raises:
        ValueError: If they do, as with batch statistics.

    """
    if len(x) < 2:
        return
    pair = x[:2].detach().clone().requires_grad_()
    first = compute_logits(model, pair)[0]
    if not first.requires_grad:
        return
    weights = torch.arange(1, len(first) + 1, device=first.device, dtype=first.dtype)
    (gradient,) = torch.autograd.grad((first * weights).sum(), pair, allow_unused=True)
    if gradient is not None and gradient[1].nan_to_num().any():  # NaN is found with the logits
        raise ValueError(
            "Expected a model that treats each sample by itself but the logits of one depend on another. Does a "
            "BatchNorm use the statistics of the batch (in train mode, or with `track_running_stats=False`)? If the "
            "model is wrapped in a function that hides its modules, call `eval()` on it."
        )
