from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_robustness._arguments import check_integer, check_labels, check_number
from lightning_robustness._model.access import mend_gradients
from lightning_robustness._numbers import at_least_float32
from lightning_robustness.functional.boundary_distance import BoundaryNorm, _check_arguments, margins_and_slopes
from lightning_robustness.input_space import InputSpace
from lightning_robustness.losses._passes import training_jacobian


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
    _check_arguments(norm, num_rivals, None)
    with training_jacobian(model, x, input_space, seed) as jacobian:  # checks the inputs
        check_labels("y", y, len(x))
        margins, slopes = margins_and_slopes(jacobian, y.to(x.device), norm, num_rivals)
        # Without the division of a distance, whose derivative is infinite where a slope vanishes
        lacking = (margin * slopes - margins).amax(dim=1).clamp(min=0)
        return mend_gradients(lacking.mean().to(at_least_float32(x.dtype)))
