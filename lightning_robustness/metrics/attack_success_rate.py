from typing import Any

from torch import Tensor

from lightning_robustness._arguments import check_share
from lightning_robustness.functional.attack_success_rate import (
    _attack_success_rate_compute,
    _attack_success_rate_update,
)
from lightning_robustness.metrics._base import SampleMetric


class AttackSuccessRate(SampleMetric):
    r"""Compute the success rate of an attack, with its confidence interval, lower is more robust.

    .. math::
        \text{ASR} = \frac{\text{flipped}}{\text{correct}} \quad
        \text{error rate} = \frac{\text{wrong}}{N} \quad
        \text{adversarial accuracy} = 1 - \text{error rate}

    Where *correct* samples are classified correctly before the attack, *flipped* ones are correct before it and wrong
    after, *wrong* ones are wrong after it regardless of before, and :math:`N` is the number of all samples.

    As input to ``forward`` and ``update`` the metric accepts the following input:

    - ``preds`` (:class:`~torch.Tensor`): An integer tensor of shape ``(N,)`` with the labels predicted for clean
      inputs.
    - ``adv_preds`` (:class:`~torch.Tensor`): An integer tensor of shape ``(N,)`` with the labels predicted for attacked
      inputs, from a forward pass of their own.
    - ``target`` (:class:`~torch.Tensor`): An integer tensor of shape ``(N,)`` with the true labels.
    - ``distortion`` (:class:`~torch.Tensor`, optional): A floating point tensor of shape ``(N,)`` with the size of each
      perturbation, in any norm.

    As output of ``forward`` and ``compute`` the metric returns the following output:

    - ``asr`` (:class:`~torch.Tensor`): A scalar in [0, 1]; 0 where no sample was correct before the attack.

    ``compute_components`` returns a dictionary with ``asr``; ``asr_low`` and ``asr_high``, its Wilson confidence
    interval; ``error_rate`` and ``adv_acc``; ``distortion``, the median over the correct samples whose distortion was
    given, where a sample that the attack did not flip counts as infinite; and the numbers of samples ``flipped``,
    ``correct``, ``wrong`` and ``count``. A rate whose denominator is 0 is 0. The distortion is infinite if the attack
    failed on more than half of the samples, and NaN without any. A mean over the flipped samples alone would rank a
    robust network, of which only fragile samples are flipped, below a fragile one. Three numbers per sample
    are kept until ``compute``.

    Args:
        confidence: Probability with which the confidence interval contains the rate.
        kwargs: Further arguments of ``torchmetrics.Metric``.

    Raises:
        ValueError: If ``confidence`` is not between 0 and 1.

    Example:
        >>> import torch
        >>> from lightning_robustness.metrics import AttackSuccessRate
        >>> metric = AttackSuccessRate()
        >>> metric.update(torch.tensor([0, 1, 2, 0]), torch.tensor([0, 2, 2, 0]), target=torch.tensor([0, 1, 2, 3]))
        >>> metric.compute()
        tensor(0.3333)
        >>> metric.compute_components()["adv_acc"]
        tensor(0.5000)

    """

    is_differentiable: bool = False
    higher_is_better: bool = False
    full_state_update: bool = False
    plot_lower_bound: float = 0.0
    plot_upper_bound: float = 1.0

    num_columns = 3

    def __init__(self, *, confidence: float = 0.95, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_share("confidence", confidence)
        self.confidence = confidence
        self._add_states(confidence)

    def update(self, preds: Tensor, adv_preds: Tensor, target: Tensor, distortion: Tensor | None = None) -> None:
        """Add the samples of a batch, with the distortion of each if it is known."""
        self._add(*_attack_success_rate_update(preds, adv_preds, target, distortion))

    def _summarize(self, *columns: Tensor) -> dict[str, Tensor]:
        correct, wrong, distortion = columns
        return _attack_success_rate_compute(correct.bool(), wrong.bool(), distortion, self.confidence)._asdict()
