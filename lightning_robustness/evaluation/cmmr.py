from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_robustness._arguments import check_option, check_tensor, is_number

# Values are measured in float32: a spread below its rounding error counts as constant
_ROUNDING = 1e-6

Weighting = Literal["entropy", "printed", "correlation"]


class CompositeScores(NamedTuple):
    r"""Results of the CMMR framework for a table of metrics; higher is more robust throughout.

    Args:
        normalized: Metrics in [0, 1], of shape ``(models, attacks, budgets, metrics)``.
        entropy_weights: Weight of each metric by its entropy alone, :math:`w_j`.
        weights: Weight of each metric with prior and balance, :math:`\lambda_j`.
        composite: M, of shape ``(models, attacks, budgets)``.
        curves: Its mean over the attacks, of shape ``(models, budgets)``.
        scores: CMMR of each model, the mean over the budgets.

    """

    normalized: Tensor
    entropy_weights: Tensor
    weights: Tensor
    composite: Tensor
    curves: Tensor
    scores: Tensor


def composite_scores(
    values: Tensor,
    higher_is_better: Sequence[bool],
    prior: Sequence[float] | None = None,
    balance: float = 0.0,
    weighting: Weighting = "entropy",
) -> CompositeScores:
    r"""Compute the composite multidimensional model robustness, CMMR, of several models, higher is more robust.

    .. math::
        f_{ij} = \frac{r_{ij}}{\sum_i r_{ij}} \quad
        H_j = -\frac{1}{\ln m} \sum_{i=1}^m f_{ij} \ln f_{ij} \quad
        w_j = \frac{1 - H_j}{\sum_j (1 - H_j)} \quad
        \lambda_j = (1 - \omega) \frac{\lambda'_j w_j}{\sum_j \lambda'_j w_j} \quad
        M_i = \sum_j \lambda_j r_{ij}

    Where :math:`r_{ij}` is metric :math:`j` in setting :math:`i`, mapped to [0, 1] by its minimum and maximum so that 1
    is the most robust; the :math:`m` settings are all combinations of model, attack and budget, so one scale and one
    set of weights applies to all models. :math:`\lambda'_j` are prior weights and :math:`\omega` is the balancing
    weight. CMMR at a budget is the mean of :math:`M` over the attacks, the score is its mean over the budgets.

    A metric that is constant up to rounding, or missing in any setting, has weight 0.

    Args:
        values: Tensor of shape ``(models, attacks, budgets, metrics)``, of any metrics, of your own too.
        higher_is_better: Whether higher is more robust, for each metric.
        prior: Prior weights of the metrics; by default all are equal.
        balance: Balancing weight, 0.08 in the paper, in [0, 1).
        weighting: ``"entropy"`` is the formula above. ``"printed"`` is equation 8 as the paper prints it, with
            :math:`w_j` in place of :math:`\lambda_j`, so that prior and balance have no effect. ``"correlation"`` gives
            the weights at which the mean Pearson correlation of M with the metrics, weighted by the prior, is highest,
            where the paper adjusts them step by step: :math:`\lambda'_j / \sigma_j`, with the standard deviation of
            the normalised metric.

    Raises:
        ValueError: If shapes do not fit, a weight is out of range, or no metric varies.

    Example:
        >>> import torch
        >>> from lightning_robustness.evaluation import composite_scores
        >>> accuracy = torch.tensor([[0.9, 0.5], [0.6, 0.1]])  # two models, two budgets
        >>> mse = torch.tensor([[0.01, 0.02], [0.01, 0.02]])
        >>> result = composite_scores(torch.stack([accuracy, mse], dim=-1).unsqueeze(1), (True, False))
        >>> result.weights
        tensor([0.3233, 0.6767], dtype=torch.float64)
        >>> result.scores
        tensor([0.5808, 0.4394], dtype=torch.float64)

    """
    check_option("weighting", weighting, Weighting)
    priors = _check(values, higher_is_better, prior, balance)
    flat = values.double().flatten(0, 2)
    informative = _is_informative(flat)
    normalized = _normalize(flat, torch.tensor(higher_is_better), informative)
    entropy_weights = _entropy_weights(normalized, informative)
    if weighting == "printed":
        weights, balance = entropy_weights, 0.0
    elif weighting == "correlation":
        weights = torch.where(informative, priors / normalized.std(dim=0), 0.0)
    else:
        weights = entropy_weights * priors
    if not weights.sum() > 0:
        raise ValueError(
            "Expected at least one metric with a positive prior weight that differs between models, attacks or budgets "
            "but all are constant or missing. Compare more models, or use more budgets."
        )
    weights = (1 - balance) * weights / weights.sum()
    composite = _sum(normalized.T * weights.unsqueeze(1)).reshape(values.shape[:3])
    curves = _sum(composite.unbind(dim=1)) / values.shape[1]
    scores = _sum(curves.unbind(dim=1)) / values.shape[2]
    return CompositeScores(normalized.reshape(values.shape), entropy_weights, weights, composite, curves, scores)


def check_weights(prior: Sequence[float], balance: float) -> None:
    """Check prior weights and the balancing weight."""
    if not all(is_number(weight) and weight >= 0 for weight in prior) or not any(prior):
        raise ValueError(f"Expected `prior` to hold non-negative weights, some positive, but got {list(prior)}.")
    if not is_number(balance) or not 0 <= balance < 1:
        raise ValueError(f"Expected `balance` to be in [0, 1) but got {balance!r}.")


def _sum(parts: Iterable[Tensor]) -> Tensor:
    """Add in a fixed order: reductions round by position, but equal models must have equal scores."""
    first, *others = parts
    return sum(others, start=first)


def _is_informative(flat: Tensor) -> Tensor:
    spread = flat.amax(dim=0) - flat.amin(dim=0)
    return spread > _ROUNDING * flat.abs().amax(dim=0)  # False for NaN


def _normalize(flat: Tensor, higher_is_better: Tensor, informative: Tensor) -> Tensor:
    low, high = flat.amin(dim=0), flat.amax(dim=0)
    benefit = (flat - low) / torch.where(informative, high - low, 1.0)
    return torch.where(informative, torch.where(higher_is_better, benefit, 1 - benefit), 0.0)


def _entropy_weights(normalized: Tensor, informative: Tensor) -> Tensor:
    shares = normalized / normalized.sum(dim=0).clamp(min=torch.finfo(normalized.dtype).tiny)
    entropy = -torch.special.xlogy(shares, shares).sum(dim=0) / torch.tensor(float(len(normalized))).double().log()
    information = torch.where(informative, 1 - entropy, 0.0)
    return information / information.sum() if informative.any() else information


def _check(values: Tensor, higher_is_better: Sequence[bool], prior: Sequence[float] | None, balance: float) -> Tensor:
    """Check the arguments and return the prior weights."""
    check_tensor("values", values)
    if values.ndim != 4 or values.numel() == 0:
        raise ValueError(
            f"Expected `values` of shape (models, attacks, budgets, metrics) but got {tuple(values.shape)}."
        )
    prior = [1.0] * values.shape[3] if prior is None else prior
    lists: dict[str, tuple[Any, type]] = {"higher_is_better": (higher_is_better, bool), "prior": (prior, Real)}
    for name, (given, kind) in lists.items():
        is_list = isinstance(given, Sequence) and not isinstance(given, str)
        if not is_list or len(given) != values.shape[3] or not all(isinstance(entry, kind) for entry in given):
            raise ValueError(
                f"Expected `{name}` to have one entry for each of {values.shape[3]} metrics but got {given!r}."
            )
    check_weights(prior, balance)
    return torch.tensor(prior, dtype=torch.float64)
