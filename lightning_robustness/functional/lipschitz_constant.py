from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_robustness.functional.jacobian import Jacobian, check_samples_are_independent
from lightning_robustness.utilities.input_space import InputSpace
from lightning_robustness.utilities.precision import at_least_float32
from lightning_robustness.utilities.sandbox import sandbox


def lipschitz_constant(
    model: Callable[..., Any], x: Tensor, input_space: InputSpace | None = None, seed: int = 0
) -> Tensor:
    r"""Compute the local Lipschitz constant of the class probabilities at each sample, lower is more robust.

    .. math::
        L(x) = \max_k \|\nabla_x p_k(x)\|_2 \quad p = \operatorname{softmax}(z(x))

    Where :math:`z` are the logits and :math:`k` runs over the classes. It takes one forward pass and a backward pass
    for each class, for the whole batch at once, in eval mode. A saturated sample has a value near 0, which says that
    probabilities don't change nearby, not that no adversarial example exists.

    Args:
        model: Callable from inputs to logits, or to an output that holds them.
        x: Floating point tensor of shape ``(N, ...)``, as the model sees it.
        input_space: What the inputs mean; values are in un-normalised units. By default inputs are taken as they are.
        seed: Seed of the random state, for models that draw numbers also in eval mode.

    Returns:
        Tensor of shape ``(N,)``, float64 for float64 logits and float32 otherwise.

    Raises:
        TypeError: If the inputs are not floating point.
        ValueError: If the logits are not of shape ``(N, K)``, not finite, cannot be differentiated, or depend on other
            samples, or inputs are outside the range of ``input_space``.

    Example:
        >>> import torch
        >>> from lightning_robustness.functional import lipschitz_constant
        >>> model = torch.nn.Linear(3, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
        >>> lipschitz_constant(model, torch.tensor([[0.0, 0.0, 0.0], [9.0, 0.0, 0.0]]))
        tensor([5.0000e-01, 3.0460e-08])

    """
    space = InputSpace(low=None, high=None) if input_space is None else input_space
    space.check(x)
    with sandbox(model, x, seed=seed) as (x,):
        if len(x) == 0:
            return torch.zeros(0, dtype=at_least_float32(x.dtype), device=x.device)
        check_samples_are_independent(model, x)
        jacobian = Jacobian(model, x, space)
        p = jacobian.logits.softmax(dim=1)
        norms = []
        for k in range(p.shape[1]):
            # Derivative of p_k by the logits, p_k (e_k - p), with 1 - p_k as a sum that does not cancel
            others = p.index_fill(1, torch.tensor([k], device=p.device), 0.0)
            derivative = (-others).index_copy(1, torch.tensor([k], device=p.device), others.sum(dim=1, keepdim=True))
            gradient = jacobian.transposed_product(derivative)
            norms.append(torch.linalg.vector_norm(gradient, dim=1) * p[:, k])
    return torch.stack(norms).amax(dim=0)
