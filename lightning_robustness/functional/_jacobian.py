"""Products with the Jacobian of a model's logits, for every sample of a batch at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import one_hot

from lightning_robustness._isolation.sandbox import sandbox
from lightning_robustness._model.access import (
    check_differentiable,
    check_finite,
    compute_logits,
    mend_gradients,
    nonfinite_rows,
    warn_of_nonfinite_gradients,
)
from lightning_robustness._numbers import at_least_float32
from lightning_robustness.input_space import InputSpace, check_input_space

# Up to this many classes, one vector-Jacobian product per class is cheaper than the iterations that avoid it
FEW_CLASSES = 12


class InputJacobian:
    """Jacobian J of the logits with respect to the un-normalised inputs, one K x n matrix per sample.

    One object holds one forward pass, so everything that is computed from it shares that pass, and everything that
    needs all of J shares the K backward passes of ``rows``. To be used inside the sandbox.
    """

    def __init__(
        self, model: Callable[..., Any], x: Tensor, space: InputSpace, create_graph: bool = False, twice: bool = False
    ) -> None:
        scale = space.scale(x)
        self._restrict = lambda samples: InputJacobian(model, x[samples], space, create_graph, twice)
        self._function = lambda perturbation: compute_logits(model, x + perturbation / scale)
        self._perturbation = torch.zeros_like(x).requires_grad_()
        self._create_graph = create_graph
        # The fused attention kernels cannot be differentiated twice
        with sdpa_kernel(SDPBackend.MATH) if twice or create_graph else nullcontext():
            self._logits = self._function(self._perturbation)
        remedy = "pass `fim_method='blackbox'` and `attacks=['square']`, or `method='blackbox'` to a single function"
        check_differentiable(self._logits, otherwise=remedy)
        if not create_graph:  # in training, a NaN is a matter for the loss
            check_finite(self._logits)
        # Samples whose gradients are not finite: there, they count as zero; None before the first gradient
        self.nonfinite: Tensor | None = None
        self._rows: Tensor | None = None
        self._transposed: tuple[Tensor, Tensor] | None = None
        self._ways = [self._product_by_double_backward, self._product_by_forward_mode]

    @property
    def rounding(self) -> float:
        """Approximate relative error of the products."""
        return 10 * torch.finfo(self._logits.dtype).eps

    @property
    def logits(self) -> Tensor:
        """Logits of shape ``(N, K)``, float32 or wider."""
        logits = self._logits if self._create_graph else self._logits.detach()
        return logits.to(at_least_float32(logits.dtype))

    @property
    def has_rows(self) -> bool:
        """Return whether all rows were computed and are kept."""
        return self._rows is not None

    def restrict(self, samples: Tensor) -> "InputJacobian":
        """Return the Jacobian of some of the samples, by their indices, with a forward pass of its own."""
        return self._restrict(samples)

    def rows(self) -> Tensor:
        """Return J itself, shape ``(N, K, n)``, from one backward pass per class; computed once and kept."""
        if self._rows is None:
            logits = self._logits.unbind(dim=1)
            rows = [self._gradient(logit.sum(), None, self._create_graph) for logit in logits]
            self._rows = torch.stack(rows, dim=1).to(self.logits.dtype)
        return self._rows

    def transposed_product(self, u: Tensor) -> Tensor:
        """Compute J^T u for u of shape ``(N, K)``, as a tensor of shape ``(N, n)``."""
        return self._transposed_product(u, self._create_graph)

    def margin_gradient(self, classes: Tensor, rivals: Tensor) -> Tensor:
        """Compute the gradient of the margin of a class of each sample over another one.

        It takes a subtraction where all rows are kept, and one product otherwise.
        """
        if self._rows is not None:
            samples = torch.arange(len(classes), device=classes.device)
            return self._rows[samples, classes] - self._rows[samples, rivals]
        num_classes = self._logits.shape[1]
        return self.transposed_product((one_hot(classes, num_classes) - one_hot(rivals, num_classes)).to(self.logits))

    def gram_product(self, u: Tensor) -> Tensor:
        """Compute J J^T u for u of shape ``(N, K)``, as a tensor of the same shape, without a graph."""
        v = self._transposed_product(u.detach(), create_graph=False)
        squared_norm = v.square().sum(dim=1)
        size = _size(v)
        direction = (v / size).to(self._perturbation.dtype).view_as(self._perturbation)
        if self._create_graph:
            return self._product_by_double_backward(direction).to(v.dtype) * size
        cause: Exception | None = None
        while self._ways:
            try:
                result = self._ways[0](direction).to(v.dtype) * size
                # Some operations silently drop derivatives that they do not support; u^T J J^T u reveals it, up to the
                # rounding error of the sum, which is all of it where u is in the null space of J^T
                rounding = 10 * self.rounding * _length(u) * _length(result)
                tolerance = 10 * torch.finfo(self._logits.dtype).eps ** 0.5 * squared_norm + rounding
                if (((u * result).sum(dim=1) - squared_norm).abs() <= tolerance).all():
                    return result
            except torch.OutOfMemoryError:
                raise
            except (NotImplementedError, RuntimeError) as error:
                cause = error
            del self._ways[0]
        raise RuntimeError(
            "The model has operations that can be differentiated neither twice nor in forward mode. Use "
            "`method='exact'` or `method='rayleigh'`, which need first derivatives only."
        ) from cause

    def _gradient(self, outputs: Tensor, weights: Tensor | None, create_graph: bool) -> Tensor:
        options: dict[str, Any] = {"retain_graph": True, "create_graph": create_graph}
        (gradient,) = torch.autograd.grad(outputs, self._perturbation, weights, **options)
        if self.nonfinite is None and self._note(gradient):  # it shows in the gradient of any logit
            mend_gradients(self._logits)
            (gradient,) = torch.autograd.grad(outputs, self._perturbation, weights, **options)
        return gradient.flatten(1)

    def _note(self, derivative: Tensor) -> bool:
        """Note the samples at which an operation has no derivative, and tell whether there are any."""
        found = nonfinite_rows(derivative)
        self.nonfinite = found if self.nonfinite is None else self.nonfinite | found
        if found.any():
            warn_of_nonfinite_gradients()
        return bool(found.any())

    def _transposed_product(self, u: Tensor, create_graph: bool) -> Tensor:
        # Scaled per sample, since half precision cannot hold the tiny weights of confident samples
        size = _size(u)
        return self._gradient(self._logits, (u / size).to(self._logits.dtype), create_graph).to(u.dtype) * size

    def _product_by_double_backward(self, v: Tensor) -> Tensor:
        # J^T u is linear in u, and its derivative with respect to u, transposed, is J
        if self._transposed is None:
            u = torch.zeros_like(self._logits).requires_grad_()
            self._transposed = u, self._gradient(self._logits, u, create_graph=True)
        u, product = self._transposed
        (result,) = torch.autograd.grad(product, u, v.flatten(1), retain_graph=True)
        if not result.isfinite().all():  # of second derivatives, where the first are finite
            self._note(result)
            mend_gradients(product)
            (result,) = torch.autograd.grad(product, u, v.flatten(1), retain_graph=True)
        return result

    def _product_by_forward_mode(self, v: Tensor) -> Tensor:
        with torch.no_grad(), forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
            dual = forward_ad.unpack_dual(self._function(forward_ad.make_dual(self._perturbation.detach(), v)))
            return torch.zeros_like(self._logits) if dual.tangent is None else dual.tangent


def _length(vectors: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vectors, dim=1)


def _size(vectors: Tensor) -> Tensor:
    """Largest absolute entry of each row, to divide by."""
    return vectors.detach().abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(vectors.dtype).tiny)


@contextmanager
def opened(
    model: Callable[..., Any], x: Tensor, input_space: InputSpace | None, seed: int, precise: bool = True
) -> Iterator[tuple[Tensor, InputSpace]]:
    """Check inputs and open a sandbox in which each sample is measured by itself: the way into every such function."""
    space = check_input_space(input_space)
    space.check(x)
    with sandbox(model, x, seed=seed, precise=precise) as (x,):
        check_samples_are_independent(model, x)
        yield x, space


def check_samples_are_independent(model: Callable[..., Any], x: Tensor) -> None:
    """Check on two samples that the logits of one do not depend on the other."""
    if len(x) < 2:
        return
    pair = x[:2].detach().clone().requires_grad_()
    first = compute_logits(model, pair)[0]
    if not first.requires_grad:
        return
    weights = torch.arange(1, len(first) + 1, device=first.device, dtype=first.dtype)
    try:
        (gradient,) = torch.autograd.grad((first * weights).sum(), pair, allow_unused=True)
    except RuntimeError:  # operations without a derivative, of which outputs alone may be needed
        return
    if gradient is not None and gradient[1].nan_to_num().any():  # NaN is reported by the check of the logits
        raise ValueError(
            "Expected a model that treats each sample by itself but the logits of one depend on another. Does a "
            "BatchNorm use the statistics of the batch (in train mode, or with `track_running_stats=False`)? If the "
            "model is wrapped in a function that hides its modules, call `eval()` on it."
        )
