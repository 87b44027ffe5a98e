from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div, nll_loss

from lightning_robustness._arguments import check_number
from lightning_robustness.attacks import PGD
from lightning_robustness.input_space import InputSpace
from lightning_robustness.losses._passes import log_probabilities


def mart_loss(
    model: Callable[..., Any],
    x: Tensor,
    y: Tensor,
    *,
    weight: float = 5.0,
    eps: float = 8 / 255,
    alpha: float = 2 / 255,
    steps: int = 10,
    x_adv: Tensor | None = None,
    input_space: InputSpace | None = None,
    seed: int | None = None,
) -> Tensor:
    r"""Compute the loss of MART (Wang et al., 2020), to be minimised in a training step.

    .. math::
        L = \frac{1}{N} \sum_i -\log p_{y_i}(x'_i) - \log\bigl(1 - \max_{k \ne y_i} p_k(x'_i)\bigr)
          + \lambda \operatorname{KL}\bigl(p(x_i) \,\|\, p(x'_i)\bigr) \bigl(1 - p_{y_i}(x_i)\bigr)

    Where :math:`p` is the softmax of the logits and :math:`x'` maximises the cross-entropy in the l-infinity ball of
    radius ``eps`` around :math:`x`. The first two terms are the boosted cross-entropy; the third one weights samples by
    how little the model believes in their label. PGD looks for :math:`x'` with the model in eval mode, from :math:`x`
    plus noise of standard deviation 0.001, without a trace in the model; the loss itself is computed in the mode that
    the model is in, by a forward pass for :math:`x` and one for :math:`x'`.

    Args:
        model: Callable from inputs to logits: in a ``training_step``, ``self`` or the network in it.
        x: Inputs of shape ``(N, ...)`` as the model sees them.
        y: Labels of shape ``(N,)``.
        weight: Weight :math:`\lambda` of the divergence.
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
        >>> from lightning_robustness.losses import mart_loss
        >>> model = torch.nn.Linear(2, 2)
        >>> model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
        >>> x, y = torch.tensor([[0.75, 0.25]]), torch.tensor([0])
        >>> mart_loss(model, x, y, x_adv=torch.tensor([[0.5, 0.5]]))
        tensor(1.4435, grad_fn=<AddBackward0>)

    """
    check_number("weight", weight)
    check_number("alpha", alpha)
    attack = PGD(eps=eps, alpha=alpha, steps=steps, start="gaussian", loss="cross_entropy", all_steps=True)
    log_p, adv_log_p = log_probabilities(model, x, y, x_adv, attack, input_space, seed)
    y = y.long()
    other = adv_log_p.scatter(1, y.unsqueeze(1), -torch.inf).argmax(dim=1, keepdim=True)
    # log(1 - p) from the other probabilities, which is finite where p rounds to 1
    complement = adv_log_p.scatter(1, other, -torch.inf).logsumexp(dim=1)
    boosted = nll_loss(adv_log_p, y) - complement.mean()
    divergence = kl_div(adv_log_p, log_p, reduction="none", log_target=True).sum(dim=1)
    doubt = 1 - log_p.gather(1, y.unsqueeze(1)).squeeze(1).exp()
    return boosted + weight * (divergence * doubt).mean()
