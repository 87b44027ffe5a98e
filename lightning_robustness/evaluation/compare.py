from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from lightning_robustness.evaluation.comparison_report import ComparisonReport
from lightning_robustness.evaluation.evaluate import evaluate
from lightning_robustness.evaluation.measurement import AttackLike
from lightning_robustness.evaluation.robustness_report import RobustnessReport
from lightning_robustness.evaluation.sweep import SWEEP_ATTACKS, SWEEP_EPS, plan_sweep


def compare(
    models: Mapping[str, nn.Module | RobustnessReport],
    dataloader: Iterable[Any] | None = None,
    attacks: Iterable[AttackLike] | Mapping[str, AttackLike] = SWEEP_ATTACKS,
    eps: Sequence[float] = SWEEP_EPS,
    prior: Mapping[str, float] | None = None,
    balance: float = 0.0,
    **options: Any,
) -> ComparisonReport:
    """Compare models by CMMR, adversarial accuracy and attack-free metrics.

    Each model is swept over all attacks and budgets, and its attack-free metrics are measured. CMMR weighs accuracy and
    image quality by how much they vary (their entropy) and averages over attacks and budgets; see
    :func:`~lightning_robustness.evaluation.cmmr.composite_scores`. A report with a sweep takes the place of a model
    that was evaluated before.

    Args:
        models: Models, or reports of them, by name.
        dataloader: Batches with inputs and labels; not needed for reports. It should give the same samples each time.
        attacks: Attacks of the sweep.
        eps: Budgets of the sweep, increasing, in un-normalised units.
        prior: Prior weights of ``accuracy``, ``ssim``, ``psnr``, ``mse`` and ``ald2``; by default all are 1.
        balance: Share of the weight that is kept from all metrics, as the CMMR paper does with 0.08: it lowers all
            scores by this share.
        options: Further arguments of :func:`~lightning_robustness.evaluation.evaluate`, such as ``input_space``,
            ``samples`` or ``device``.

    Returns:
        The comparison; of the models that were finished if the run is interrupted.

    Raises:
        TypeError: If something is neither a model nor a report, or models come without a loader.
        ValueError: If models have different numbers of classes, reports do not go together, or a report has no sweep.

    Example:
        >>> import torch
        >>> from lightning_robustness.evaluation import compare
        >>> models = {"steep": torch.nn.Linear(2, 2), "flat": torch.nn.Linear(2, 2)}
        >>> for model, bias in zip(models.values(), (0.0, 0.375)):
        ...     model.weight.data, model.bias.data = torch.eye(2), torch.tensor([bias, 0.0])
        >>> data = [(torch.tensor([[0.75, 0.5], [1.0, 0.5], [0.0, 0.75]]), torch.tensor([0, 0, 1]))]
        >>> report = compare(models, data, attacks=["fgsm"], eps=[0.1, 0.2, 0.3], progress=False)
        >>> report.ranks["adv_acc"]
        {'steep': 2, 'flat': 1}

    """
    attacks = attacks if isinstance(attacks, (Mapping, str)) else list(attacks)
    plan_sweep(attacks, eps)  # so that what is wrong with them is found here
    options = {"attacks": (), "eps": eps[len(eps) // 2], "sweep_attacks": attacks, "sweep_eps": eps, **options}
    reports: dict[str, RobustnessReport] = {}
    for name, model in models.items():
        report = model if isinstance(model, RobustnessReport) else _evaluate(name, model, dataloader, options)
        if report.interrupted is not None and not isinstance(model, RobustnessReport):
            break
        reports[name] = report
        options["num_classes"] = report.num_classes  # another number shall be found before the next sweep, not after
    missing = [name for name in models if name not in reports]
    if missing and not reports:
        raise KeyboardInterrupt
    return ComparisonReport(reports, dict(prior or {}), balance, missing)


def _evaluate(
    name: str, model: nn.Module, dataloader: Iterable[Any] | None, options: dict[str, Any]
) -> RobustnessReport:
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected {name!r} to be a module or a report of one but got {type(model).__name__}.")
    if dataloader is None:
        raise TypeError(f"Expected a `dataloader` to evaluate {name!r} with but got none.")
    return evaluate(model, dataloader, **options)
