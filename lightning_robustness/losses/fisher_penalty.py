from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import normalize

from lightning_robustness.functional.batch_statistics import find_training_layers, held_batch_statistics
from lightning_robustness.functional.jacobian import check_samples_are_independent
from lightning_robustness.utilities.checks import check_integer
from lightning_robustness.utilities.input_space import InputSpace
from lightning_robustness.utilities.logits import compute_logits
from lightning_robustness.utilities.precision import accumulation_dtype
from lightning_robustness.utilities.sandbox import find_modules, sandbox

FisherKind = Literal["spectral", "trace"]


class _Products:
    """Products with Q^T, whose rows sqrt(p_k) grad log p_k make up G = Q Q^T, with a graph to the weights."""

    def __init__(self, model: Callable[..., Any], x: Tensor, input_space: InputSpace) -> None:
        self._perturbation = torch.zeros_like(x).requires_grad_()
        self.logits = compute_logits(model, x + self._perturbation / input_space.scale(x))
        log_p = self.logits.to(accumulation_dtype(x.device)).log_softmax(dim=1)
        self._sqrt_p = (log_p / 2).exp()
        self._image: tuple[Tensor, Tensor] | None = None

    def transposed(self, c: Tensor, create_graph: bool = True) -> Tensor:
        """Compute Q c = J^T L^T c for c of shape ``(N, K)``, as a tensor of shape ``(N, n)``."""
        weighted = self._sqrt_p * c
        u = weighted - self._sqrt_p.square() * weighted.sum(dim=1, keepdim=True)
        return self._gradient(u if create_graph else u.detach(), create_graph)

    def gram(self, c: Tensor) -> Tensor:
        """Compute Q^T Q c, without a graph."""
        if self._image is None:
            zero = torch.zeros_like(self.logits).requires_grad_()
            self._image = zero, self._gradient(zero, create_graph=True)
        zero, image = self._image
        # J^T u is linear in u, and its derivative with respect to u, transposed, is J
        (w,) = torch.autograd.grad(image, zero, self.transposed(c, create_graph=False), retain_graph=True)
        sqrt_p = self._sqrt_p.detach()
        return sqrt_p * (w - (sqrt_p.square() * w).sum(dim=1, keepdim=True))

    def rows(self) -> Tensor:
        """Compute Q^T itself, shape ``(N, K, n)``."""
        units = torch.eye(self.logits.shape[1], dtype=self._sqrt_p.dtype, device=self.logits.device)
        return torch.stack([self.transposed(unit.expand_as(self._sqrt_p)) for unit in units], dim=1)

    def start(self) -> Tensor:
        """Unit vector of the predicted class, without its part along sqrt(p), which Q maps to zero."""
        sqrt_p = self._sqrt_p.detach()
        preds = sqrt_p.argmax(dim=1, keepdim=True)
        # Written so that nothing cancels for a confident prediction, where that part is nearly all of it
        others = sqrt_p.scatter(1, preds, 0.0)
        others = others / others.amax(dim=1, keepdim=True).clamp(min=torch.finfo(others.dtype).tiny)
        c = -others * sqrt_p.gather(1, preds)
        c = c.scatter(1, preds, (others * sqrt_p).sum(dim=1, keepdim=True))
        return normalize(c, eps=torch.finfo(c.dtype).tiny)  # zero, as Q is, where all others underflow

    def _gradient(self, u: Tensor, create_graph: bool) -> Tensor:
        u = u.to(self.logits.dtype)
        (product,) = torch.autograd.grad(
            self.logits, self._perturbation, u, create_graph=create_graph, retain_graph=True
        )
        return product.flatten(1)


def _spectral(products: _Products, steps: int | None) -> Tensor:
    if steps is None:
        rows = products.rows()
        return torch.linalg.eigvalsh(rows @ rows.mT)[:, -1]
    c = products.start()
    for _ in range(steps):
        c = normalize(products.gram(c))
    # The derivative of an eigenvalue is that of its Rayleigh quotient at the eigenvector, held fixed
    return products.transposed(c).square().sum(dim=1)


