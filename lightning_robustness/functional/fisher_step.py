from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_robustness._arguments import check_number, check_option
from lightning_robustness.functional._fisher_estimators import FisherComponents
from lightning_robustness.functional.boundary_distance import BoundaryNorm
from lightning_robustness.functional.fisher_spectral_norm import FisherMethod, fisher_spectral_norm
from lightning_robustness.input_space import InputSpace

_UNBOUNDED = InputSpace(low=None, high=None)


def fisher_step(
    model: Callable[..., Any],
    x: Tensor,
    y: Tensor | None = None,
    *,
    eps: float,
    norm: BoundaryNorm = "l2",
    method: FisherMethod = "auto",
) -> Tensor:
    r"""Attack by one step along the principal eigenvector of the Fisher information, which needs no labels.

    .. math:: x' = x + \epsilon v \quad \text{(l2)} \qquad x' = x + \epsilon \operatorname{sign}(v) \quad \text{(linf)}

    Where :math:`v` is the direction that :func:`~lightning_robustness.functional.fisher_spectral_norm` returns, along
    which the prediction changes most to second order. FGSM is the same step along the gradient of the loss. With
    ``functools.partial(fisher_step, eps=...)`` it can be used wherever an attack is expected.

    Args:
        model: Callable from inputs of shape ``(N, ...)`` to logits; in an attack, it takes un-normalised inputs.
        x: Floating point tensor of un-normalised inputs; results stay in the model's range where it has one, as the
            models that attacks get do.
        y: Labels, which are ignored; attacks are called with them.
        eps: Length of the step.
        norm: Norm in which it is measured.
        method: How the direction is computed.

    Returns:
        Tensor of the shape of ``x``.

    Raises:
        ValueError: If an argument is not as described.

    Example:
        >>> import torch
        >>> from lightning_robustness.functional import fisher_step
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        >>> fisher_step(model, torch.tensor([[0.5, 0.5]]), eps=0.1)
        tensor([[0.4400, 0.4200]])

    """
    check_number("eps", eps)
    check_option("norm", norm, BoundaryNorm)
    found = fisher_spectral_norm(model, x, method, input_space=_UNBOUNDED, return_direction=True)
    assert isinstance(found, FisherComponents) and found.direction is not None  # noqa: PT018
    step = found.direction if norm == "l2" else found.direction.sign()
    low, high = getattr(model, "low", None), getattr(model, "high", None)
    x_adv = x + eps * step.to(x.dtype)
    return x_adv if low is None and high is None else torch.clamp(x_adv, low, high)
