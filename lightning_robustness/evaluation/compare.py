from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from lightning_robustness.evaluation.comparison_checks import UNCLASSIFIED, check_budget, check_prior, check_reports
from lightning_robustness.evaluation.comparison_report import ComparisonReport
from lightning_robustness.evaluation.evaluate import evaluate
from lightning_robustness.evaluation.processes import Processes, ProcessesLostError, describe_error
from lightning_robustness.evaluation.resume import check_folder, subfolder
from lightning_robustness.evaluation.robustness_report import RobustnessReport
from lightning_robustness.evaluation.sweep_plan import SWEEP_ATTACKS, SWEEP_EPS, plan_sweep, read_budgets
from lightning_robustness.measurement.attack_names import AttackLike, list_attacks
from lightning_robustness.utilities.provenance import describe_data, describe_run
from lightning_robustness.utilities.rank_zero import rank_zero_warn


def compare(
    models: Mapping[str, nn.Module | RobustnessReport],
    dataloader: Iterable[Any] | None = None,
    attacks: Iterable[AttackLike] | Mapping[str, AttackLike] = SWEEP_ATTACKS,
    eps: Sequence[float] = SWEEP_EPS,
    prior: Mapping[str, float] | None = None,
    balance: float = 0.0,
    budget: float | None = None,
    resume: str | Path | None = None,
    **options: Any,
) -> ComparisonReport:
    """Compare models by CMMR, adversarial accuracy and attack-free metrics.

    Each model is swept over all attacks and budgets, and its attack-free metrics are measured. CMMR weighs accuracy and
    image quality by how much they vary (their entropy) and averages over attacks and budgets; see
    :func:`~lightning_robustness.evaluation.cmmr.composite_scores`. A model that was evaluated before can be given as
    its report, if that has a sweep. In an initialised process group, all processes must call it; each measures its
    share of the samples, and all of them return the same report.

    Args:
        models: Models, or reports of them, by name.
        dataloader: Batches of inputs and labels, the same in every pass; not needed if all entries are reports.
        attacks: Attacks of the sweep.
        eps: Budgets of the sweep, increasing, in un-normalised units.
        prior: Prior weights of ``accuracy``, ``ssim``, ``psnr``, ``mse`` and ``ald2``; by default all are 1.
        balance: Share of the weight that no metric gets, 0.08 in the CMMR paper; it lowers all scores by this share.
        budget: The budget, one of ``eps``, at which models are sorted by robust accuracy; by default the middle one.
        resume: Folder for what is finished, model by model and batch by batch. With the same folder a run that was
            interrupted or killed goes on where it was, in any number of processes.
        options: Further arguments of :func:`~lightning_robustness.evaluation.evaluate`, such as ``input_space``,
            ``samples`` or ``device``.

    Returns:
        The comparison, of the finished models only if the run is interrupted. A model that classifies no sample
        correctly is left out, with a warning. So is one that cannot be measured, whose error is in ``failed`` of the
        report; if no model can be, the first error is raised.

    Raises:
        RuntimeError: If the connection to another process is lost.
        TypeError: If an entry is neither a model nor a report, or there is no loader to iterate once per model.
        ValueError: If models have different numbers of classes, reports cannot be compared, a report has no sweep, a
            weight is out of range, or no model classifies any sample correctly.

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
    # All arguments are checked before the first sweep
    if not isinstance(models, Mapping):
        raise TypeError(
            f"Expected argument `models` to be a mapping of names to models or reports but got "
            f"{type(models).__name__}. Pass a dictionary, such as {{'a': first, 'b': second}}."
        )
    attacks = list_attacks(attacks)
    eps = read_budgets("eps", eps)
    plan = plan_sweep(attacks, eps, options.get("input_space"))
    check_prior({} if prior is None else prior, balance)
    check_folder(resume)
    reports = {name: model for name, model in models.items() if isinstance(model, RobustnessReport)}
    modules = _check_modules({name: model for name, model in models.items() if name not in reports}, dataloader)
    options = {"attacks": (), "eps": eps[len(eps) // 2], "sweep_attacks": attacks, "sweep_eps": eps, **options}
    if modules:
        check_budget(budget, eps)
    if reports:
        check_reports(reports, *((list(plan[0]), eps) if modules else ()))
        options["num_classes"] = next(iter(reports.values())).num_classes
    left_out, errors, processes = [], dict[str, Exception](), Processes()
    for name, model in modules.items():
        try:
            with processes.step():  # so that a model fails in all processes or in none
                report = evaluate(model, dataloader, resume=subfolder(resume, name), **options)  # type: ignore[arg-type]
            if report.interrupted is not None or report.sweep is None:
                break
            if not report.sweep.clean_accuracy > 0:
                left_out.append(name)
                rank_zero_warn(f"{UNCLASSIFIED.format(repr(name))} It is left out.")
                continue
            check_reports(reports | {name: report})
        except ProcessesLostError:
            raise
        except Exception as error:  # what was measured of other models is not lost
            errors[name] = error
            if len(models) > 1:
                rank_zero_warn(f"{name!r} could not be measured and is left out. {describe_error(error)}")
            continue
        reports[name] = report
        options["num_classes"] = report.num_classes  # a mismatch must surface before the next sweep
    missing = [name for name in modules if name not in {*reports, *left_out, *errors}]
    if not reports:
        _raise(errors, missing, left_out)
    # In the words of the first process, so that reports are the same in all of them
    failed = processes.gather({name: describe_error(error) for name, error in errors.items()})[0]
    ordered = {name: reports[name] for name in models if name in reports}
    origin = describe_run(options.get("device") or "cpu")
    if dataloader is not None:
        origin |= describe_data(dataloader) | {"seed": str(options.get("seed", 0))}
    origin = processes.gather(origin)[0]
    return ComparisonReport(ordered, dict(prior or {}), balance, missing, left_out, failed, budget, origin)


def _raise(errors: Mapping[str, Exception], missing: Sequence[str], left_out: Sequence[str]) -> None:
    """Say why there is nothing to compare."""
    if errors:
        raise next(iter(errors.values()))
    if missing:
        raise KeyboardInterrupt
    if left_out:
        raise ValueError(UNCLASSIFIED.format(", ".join(map(repr, left_out))))


def _check_modules(models: Mapping[str, Any], dataloader: Iterable[Any] | None) -> dict[str, nn.Module]:
    for name, model in models.items():
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"Expected {name!r} in `models` to be a module or a report of one but got {type(model).__name__}."
            )
        if dataloader is None:
            raise TypeError(f"Expected a `dataloader` to evaluate {name!r} on but got none.")
    if len(models) > 1 and isinstance(dataloader, Iterator):
        raise TypeError(
            f"Expected a loader that can be iterated once for each of {len(models)} models but got a "
            f"{type(dataloader).__name__}, which is exhausted after the first. Pass a DataLoader or `list(...)`."
        )
    return dict(models)