def _trace(products: _Products, draws: int | None) -> Tensor:
    if draws is None:
        return products.rows().square().sum(dim=(1, 2))
    vectors = torch.randn(draws, *products.logits.shape).to(products.logits)
    return torch.stack([products.transposed(w).square().sum(dim=1) for w in vectors]).mean(dim=0)


def fisher_penalty(
    model: Callable[..., Any],
    x: Tensor,
    kind: FisherKind = "spectral",
    *,
    num_products: int | None = None,
    input_space: InputSpace | None = None,
    seed: int | None = None,
) -> Tensor:
    r"""Compute the mean Fisher information of inputs, differentiable in the weights, to be added to a training loss.

    .. math::
        \frac{1}{N} \sum_i \|G(x_i)\|_2 \quad \text{or} \quad \frac{1}{N} \sum_i \operatorname{tr} G(x_i),
        \qquad G = \sum_k p_k \, \nabla_x \log p_k \, (\nabla_x \log p_k)^T

    Where :math:`p` is the softmax of the logits. With ``kind="spectral"`` and exact, it is the mean of
    :func:`~lightning_robustness.functional.fisher_spectral_norm`. The model is evaluated in eval mode, without autocast
    and in eager mode, except for BatchNorm layers that are in train mode: these normalise by the statistics of the
    batch, as they do in training, but each sample has derivatives of its own. (With running statistics, which lag
    behind the weights, training would find weights with a small penalty and a broken network.) The weights get
    gradients as by any other loss; everything else is left as it was.

    Args:
        model: Callable from inputs to logits: in a ``training_step``, ``self`` or the network in it.
        x: Inputs of shape ``(N, ...)`` as the model sees them; a part of a batch will do.
        kind: ``"spectral"`` for the largest eigenvalue of :math:`G`, ``"trace"`` for the sum of all.
        num_products: By default the value is exact, from K products with the Jacobian, which is for few classes. With
            a number, whatever K is: for the largest eigenvalue, so many steps of power iteration from the predicted
            class, each two products, and one for the value, a lower bound; for the trace, the mean over so many random
            vectors, without bias.
        input_space: What the inputs mean: values are in un-normalised units, and inputs outside of its range are
            refused. By default inputs are taken as they are.
        seed: Seed of the random vectors; by default drawn from torch's random state.

    Returns:
        Scalar tensor, differentiable in the weights of the model.

    Raises:
        TypeError: If the inputs are not floating point.
        ValueError: If a sample's logits depend on other samples, inputs are out of range, or an argument is not as
            described.

    Example:
        >>> import torch
        >>> from lightning_robustness.losses import fisher_penalty
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[2.0, 0.0], [0.0, 0.0]]))
        >>> penalty = fisher_penalty(model, torch.zeros(1, 2))
        >>> penalty.backward()
        >>> penalty.detach(), model.weight.grad.round(decimals=4)
        (tensor(1.0000), tensor([[ 1.,  0.],
                [-1.,  0.]]))

    """
    if kind not in get_args(FisherKind):
        raise ValueError(f"Expected argument `kind` to be one of {get_args(FisherKind)} but got {kind!r}.")
    if num_products is not None:
        check_integer("num_products", num_products, minimum=1)
    space = InputSpace(low=None, high=None) if input_space is None else input_space
    space.check(x)
    weights = [p for module in find_modules(model) for p in module.parameters() if p.requires_grad]
    layers = find_training_layers(model)
    if seed is None:
        is_random = kind == "trace" and num_products is not None
        seed = int(torch.randint(2**31, ())) if is_random else 0
    # The fused kernels of attention cannot be differentiated twice
    with sandbox(model, x, seed=seed) as (x,), sdpa_kernel(SDPBackend.MATH):
        check_samples_are_independent(model, x)
        for weight in weights:
            weight.requires_grad_()
        with held_batch_statistics(layers, lambda: model(x)):
            products = _Products(model, x, space)
        return (_spectral if kind == "spectral" else _trace)(products, num_products).mean()
