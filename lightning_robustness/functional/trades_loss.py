from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.functional import kl_div, nll_loss

from lightning_robustness.functional.inner_maximization import log_softmax, maximize
from lightning_robustness.utilities.input_space import InputSpace
from lightning_robustness.utilities.logits import compute_logits


def _trades_loss_compute(logits: Tensor, adv_logits: Tensor, y: Tensor, beta: float) -> Tensor:
    log_p, adv_log_p = log_softmax(logits), log_softmax(adv_logits)
    return nll_loss(log_p, y) + beta * kl_div(adv_log_p, log_p, reduction="batchmean", log_target=True)


def trades_loss(
    model: Callable[..., Any],
    x: Tensor,
    y: Tensor,
    *,
    beta: float = 6.0,
    eps: float = 8 / 255,
    alpha: float = 2 / 255,
    steps: int = 10,
    x_adv: Tensor | None = None,
    input_space: InputSpace | None = None,
    seed: int | None = None,
) -> Tensor:
    r"""Compute the loss of TRADES (Zhang et al., 2019), to be minimised in a training step.

    .. math::
        L = \frac{1}{N} \sum_i -\log p_{y_i}(x_i)
          + \beta \operatorname{KL}\bigl(p(x_i) \,\|\, p(x'_i)\bigr)

    Where :math:`p` is the softmax of the logits and :math:`x'` maximises the divergence in the l-infinity ball of
    radius ``eps`` around :math:`x`. It is looked for with the model in eval mode, from :math:`x` plus noise of standard
    deviation 0.001, without a trace in the model; the loss itself is computed in the mode that the model is in, by a
    forward pass for :math:`x` and one for :math:`x'`. With ``beta`` 0 it is the cross-entropy.

    Args:
        model: Callable from inputs to logits: in a ``training_step``, ``self`` or the network in it.
        x: Inputs of shape ``(N, ...)`` as the model sees them.
        y: Labels of shape ``(N,)``.
        beta: Weight of the divergence.
        eps: Radius of the ball, in un-normalised units.
        alpha: Size of a step of the search, likewise.
        steps: Number of its steps, each one gradient.
        x_adv: Adversarial inputs from elsewhere, as the model sees them, instead of the search.
        input_space: Range and normalisation of the inputs; by default [0, 1].
        seed: Seed of the noise; by default drawn from torch's random state, so that it differs from call to call and
            the run is reproducible by its seed.

    Returns:
        Scalar tensor, differentiable in the weights of the model.

    Raises:
        TypeError: If the inputs are not floating point.
        ValueError: If inputs are out of range, or an argument is, or the model cannot be differentiated.

    Example:
        >>> import torch
        >>> from lightning_robustness.functional import trades_loss
        >>> model = torch.nn.Linear(2, 2)
        >>> model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
        >>> x, y = torch.tensor([[0.75, 0.25]]), torch.tensor([0])
        >>> trades_loss(model, x, y, beta=0.0), trades_loss(model, x, y, x_adv=torch.tensor([[0.5, 0.5]]))
        (tensor(0.4741, grad_fn=<AddBackward0>), tensor(0.6559, grad_fn=<AddBackward0>))

    """
    if not beta >= 0:
        raise ValueError(f"Expected argument `beta` to be non-negative but got {beta}.")
    if x_adv is None:
        x_adv = maximize(model, x, eps=eps, alpha=alpha, steps=steps, input_space=input_space, seed=seed)
    return _trades_loss_compute(compute_logits(model, x), compute_logits(model, x_adv), y, beta)
