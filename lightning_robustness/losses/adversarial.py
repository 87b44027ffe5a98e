"""Losses of adversarial training, which compare the predictions of inputs and of adversarial ones."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div, nll_loss

from lightning_robustness._arguments import check_classes, check_labels, check_not_empty, check_number, check_tensor
from lightning_robustness._model.access import compute_logits
from lightning_robustness._numbers import at_least_float32
from lightning_robustness.attacks import PGD
from lightning_robustness.attacks._steps import PGDLoss
from lightning_robustness.attacks.attack import check_budgets
from lightning_robustness.input_space import InputSpace


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
    attack = _published_pgd("kl", eps, alpha, steps)
    log_p, adv_log_p = log_probabilities(model, x, y, x_adv, attack, input_space, seed)
    return nll_loss(log_p, y.long()) + weight * kl_div(adv_log_p, log_p, reduction="batchmean", log_target=True)


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
    attack = _published_pgd("cross_entropy", eps, alpha, steps)
    log_p, adv_log_p = log_probabilities(model, x, y, x_adv, attack, input_space, seed)
    y = y.long()
    other = adv_log_p.scatter(1, y.unsqueeze(1), -torch.inf).argmax(dim=1, keepdim=True)
    # log(1 - p) from the other probabilities, which is finite where p rounds to 1
    complement = adv_log_p.scatter(1, other, -torch.inf).logsumexp(dim=1)
    boosted = nll_loss(adv_log_p, y) - complement.mean()
    divergence = kl_div(adv_log_p, log_p, reduction="none", log_target=True).sum(dim=1)
    doubt = 1 - log_p.gather(1, y.unsqueeze(1)).squeeze(1).exp()
    return boosted + weight * (divergence * doubt).mean()


def _published_pgd(loss: PGDLoss, eps: float, alpha: float, steps: int) -> PGD:
    """Return the search of both papers, from the input with noise."""
    check_number("alpha", alpha)
    return PGD(eps=eps, alpha=alpha, steps=steps, start="gaussian", loss=loss, all_steps=True)


def log_probabilities(
    model: Callable[..., Any],
    x: Tensor,
    y: Tensor,
    x_adv: Tensor | None,
    attack: PGD,
    input_space: InputSpace | None,
    seed: int | None,
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities of clean and of adversarial inputs, in float32 or wider also under mixed precision.

    Without ``x_adv``, the attack finds adversarial inputs; the other arguments are as for ``trades_loss``.
    """
    check_budgets([attack], input_space, smallest=0.0)
    if x_adv is None:
        seed = int(torch.randint(2**31, ())) if seed is None else seed
        x_adv = attack(model, x, y, input_space=input_space, seed=seed)
        highest_label = -1  # the attack has checked the labels
    else:
        highest_label = _check(x, y, x_adv)
    check_not_empty("x", x)
    logits, adv_logits = (compute_logits(model, inputs) for inputs in (x, x_adv))
    check_classes("y", None, highest_label, logits.shape[1])
    dtype = at_least_float32(logits.dtype)
    return logits.to(dtype).log_softmax(dim=1), adv_logits.to(dtype).log_softmax(dim=1)


def _check(x: Tensor, y: Tensor, x_adv: Tensor) -> int:
    """Check the arguments given with adversarial inputs from elsewhere, and return the highest label."""
    check_tensor("x", x)
    check_tensor("x_adv", x_adv)
    if x.ndim < 2 or x_adv.shape != x.shape:
        raise ValueError(
            f"Expected `x` of shape (N, ...) and `x_adv` of the same but got {tuple(x.shape)} and "
            f"{tuple(x_adv.shape)}. Pass one adversarial input per sample, or leave `x_adv` out."
        )
    return check_labels("y", y, len(x))
