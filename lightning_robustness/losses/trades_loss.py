from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.functional import kl_div, nll_loss

from lightning_robustness._arguments import check_number
from lightning_robustness.attacks import PGD
from lightning_robustness.input_space import InputSpace
from lightning_robustness.losses._passes import log_probabilities


def trades_loss(
    model: Callable[..., Any],
    x: Tensor,
    y: Tensor,
    *,
    weight: float = 6.0,
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
          + w \operatorname{KL}\bigl(p(x_i) \,\|\, p(x'_i)\bigr)

    Where :math:`p` is the softmax of the logits and :math:`x'` maximises the divergence in the l-infinity ball of
    radius ``eps`` around :math:`x`. PGD looks for it with the model in eval mode, from :math:`x` plus noise of
    standard deviation 0.001, without a trace in the model; the loss itself is computed in the mode that the model is
    in, by a forward pass for :math:`x` and one for :math:`x'`. With a ``weight`` of 0 it is the cross-entropy.

    Args:
        model: Callable from inputs to logits: in a ``training_step``, ``self`` or the network in it.
        x: Inputs of shape ``(N, ...)`` as the model sees them.
        y: Labels of shape ``(N,)``.
        weight: Weight of the divergence.
        eps: Radius of the ball, in un-normalised units.
        alpha: Size of a step of the search, in un-normalised units.
        steps: Number of its steps, each one gradient.
        x_adv: Adversarial inputs from elsewhere, as the model sees them, instead of the search.
        input_space: Range and normalisation of the inputs; by default [0, 1], not normalised.
        seed: Seed of the noise; by default drawn from torch's random state.

    Returns:
        Scalar tensor, differentiable in the weights of the model.

    Raises:
        TypeError: If the inputs are not floating point or the labels not integers.
        ValueError: If inputs are out of range, or an argument is, or the model cannot be differentiated.

    Example:
        >>> import torch
        >>> from lightning_robustness.losses import trades_loss
        >>> model = torch.nn.Linear(2, 2)
        >>> model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
        >>> x, y = torch.tensor([[0.75, 0.25]]), torch.tensor([0])
        >>> trades_loss(model, x, y, weight=0.0), trades_loss(model, x, y, x_adv=torch.tensor([[0.5, 0.5]]))
        (tensor(0.4741, grad_fn=<AddBackward0>), tensor(0.6559, grad_fn=<AddBackward0>))

    """
    check_number("weight", weight)
    check_number("alpha", alpha)
    attack = PGD(eps=eps, alpha=alpha, steps=steps, start="gaussian", loss="kl", all_steps=True)
    log_p, adv_log_p = log_probabilities(model, x, y, x_adv, attack, input_space, seed)
    return nll_loss(log_p, y.long()) + weight * kl_div(adv_log_p, log_p, reduction="batchmean", log_target=True)
