"""Penalties of how logits change with the inputs, which can be differentiated in the weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_robustness._arguments import check_integer, check_labels, check_not_empty, check_number, check_option
from lightning_robustness._isolation.references import find_modules
from lightning_robustness._model.access import mend_gradients
from lightning_robustness._numbers import at_least_float32, decompose
from lightning_robustness.functional._fisher_estimators import FisherOperator
from lightning_robustness.functional._jacobian import InputJacobian, opened
from lightning_robustness.functional.boundary_distance import BoundaryNorm, margins_and_slopes
from lightning_robustness.input_space import InputSpace

FisherKind = Literal["spectral", "trace"]


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


def boundary_penalty(
    model: Callable[..., Any],
    x: Tensor,
    y: Tensor,
    *,
    margin: float = 8 / 255,
    norm: BoundaryNorm = "linf",
    num_rivals: int = 1,
    input_space: InputSpace | None = None,
    seed: int = 0,
) -> Tensor:
    r"""Compute a hinge that asks for a distance to the decision boundary, to be added to a training loss.

    .. math::
        \frac{1}{N} \sum_i \max_{j \neq y_i} \max\bigl(m \, \|\nabla g_{ij}(x_i)\|_q - g_{ij}(x_i), 0\bigr)
        \quad g_{ij} = z_{y_i} - z_j

    Where :math:`z` are the logits, :math:`m` is the distance to ask for and :math:`q` the dual of the norm of
    perturbations. A sample adds nothing if its distance to the boundary, to first order, is at least :math:`m`; see
    :func:`~lightning_robustness.functional.boundary_distance`. Otherwise it adds the logits by which a perturbation of
    size :math:`m` would cross the boundary. That is the hinge loss of the linearised model under attack.

    The model is evaluated in eval mode, without autocast and in eager mode, except for BatchNorm layers in train mode:
    these normalise by the statistics of the batch, held fixed when a sample is differentiated with respect to its
    input. The weights get gradients as from any other loss; everything else is left as it was. It takes a forward pass,
    a backward pass per rival, and the backward pass through both.

    Args:
        model: Callable from inputs to logits: in a ``training_step``, ``self`` or the network in it.
        x: Inputs of shape ``(N, ...)`` as the model sees them; part of a batch is enough.
        y: Labels of shape ``(N,)``.
        margin: Distance to ask for, in un-normalised units.
        norm: Norm of the perturbations, ``"linf"`` or ``"l2"``.
        num_rivals: Number of rival classes to look at, those with the highest logits.
        input_space: Range and normalisation of the inputs, by default values in [0, 1] that are not normalised.
        seed: Seed of the random state, for models that draw random numbers even in eval mode.

    Returns:
        Scalar tensor, float64 for float64 inputs and float32 otherwise, differentiable in the weights of the model.

    Raises:
        TypeError: If the inputs are not floating point, or the labels not integers.
        ValueError: If the logits cannot be differentiated or depend on other samples, inputs are outside the range,
            labels do not fit, or an argument is not as described.

    Example:
        >>> import torch
        >>> from lightning_robustness.losses import boundary_penalty
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
        >>> x, y = torch.tensor([[1.0, 0.5], [1.0, 0.0]]), torch.tensor([0, 0])
        >>> boundary_penalty(model, x, y, margin=0.25)  # distances are 1/7 and 3/7, both gradients have an l1 norm of 7
        tensor(0.3750, grad_fn=<MeanBackward0>)

    """
    check_number("margin", margin, exclusive=True)
    check_integer("num_rivals", num_rivals, minimum=1)
    check_option("norm", norm, BoundaryNorm)
    with training_jacobian(model, x, input_space, seed) as jacobian:  # checks the inputs
        check_labels("y", y, len(x))
        margins, slopes = margins_and_slopes(jacobian, y.to(x.device), norm, num_rivals)
        # Without the division of a distance, whose derivative is infinite where a slope vanishes
        lacking = (margin * slopes - margins).amax(dim=1).clamp(min=0)
        return mend_gradients(lacking.mean().to(at_least_float32(x.dtype)))


def find_training_layers(model: Callable[..., Any]) -> list[_BatchNorm]:
    """Find the BatchNorm layers of a model that are in train mode, which normalise by the statistics of the batch."""
    modules = dict.fromkeys(module for root in find_modules(model) for module in root.modules())
    return [module for module in modules if isinstance(module, _BatchNorm) and module.training]


@contextmanager
def held_batch_statistics(layers: list[_BatchNorm], run: Callable[[], Any]) -> Iterator[None]:
    """Normalise the next pass of BatchNorm layers by the statistics of a first one, which is run here.

    Derivatives with respect to the weights go through the statistics. Derivatives with respect to the inputs of the
    next pass do not, so each sample has its own.
    """
    statistics: list[tuple[Tensor, Tensor]] = []
    is_recording = True

    def normalize(layer: _BatchNorm, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x = args[0]
        if is_recording:
            if x.numel() == x.shape[1]:  # torch refuses it in training, too: there is no variance
                raise ValueError(
                    "Expected at least two values per channel for a BatchNorm in train mode, which normalises by the "
                    f"statistics of the batch, but got inputs of shape {tuple(x.shape)}. Pass more samples."
                )
            statistics.append(torch.var_mean(x, dim=[0, *range(2, x.ndim)], correction=0))
            variance, mean = statistics[-1]
        else:
            variance, mean = statistics.pop(0)  # layers run in the same order, some perhaps twice
        scale = torch.rsqrt(variance + layer.eps)
        scale = scale if layer.weight is None else scale * layer.weight
        shift = -mean * scale if layer.bias is None else layer.bias - mean * scale
        shape = (1, -1, *[1] * (x.ndim - 2))
        return x * scale.reshape(shape) + shift.reshape(shape)

    hooks = [layer.register_forward_hook(normalize) for layer in layers]
    try:
        if layers:
            run()
        is_recording = False
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def training_jacobian(
    model: Callable[..., Any], x: Tensor, input_space: InputSpace | None = None, seed: int = 0
) -> Iterator[InputJacobian]:
    """Open a sandbox with a Jacobian that can be differentiated in the weights, for a training loss.

    BatchNorm layers in train mode normalise by the statistics of the batch, held fixed with respect to inputs. With
    running statistics, which lag behind, training would find weights with a small penalty and a broken network.
    """
    weights = [p for module in find_modules(model) for p in module.parameters() if p.requires_grad]
    layers = find_training_layers(model)
    with opened(model, x, input_space, seed, precise=False) as (x, space):
        check_not_empty("x", x)
        for weight in weights:
            weight.requires_grad_()
        with held_batch_statistics(layers, lambda: model(x)):
            jacobian = InputJacobian(model, x, space, create_graph=True)
        yield jacobian
