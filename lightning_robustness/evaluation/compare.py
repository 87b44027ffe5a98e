from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_robustness._arguments import check_flag, check_integer, read_budgets
from lightning_robustness._display.provenance import describe_run
from lightning_robustness._measurement.meters.sweep import SWEEP_ATTACKS, SWEEP_BUDGETS, plan_sweep
from lightning_robustness._measurement.plan import AttackLike, Plan, list_attacks
from lightning_robustness._model.access import Access
from lightning_robustness._processes import Processes, ProcessesLostError, describe_error, rank_zero_warn
from lightning_robustness.attacks.attack import Norm
from lightning_robustness.attacks.registry import Strength
from lightning_robustness.evaluation.cmmr import Weighting
from lightning_robustness.evaluation.decision_space import Projection, get_projection
from lightning_robustness.evaluation.evaluate import evaluate
from lightning_robustness.evaluation.reports.comparison_checks import (
    UNCLASSIFIED,
    check_budget,
    check_names,
    check_prior,
    check_reports,
)
from lightning_robustness.evaluation.reports.comparison_report import ComparisonReport
from lightning_robustness.evaluation.reports.robustness_report import RobustnessReport
from lightning_robustness.evaluation.resume import subfolder
from lightning_robustness.evaluation.session import check_session
from lightning_robustness.evaluation.sweep import DISCRETE
from lightning_robustness.functional.fisher_spectral_norm import FisherMethod
from lightning_robustness.input_space import InputSpace
from lightning_robustness.metrics._base import Storage


