from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lightning_robustness._arguments import check_integer, check_option
from lightning_robustness._model.access import mend_gradients
from lightning_robustness._numbers import at_least_float32, decompose
from lightning_robustness.functional._fisher_estimators import FisherOperator
from lightning_robustness.input_space import InputSpace
from lightning_robustness.losses._passes import training_jacobian

FisherKind = Literal["spectral", "trace"]


def _spectral(operator: FisherOperator, steps: int | None) -> Tensor:
    if steps is None:
        return decompose(torch.linalg.eigvalsh, operator.gram())[:, -1]
    c = operator.start()
    for _ in range(steps):
        c = normalize(operator.gram_product(c))
    # An eigenvalue has the derivative of its Rayleigh quotient with the eigenvector held fixed
    return operator.transposed_product(c).square().sum(dim=1)


def _trace(operator: FisherOperator, draws: int | None) -> Tensor:
    if draws is None:
        return operator.gram().diagonal(dim1=1, dim2=2).sum(dim=1)
    # Hutchinson's estimator
    vectors = torch.randn(draws, *operator.p.shape).to(operator.p)
    return torch.stack([operator.transposed_product(w).square().sum(dim=1) for w in vectors]).mean(dim=0)


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

    Where :math:`p` is the softmax of the logits. With ``kind="spectral"`` and no ``num_products``, it is the mean of
    :func:`~lightning_robustness.functional.fisher_spectral_norm`. The model is evaluated in eval mode, without autocast
    and in eager mode, except for BatchNorm layers in train mode: these normalise by the statistics of the batch, as
    they do in training, but these statistics are held fixed when a sample is differentiated with respect to its input.
    (With running statistics, which lag behind the weights, training would find weights with a small penalty and a
    broken network.) The weights get gradients as from any other loss; everything else is left as it was.

    Args:
        model: Callable from inputs to logits: in a ``training_step``, ``self`` or the network in it.
        x: Inputs of shape ``(N, ...)`` as the model sees them; part of a batch is enough.
        kind: ``"spectral"`` for the largest eigenvalue of :math:`G`, ``"trace"`` for the sum of all.
        num_products: By default the value is exact, from K products with the Jacobian, which suits few classes. A
            number makes the cost independent of K: for the largest eigenvalue, it is the number of steps of power
            iteration from the predicted class, which gives a lower bound, with two products per step and one for the
            value; for the trace, the number of random vectors of Hutchinson's estimator, which is unbiased.
        input_space: Range and normalisation of the inputs, by default values in [0, 1] that are not normalised. The
            penalty is in un-normalised units.
        seed: Seed of the random vectors; by default drawn from torch's random state.

    Returns:
        Scalar tensor, float64 for float64 inputs and float32 otherwise, differentiable in the weights of the model.

    Raises:
        TypeError: If the inputs are not floating point.
        ValueError: If the logits cannot be differentiated or depend on other samples, inputs are outside the range, or
            an argument is not as described.

    Example:
        >>> import torch
        >>> from lightning_robustness.losses import fisher_penalty
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[2.0, 0.0], [0.0, 0.0]]))
        >>> penalty = fisher_penalty(model, torch.zeros(1, 2))
        >>> penalty.backward()
        >>> penalty.detach(), model.weight.grad.round(decimals=4)
        (tensor(1.), tensor([[ 1.,  0.],
                [-1.,  0.]]))

    """
    check_option("kind", kind, FisherKind)
    if num_products is not None:
        check_integer("num_products", num_products, minimum=1)
    if seed is None:
        is_random = kind == "trace" and num_products is not None
        seed = int(torch.randint(2**31, ())) if is_random else 0
    with training_jacobian(model, x, input_space, seed) as jacobian:
        values = (_spectral if kind == "spectral" else _trace)(FisherOperator(jacobian), num_products)
        return mend_gradients(values.mean().to(at_least_float32(x.dtype)))
