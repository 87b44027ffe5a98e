from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_robustness._arguments import check_flag, check_integer_tensor, check_labels, check_share, check_tensor


class AttackSuccessComponents(NamedTuple):
    """Attack success rate, the rates that are easily mistaken for it, and the numbers of samples behind them."""

    asr: Tensor
    asr_low: Tensor
    asr_high: Tensor
    error_rate: Tensor
    adv_acc: Tensor
    distortion: Tensor
    flipped: Tensor
    correct: Tensor
    wrong: Tensor
    count: Tensor  # type: ignore[assignment]  # tuples have a method of this name


def _attack_success_rate_update(
    preds: Tensor, adv_preds: Tensor, target: Tensor, distortion: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return which samples are right before the attack and wrong after it, and their distortions, NaN if unknown."""
    check_integer_tensor("preds", preds)
    for name, labels in {"preds": preds, "adv_preds": adv_preds, "target": target}.items():
        check_labels(name, labels, preds.numel())
    correct, wrong = preds == target, adv_preds != target
    if distortion is None:
        return correct, wrong, torch.full(preds.shape, torch.nan, device=preds.device)
    check_tensor("distortion", distortion)
    if distortion.shape != preds.shape:
        raise ValueError(
            f"Expected `distortion` to have shape {tuple(preds.shape)}, one value per sample, but got "
            f"{tuple(distortion.shape)}."
        )
    return correct, wrong, torch.where(wrong, distortion, torch.inf)


def _attack_success_rate_compute(
    correct: Tensor, wrong: Tensor, distortion: Tensor, confidence: float
) -> AttackSuccessComponents:
    """Compute the rates, and the lower median of the distortions, of which failures are infinite."""
    flipped, count = (correct & wrong).sum(), torch.full((), len(correct), device=correct.device)
    distortions = distortion[correct & ~distortion.isnan()].float()
    error_rate = wrong.sum() / count.clamp(min=1)
    low, high = wilson_interval(flipped, correct.sum(), confidence)
    return AttackSuccessComponents(
        asr=flipped / correct.sum().clamp(min=1),
        asr_low=low,
        asr_high=high,
        error_rate=error_rate,
        adv_acc=torch.where(count > 0, 1 - error_rate, 0.0),
        distortion=distortions.median() if len(distortions) else distortions.new_tensor(torch.nan),
        flipped=flipped,
        correct=correct.sum(),
        wrong=wrong.sum(),
        count=count,
    )


def success_rates(
    preds: Tensor, adv_preds: Tensor, target: Tensor, distortion: Tensor | None = None, confidence: float = 0.95
) -> AttackSuccessComponents:
    """Compute the components of :func:`attack_success_rate`."""
    return _attack_success_rate_compute(*_attack_success_rate_update(preds, adv_preds, target, distortion), confidence)


def wilson_interval(successes: Tensor, trials: Tensor, confidence: float = 0.95) -> tuple[Tensor, Tensor]:
    r"""Compute the Wilson score interval of a rate; without trials it is [0, 1].

    .. math::
        \frac{1}{1 + s^2/n} \left(\hat r + \frac{s^2}{2n}
        \pm s \sqrt{\frac{\hat r (1 - \hat r)}{n} + \frac{s^2}{4n^2}}\right)

    Where :math:`\hat r` is the rate of successes, :math:`n` the number of trials and :math:`s` the quantile of the
    normal distribution.
    """
    squared = NormalDist().inv_cdf((1 + confidence) / 2) ** 2
    denominator = trials + squared  # the formula multiplied by n is also defined for n = 0
    center = (successes + squared / 2) / denominator
    spread = (squared * (successes * (trials - successes) / trials.clamp(min=1) + squared / 4)).sqrt() / denominator
    return (center - spread).clamp(min=0.0), (center + spread).clamp(max=1.0)


def attack_success_rate(
    preds: Tensor,
    adv_preds: Tensor,
    target: Tensor,
    *,
    distortion: Tensor | None = None,
    confidence: float = 0.95,
    return_components: bool = False,
) -> Tensor | AttackSuccessComponents:
    r"""Compute the success rate of an attack, lower is more robust.

    .. math::
        \text{ASR} = \frac{|\{i : k(x_i) = y_i \text{ and } k(x_i') \neq y_i\}|}{|\{i : k(x_i) = y_i\}|}

    Where :math:`k` is the predicted class, :math:`y` the label and :math:`x'` the attacked input. The denominator is
    the number of samples that were classified correctly before the attack; the others don't count. The rate is 0 if
    there is no correct sample. The share of *all* samples that are wrong after the attack is
    another number, the error rate, which is one of the components.

    Args:
        preds: Integer tensor of shape ``(N,)`` with the labels predicted for clean inputs.
        adv_preds: Integer tensor of shape ``(N,)`` with the labels predicted for attacked inputs.
        target: Integer tensor of shape ``(N,)`` with the true labels.
        distortion: Floating point tensor of shape ``(N,)`` with the size of each perturbation, in any norm.
        confidence: Probability with which the confidence interval contains the rate.
        return_components: Whether to also return the confidence interval, error rate, adversarial accuracy, median
            distortion and numbers of samples that :class:`~lightning_robustness.metrics.AttackSuccessRate` describes.

    Returns:
        Scalar tensor in [0, 1]; or ``AttackSuccessComponents`` of scalar tensors.

    Raises:
        TypeError: If the labels are not integers, or the distortion not floating point.
        ValueError: If shapes do not fit, or ``confidence`` is not between 0 and 1.

    Example:
        >>> import torch
        >>> from lightning_robustness.functional import attack_success_rate
        >>> target = torch.tensor([0, 1, 2, 3])
        >>> attack_success_rate(torch.tensor([0, 1, 2, 0]), torch.tensor([0, 2, 2, 0]), target)
        tensor(0.3333)
        >>> attack_success_rate(
        ...     torch.tensor([0, 1, 2, 0]), torch.tensor([0, 2, 2, 0]), target, return_components=True
        ... ).adv_acc
        tensor(0.5000)

    """
    check_flag("return_components", return_components)
    check_share("confidence", confidence)
    components = success_rates(preds, adv_preds, target, distortion, confidence)
    return components if return_components else components.asr