def compare(
    models: Mapping[str, nn.Module | RobustnessReport],
    dataloader: Iterable[Any] | None = None,
    attacks: Iterable[AttackLike] | Mapping[str, AttackLike] = SWEEP_ATTACKS,
    budgets: Sequence[float] = SWEEP_BUDGETS,
    *,
    norm: Norm = "linf",
    strength: Strength = "strong",
    rank_budget: float | None = None,
    prior: Mapping[str, float] | None = None,
    balance: float = 0.0,
    weighting: Weighting = "entropy",
    warm_starts: bool = True,
    attack_samples: int = 256,
    fim_samples: int = 256,
    fim_method: FisherMethod = "auto",
    clever_samples: int = 0,
    clever_radius: float = 2.0,
    decision_space: Projection | None = None,
    input_space: InputSpace | None = None,
    num_classes: int | None = None,
    head: str | nn.Module | None = None,
    forward_fn: Callable[..., Any] | None = None,
    embed_fn: Callable[..., Any] | None = None,
    batch_fn: Callable[..., Any] | None = None,
    storage: Storage = "auto",
    roby_p: float = 2.0,
    batch_size: int = 128,
    device: str | torch.device | None = None,
    seed: int = 0,
    per_sample: bool = False,
    num_examples: int = 8,
    progress: bool = True,
    resume: str | Path | None = None,
) -> ComparisonReport:
    """Compare models by CMMR, robust accuracy and attack-free metrics.

    Each model is swept over all attacks and budgets, and its attack-free metrics are measured. CMMR weighs accuracy and
    image quality by how much they vary (their entropy) and averages over attacks and budgets; see
    :func:`~lightning_robustness.evaluation.cmmr.composite_scores`. A model that was evaluated before can be given as
    its report, if that has a sweep. In an initialised process group, all processes must call it; each measures its
    share of the samples, and all of them return the same report.

    Args:
        models: Models, or reports of them, by name.
        dataloader: Batches of inputs and labels, the same in every pass; not needed if all entries are reports.
        attacks: Attacks of the sweep.
        budgets: Budgets of the sweep, increasing, in un-normalised units.
        norm: Norm of the budgets of attacks that are given by name, ``"linf"`` or ``"l2"``.
        strength: How hard attacks by name try, ``"fast"``, ``"strong"`` or ``"paper"``: see ``attacks.get_attack``.
        rank_budget: The one of the budgets at which models are sorted by robust accuracy; by default the middle one.
        prior: Prior weights of ``accuracy``, ``ssim``, ``psnr``, ``mse`` and ``ald2``; by default all are 1.
        balance: Share of the weight that no metric gets, 0.08 in the CMMR paper; it lowers all scores by this share.
        weighting: How CMMR weighs its metrics, an option of ``evaluation.composite_scores``.
        warm_starts: Whether attacks start from where they ended at the previous budget, and broken samples stay broken;
            False for accuracy by equation 1 of the CMMR paper, each budget by itself.
        attack_samples: Number of samples to attack.
        fim_samples: Number of samples for the Fisher information, and for the distance to the decision boundary that
            comes with it; 0 for none.
        fim_method: How it is computed; see ``functional.fisher_spectral_norm``.
        clever_samples: Number of samples for CLEVER, which takes thousands of gradients each; 0 for none.
        clever_radius: Radius of the ball in which CLEVER looks, in un-normalised units: no score is larger.
        decision_space: ``"pca"`` or ``"tsne"`` to keep embeddings of samples, clean and under PGD, in the plane.
        input_space: Input range, and the normalisation the loader applies; by default [0, 1] and none.
        num_classes: Number of classes, to be checked; by default the number of logits.
        head: The classifier head, by name or as a module; by default it is found.
        forward_fn: Callable that takes the model and inputs and returns logits, where ``model(x)`` does not.
        embed_fn: Callable that takes the model and what the loader yields, such as tokens, and returns the embeddings
            that are perturbed. ``forward_fn`` takes them to logits, or ``model(inputs_embeds=...)`` does.
        batch_fn: Callable that takes a batch and returns inputs and labels, for batches of unusual form; as a third
            value a dictionary of what else ``forward`` takes from a batch, with one row per sample.
        storage: ``"exact"`` keeps all features; ``"streaming"`` bounds its memory; ``"auto"`` is exact up to 1 GiB of
            features and streaming beyond, with a warning.
        roby_p: Order of the distance in ROBY, at least 1; ``float("inf")`` is allowed.
        batch_size: Number of sampled inputs to measure at a time.
        device: Where to run; by default where the model is. The model is moved back afterwards.
        seed: Seed of the sample, of random starts and directions.
        per_sample: Whether to keep the results of each sample.
        num_examples: Number of adversarial examples to keep in the report as small pictures, if the inputs are images.
        progress: Whether to show progress bars, in the first process.
        resume: Folder for what is finished, model by model and batch by batch. With the same folder an interrupted run
            resumes, with any number of processes.

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
        >>> from lightning_robustness import compare
        >>> models = {"steep": torch.nn.Linear(2, 2), "flat": torch.nn.Linear(2, 2)}
        >>> for model, bias in zip(models.values(), (0.0, 0.375)):
        ...     model.weight.data, model.bias.data = torch.eye(2), torch.tensor([bias, 0.0])
        >>> data = [(torch.tensor([[0.75, 0.5], [1.0, 0.5], [0.0, 0.75]]), torch.tensor([0, 0, 1]))]
        >>> report = compare(models, data, attacks=["fgsm"], budgets=[0.1, 0.2, 0.3], progress=False)
        >>> report.ranks["mean_robust_accuracy"]
        {'steep': 2, 'flat': 1}

    """
    given = locals().copy()
    # All arguments are checked before the first sweep
    if not isinstance(models, Mapping):
        raise TypeError(
            f"Expected argument `models` to be a mapping of names to models or reports but got "
            f"{type(models).__name__}. Pass a dictionary, such as {{'a': first, 'b': second}}."
        )
    check_names(models)
    attacks = list_attacks(attacks)
    budgets = read_budgets("budgets", budgets)
    plan = plan_sweep(attacks, budgets, input_space, strength=strength, norm=norm)
    if len(models) == len(attacks) == len(budgets) == 1:
        raise ValueError(
            "Expected several models, attacks or budgets to compare but got one of each. Pass more budgets, or use "
            "`evaluate` for a single model."
        )
    check_prior({} if prior is None else prior, balance, weighting)
    reports = {name: model for name, model in models.items() if isinstance(model, RobustnessReport)}
    modules = _check_modules({name: model for name, model in models.items() if name not in reports}, dataloader)
    if modules:
        _check_settings(given)
        check_budget(rank_budget, budgets)
    if reports:
        names, sizes = (list(plan[0]), budgets) if modules else (None, None)
        check_reports(reports, names, sizes, num_classes)
    processes = Processes()
    errors: dict[str, Exception] = {}
    left_out: list[str] = []
    # Arguments that both take are passed on by their names
    options = {name: given[name] for name in signature(evaluate).parameters.keys() & given.keys()}
    options |= {"attacks": (), "eps": budgets[len(budgets) // 2], "sweep_attacks": attacks, "sweep_budgets": budgets}
    for name, model in modules.items():
        # A mismatch must surface before the next sweep
        known = next(iter(reports.values())).num_classes if reports else num_classes
        try:
            with processes.step():  # so that a model fails in all processes or in none
                report = evaluate(model, **options | {"num_classes": known, "resume": subfolder(resume, name)})
            if report.interrupted is not None:
                break
            if report.sweep is None:  # only integers cannot be attacked
                raise TypeError(DISCRETE)
            if report.sweep.clean_accuracy > 0:
                check_reports({**reports, name: report})
                reports[name] = report
            else:
                rank_zero_warn(f"{UNCLASSIFIED.format(repr(name))} It is left out.")
                left_out.append(name)
        except ProcessesLostError:
            raise
        except Exception as error:  # what was measured of the others is not lost
            if len(models) > 1:
                rank_zero_warn(f"{name!r} could not be measured and is left out. {describe_error(error)}")
            errors[name] = error
    missing = [name for name in modules if name not in {*reports, *left_out, *errors}]
    if not reports:
        _raise(errors, missing, left_out)
    # In the words of the first process, so that reports are the same in all processes
    failed = processes.gather({name: describe_error(error) for name, error in errors.items()})[0]
    ordered = {name: reports[name] for name in models if name in reports}
    origin = processes.gather(describe_run())[0]
    for name in modules:
        origin |= ordered[name].provenance if name in ordered else {}  # which knows the device of the model
    return ComparisonReport(
        ordered,
        prior=dict(prior or {}),
        balance=balance,
        weighting=weighting,
        missing=missing,
        left_out=left_out,
        failed=failed,
        rank_budget=rank_budget,
        provenance=origin,
    )


def _check_settings(given: Mapping[str, Any]) -> None:
    """Check what `evaluate` would refuse for one model after the other."""
    check_flag("warm_starts", given["warm_starts"])
    check_flag("per_sample", given["per_sample"])
    check_integer("num_examples", given["num_examples"], minimum=0)
    check_integer("attack_samples", given["attack_samples"], minimum=1)
    access = ("input_space", "head", "num_classes", "forward_fn", "embed_fn", "batch_fn")
    own = {field.name: given[field.name] for field in fields(Plan) if field.name in given}
    own |= {"attacks": {}, "input_space": Access(*(given[name] for name in access)).input_space}
    Plan(**own, budget=None, minimum_norm_budget=None)
    if given["decision_space"] is not None:
        get_projection(given["decision_space"], given["seed"])
    check_session(given["dataloader"], given["device"], given["progress"], given["resume"])


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
