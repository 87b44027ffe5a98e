from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_robustness._arguments import check_integer_tensor, check_labels


class AttackSuccessComponents(NamedTuple):
    """Attack success rate, with the rates that are easily mistaken for it."""

    asr: Tensor
    asr_low: Tensor
    asr_high: Tensor
    error_rate: Tensor
    adv_acc: Tensor


def _attack_success_rate_update(preds: Tensor, adv_preds: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether each sample was correct before the attack, and whether it is wrong after it."""
    check_integer_tensor("preds", preds)
    for name, labels in {"preds": preds, "adv_preds": adv_preds, "target": target}.items():
        check_labels(name, labels, preds.numel())
    return preds == target, adv_preds != target


def _attack_success_rate_compute(
    flipped: Tensor, correct: Tensor, wrong: Tensor, count: Tensor, confidence: float
) -> AttackSuccessComponents:
    """Compute the rates from the numbers of flipped, initially correct, finally wrong, and all samples."""
    asr = flipped / correct.clamp(min=1)
    error_rate = wrong / count.clamp(min=1)
    low, high = wilson_interval(flipped, correct, confidence)
    return AttackSuccessComponents(asr, low, high, error_rate, torch.where(count > 0, 1 - error_rate, 0.0))


def _median_distortion(distortions: Tensor) -> Tensor:
    """Compute the lower median of the distortions of all correct samples, of which failures are infinite."""
    return distortions.median() if len(distortions) else distortions.new_tensor(torch.nan)


def success_rates(
    preds: Tensor, adv_preds: Tensor, target: Tensor, distortion: Tensor, confidence: float = 0.95
) -> dict[str, Tensor]:
    """Compute all rates of an attack, the median distortion, and the numbers of samples behind them."""
    correct, wrong = _attack_success_rate_update(preds, adv_preds, target)
    flipped = correct & wrong
    counts = {"flipped": flipped.sum(), "correct": correct.sum(), "wrong": wrong.sum()}
    counts["count"] = torch.full_like(counts["correct"], len(preds))
    rates = _attack_success_rate_compute(**counts, confidence=confidence)
    distortions = torch.where(flipped, distortion, torch.inf)[correct].float()
    return {**rates._asdict(), "distortion": _median_distortion(distortions), **counts}


def wilson_interval(successes: Tensor, trials: Tensor, confidence: float = 0.95) -> tuple[Tensor, Tensor]:
    r"""Compute the Wilson score interval of a rate.

    .. math::
        \frac{1}{1 + s^2/n} \left(\hat r + \frac{s^2}{2n}
        \pm s \sqrt{\frac{\hat r (1 - \hat r)}{n} + \frac{s^2}{4n^2}}\right)

    Where :math:`\hat r` is the rate of successes, :math:`n` the number of trials and :math:`s` the quantile of the
    normal distribution. Without trials the interval is [0, 1].

    Example:
        >>> import torch
        >>> from lightning_robustness.functional.attack_success_rate import wilson_interval
        >>> wilson_interval(torch.tensor(8), torch.tensor(10))
        (tensor(0.4902), tensor(0.9433))

    """
    squared = NormalDist().inv_cdf((1 + confidence) / 2) ** 2
    denominator = trials + squared  # the formula multiplied by n is also defined for n = 0
    center = (successes + squared / 2) / denominator
    spread = (squared * (successes * (trials - successes) / trials.clamp(min=1) + squared / 4)).sqrt() / denominator
    return (center - spread).clamp(min=0.0), (center + spread).clamp(max=1.0)


def attack_success_rate(preds: Tensor, adv_preds: Tensor, target: Tensor) -> Tensor:
    r"""Compute the success rate of an attack, lower is more robust.

    .. math::
        \text{ASR} = \frac{|\{i : k(x_i) = y_i \text{ and } k(x_i') \neq y_i\}|}{|\{i : k(x_i) = y_i\}|}

    Where :math:`k` is the predicted class, :math:`y` the label and :math:`x'` the attacked input. The denominator is
    the number of samples that were classified correctly before the attack; the others don't count. The rate is 0 if
    there is no correct sample. The share of *all* samples that are wrong after the attack is
    another number, the error rate; :class:`~lightning_robustness.metrics.AttackSuccessRate` has both.

    Args:
        preds: Integer tensor of shape ``(N,)`` with the labels predicted for clean inputs.
        adv_preds: Integer tensor of shape ``(N,)`` with the labels predicted for attacked inputs.
        target: Integer tensor of shape ``(N,)`` with the true labels.

    Returns:
        Scalar tensor in [0, 1].

    Raises:
        TypeError: If the labels are not integers.
        ValueError: If shapes do not fit.

    Example:
        >>> import torch
        >>> from lightning_robustness.functional import attack_success_rate
        >>> target = torch.tensor([0, 1, 2, 3])
        >>> attack_success_rate(torch.tensor([0, 1, 2, 0]), torch.tensor([0, 2, 2, 0]), target)
        tensor(0.3333)

    """
    correct, wrong = _attack_success_rate_update(preds, adv_preds, target)
    return (correct & wrong).sum() / correct.sum().clamp(min=1)
