from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_robustness._arguments import check_flag, check_integer, read_budgets
from lightning_robustness._display.pictures import AdversarialExample, make_examples
from lightning_robustness._measurement.feature_pass import OUTPUT_WARNINGS, doubt_logits
from lightning_robustness._measurement.findings import Findings, class_accuracies, conclude, per_sample_columns, seconds
from lightning_robustness._measurement.inspection import Found, inspect, warn_of_unused_layers
from lightning_robustness._measurement.meters import Meter
from lightning_robustness._measurement.meters.attack import attack_again
from lightning_robustness._measurement.meters.sweep import SWEEP_ATTACKS, SWEEP_BUDGETS, SweepMeter, plan_sweep
from lightning_robustness._measurement.plan import (
    DEFAULT_ATTACKS,
    AttackLike,
    Plan,
    announce,
    list_attacks,
    name_attacks,
)
from lightning_robustness._measurement.subject import Subject
from lightning_robustness._measurement.threat_model import ThreatModel
from lightning_robustness._model.access import Access
from lightning_robustness._model.batch import Batch, require_labels
from lightning_robustness._processes import rank_zero_warn
from lightning_robustness.attacks.attack import Norm, check_budgets
from lightning_robustness.attacks.registry import Strength
from lightning_robustness.evaluation.decision_space import DecisionSpaceMeter, Projection, get_projection, project
from lightning_robustness.evaluation.loading import Measured, Passed, pass_over
from lightning_robustness.evaluation.reports.robustness_report import RobustnessReport
from lightning_robustness.evaluation.session import open_session
from lightning_robustness.evaluation.sweep import sweep_report
from lightning_robustness.functional.fisher_spectral_norm import FisherMethod
from lightning_robustness.input_space import InputSpace
from lightning_robustness.metrics._base import Storage


def evaluate(
    model: nn.Module,
    dataloader: Iterable[Any],
    attacks: Iterable[AttackLike] | Mapping[str, AttackLike] = DEFAULT_ATTACKS,
    eps: float | None = 8 / 255,
    *,
    norm: Norm = "linf",
    strength: Strength = "strong",
    input_space: InputSpace | None = None,
    num_classes: int | None = None,
    head: str | nn.Module | None = None,
    forward_fn: Callable[..., Any] | None = None,
    embed_fn: Callable[..., Any] | None = None,
    batch_fn: Callable[..., Any] | None = None,
    fim_samples: int = 256,
    fim_method: FisherMethod = "auto",
    attack_samples: int = 256,
    clever_samples: int = 0,
    clever_radius: float = 2.0,
    sweep_budgets: Sequence[float] = (),
    sweep_attacks: Iterable[AttackLike] | Mapping[str, AttackLike] = SWEEP_ATTACKS,
    warm_starts: bool = True,
    decision_space: Projection | None = None,
    batch_size: int = 128,
    device: str | torch.device | None = None,
    seed: int = 0,
    storage: Storage = "auto",
    roby_p: float = 2.0,
    per_sample: bool = False,
    num_examples: int = 8,
    progress: bool = True,
    resume: str | Path | None = None,
) -> RobustnessReport:
    """Measure how robust a trained model is, with and without attacks.

    The numbers are those that ``RobustnessMonitor`` logs for the same weights, data and settings, ``strength`` among
    them: RDI and ROBY of all samples, Fisher information and attacks of a fixed sample. Afterwards the model and all
    random states are as they were. In an initialised process group, all processes must call it: each measures its share
    of a loader, which need not divide the samples itself, and all return the report of a single process.

    Args:
        model: The trained model, any module that returns logits.
        dataloader: Batches with inputs and labels; labels are needed for attacks and accuracy.
        attacks: Names of attacks, attacks, or other callables ``(model, x, y) -> x_adv``; a mapping gives them names.
            Empty for none. Success of an attack without a budget that looks for the smallest l2 perturbation counts
            within the l2 budget of the other attacks, or ``max(eps, eps * sqrt(d) / 4)`` for inputs of d values if
            theirs is in l-infinity. With ``strength="paper"`` it counts regardless of its size, as in the papers.
        eps: Budget of attacks that are given by name, in un-normalised units; None for their defaults, which attacks in
            the l2 norm keep unless ``norm`` is ``"l2"``.
        norm: Norm of that budget, and of attacks that are given by name and know both: ``"linf"`` or ``"l2"``.
        strength: How hard attacks by name try, ``"fast"``, ``"strong"`` or ``"paper"``: see ``attacks.get_attack``.
        input_space: Input range, and the normalisation the loader applies; by default [0, 1] and none.
        num_classes: Number of classes, to be checked; by default the number of logits.
        head: The classifier head, by name or as a module; by default it is found.
        forward_fn: Callable that takes the model and inputs and returns logits, where ``model(x)`` does not.
        embed_fn: Callable that takes the model and what the loader yields, such as tokens, and returns the embeddings
            that are perturbed. ``forward_fn`` takes them to logits, or ``model(inputs_embeds=...)`` does.
        batch_fn: Callable that takes a batch and returns inputs and labels, for batches of unusual form; as a third
            value a dictionary of what else ``forward`` takes from a batch, with one row per sample.
        fim_samples: Number of samples for the Fisher information, and for the distance to the decision boundary that
            comes with it; 0 for none.
        fim_method: How it is computed; see ``functional.fisher_spectral_norm``.
        attack_samples: Number of samples to attack; 0 for none.
        clever_samples: Number of samples for CLEVER, which takes thousands of gradients each; 0 for none.
        clever_radius: Radius of the ball in which CLEVER looks, in un-normalised units: no score is larger.
        sweep_budgets: Budgets of a sweep, increasing, for curves and for ``compare``; empty for none.
        sweep_attacks: Attacks of the sweep; see :func:`~lightning_robustness.evaluation.sweep`.
        warm_starts: Whether attacks of the sweep start from where they ended at the previous budget; False for accuracy
            by equation 1 of the CMMR paper, each budget by itself.
        decision_space: ``"pca"`` or ``"tsne"`` to keep embeddings of samples, clean and under PGD, in the plane.
        batch_size: Number of sampled inputs to measure at a time.
        device: Where to run; by default where the model is. The model is moved back afterwards.
        seed: Seed of the sample, of random starts and directions.
        storage: ``"exact"`` keeps all features; ``"streaming"`` bounds its memory; ``"auto"`` is exact up to 1 GiB of
            features and streaming beyond, with a warning.
        roby_p: Order of the distance in ROBY, at least 1; ``float("inf")`` is allowed.
        per_sample: Whether to keep the results of each sample.
        num_examples: Number of adversarial examples to keep in the report as small pictures, if the inputs are images.
        progress: Whether to show progress bars, in the first process.
        resume: Folder for finished batches, from which an interrupted run continues, with any number of processes.

    Returns:
        The report; of what was finished if the run is interrupted.

    Raises:
        RuntimeError: If another process failed.
        TypeError: If the model is not a module, or the loader something else.
        ValueError: If the loader is empty, or has no labels although there are attacks; if the head cannot be found; an
            argument is out of range; processes have different weights or orders of the loader, or sharded parameters;
            or results in the folder are of other weights, data or settings.

    Example:
        >>> import torch
        >>> from lightning_robustness.evaluation import evaluate
        >>> model = torch.nn.Linear(2, 2)
        >>> model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
        >>> data = [(torch.tensor([[0.75, 0.5], [1.0, 0.0], [0.0, 1.0], [0.25, 0.5]]), torch.tensor([0, 0, 1, 0]))]
        >>> report = evaluate(model, data, attacks=["pgd"], eps=0.25, progress=False)
        >>> report.metrics["acc"], round(report.metrics["asr/pgd"], 3), report.metrics["adv_acc/pgd"]
        (0.75, 0.333, 0.5)

    """
    check_flag("per_sample", per_sample)
    check_flag("warm_starts", warm_starts)
    check_integer("num_examples", num_examples, minimum=0)
    access = Access(input_space, head, num_classes, forward_fn, embed_fn, batch_fn)
    budgets = read_budgets("sweep_budgets", sweep_budgets)
    # Everything is made before the data is touched, so that a wrong argument is found here
    plan = Plan.of(
        attacks,
        eps,
        access.input_space,
        attack_samples,
        strength,
        norm,
        boundary_eps=budgets[len(budgets) // 2] if budgets else None,
        fim_samples=fim_samples,
        fim_method=fim_method,
        clever_samples=clever_samples,
        clever_radius=clever_radius,
        storage=storage,
        roby_p=roby_p,
        batch_size=batch_size,
        seed=seed,
    )
    extra = _extra_meters(plan, budgets, sweep_attacks, warm_starts, decision_space, eps, strength, norm)
    settings = plan.describe() | {"torch": torch.__version__}
    facts = {**settings, "function": "evaluate", "attack_samples": attack_samples, "sweep_budgets": budgets}
    facts |= {**access.describe(), "budget of minimum-norm attacks": plan.minimum_norm_budget, "other meters": extra}
    with open_session(model, dataloader, access, facts, device, batch_size, seed, progress, resume) as session:
        meters = [*plan.meters(), *plan.attack_meters(), *extra]
        look = partial(_look, bool(plan.attacks or extra), bool(meters))
        size = max([1, *(meter.size for meter in meters)])
        sweeps = [meter.plan[0] for meter in extra if isinstance(meter, SweepMeter)]
        swept = {f"{name} in the sweep": attack for own in sweeps for name, attack in own.items()}
        passed = pass_over(dataloader, session, size, look, storage, roby_p, {**plan.attacks, **swept})
        # Warnings have said what cannot be measured with discrete inputs
        measured = passed.measure(() if passed.found is None or passed.found.is_discrete else meters)
        findings = conclude(plan, passed.features, measured.rows)
        report = _report(findings, plan, passed, settings)
        report.interrupted = measured.interrupted
        if report.interrupted is None:
            try:
                report.adversarial_examples = _draw_pictures(findings, report.threat_model, plan, passed, num_examples)
            except KeyboardInterrupt:
                report.interrupted = "the adversarial examples"
        if report.interrupted is not None:
            rank_zero_warn(
                f"The evaluation was interrupted while it measured {report.interrupted}: its report has what was "
                "finished."
            )
        kind = report.settings.get("outputs")
        if kind in OUTPUT_WARNINGS:
            rank_zero_warn(f"{report.model}: {OUTPUT_WARNINGS[kind]}")
        if passed.features is not None and (doubt := doubt_logits(passed.features)):
            rank_zero_warn(f"{report.model}: {doubt}")
        report.metrics |= seconds(findings, _add_extra(report, extra, measured, budgets, passed))
        report.provenance |= session.origin(dataloader)
        if per_sample:
            report.per_sample = per_sample_columns(plan, findings)
        elif report.sweep is not None:
            report.sweep = report.sweep._without_samples()
        return report


def _look(needs_labels: bool, needs_gradients: bool, subject: Subject, batch: Batch) -> tuple[Subject, Found]:
    """Find out about the model on the first batch."""
    if needs_labels:
        require_labels(batch.y, "attacks", otherwise="measure without them: `attacks=()`")
    subject, found = inspect(subject, batch, needs_gradients)
    if subject.access.forward_fn is None:
        warn_of_unused_layers(subject.model, found.route)
    return subject, found


def _extra_meters(
    plan: Plan,
    budgets: Sequence[float],
    sweep_attacks: Iterable[AttackLike] | Mapping[str, AttackLike],
    warm_starts: bool,
    decision_space: Projection | None,
    eps: float | None,
    strength: Strength,
    norm: Norm,
) -> list[Meter]:
    """Return the meters of a sweep and of the decision space, which only reports have."""
    meters: list[Meter] = []
    if budgets or decision_space is not None:
        check_integer("attack_samples", plan.attack_samples, minimum=1)
    sweep_attacks = list_attacks(sweep_attacks, "sweep_attacks")
    if not budgets and sweep_attacks != list(SWEEP_ATTACKS):
        raise ValueError(
            f"Expected argument `sweep_budgets` with `sweep_attacks` but got none. Pass budgets, such as "
            f"{list(SWEEP_BUDGETS[4::5])}, or leave `sweep_attacks` out."
        )
    if budgets:
        sweep = plan_sweep(sweep_attacks, budgets, plan.input_space, "sweep_", strength, norm)
        announce(sweep[0], plan.attack_samples, len(budgets))
        meters.append(SweepMeter(plan.attack_samples, sweep, warm_starts))
    if decision_space is not None:
        get_projection(decision_space, plan.seed)
        ((name, attack),) = name_attacks(["pgd"], eps, "paper", norm).items()
        check_budgets([attack], plan.input_space)
        meters.append(DecisionSpaceMeter(plan.attack_samples, name, attack, decision_space))
    return meters


def _draw_pictures(
    findings: Findings, threat: ThreatModel, plan: Plan, passed: Passed, number: int
) -> list[AdversarialExample]:
    """Draw samples that the first attack with a budget broke or, without such an attack, the first one."""
    if not number or passed.found is None or not passed.found.is_image:
        return []
    subject, processes, _ = passed.session
    successful = [name for name, rows in findings.attacks.items() if rows["success"].any()]
    bounded = [name for name in successful if threat.attacks[name].budgets]
    if not successful:
        return []
    name = (bounded or successful)[0]
    rows = findings.attacks[name]
    positions = rows.positions[rows["success"]][:number]
    (meter,) = plan.attack_meters([name])
    examples = attack_again(meter, subject, passed.take(meter.size), positions, processes)
    return [] if examples is None else make_examples(name, examples, plan.input_space)


def _report(findings: Findings, plan: Plan, passed: Passed, settings: Mapping[str, str]) -> RobustnessReport:
    found = passed.found
    head = {} if found is None else {"head": found.route.head or "none"}
    head |= {} if passed.features is None else {"outputs": passed.features.outputs}
    attacks = {name: plan.attacks[name] for name in findings.attacks}  # those that were finished
    queries = {name: rows["queries"].double().mean().item() for name, rows in findings.attacks.items()}
    number = max((len(rows) for rows in findings.attacks.values()), default=0)
    has_images = found is not None and found.is_image
    return RobustnessReport(
        model=type(passed.session.subject.model).__name__,
        num_classes=0 if found is None else found.route.num_classes,
        metrics={name: value for name, value in findings.values.items() if not name.startswith("seconds/")},
        rates=findings.rates,
        signs=findings.signs,
        settings={**head, **settings},
        boundary=findings.curve,
        threat_model=ThreatModel.of(attacks, plan.input_space, number, has_images, queries, findings.l2_budget),
        classes=[] if findings.worst is None else class_accuracies(findings.worst),
        outcomes={name: own.to_plain() for name, own in findings.estimates.items()},
    )


def _add_extra(
    report: RobustnessReport, meters: Iterable[Meter], measured: Measured, budgets: Sequence[float], passed: Passed
) -> dict[str, float]:
    """Add the sweep and the decision space to a report; return the seconds that they took."""
    times: dict[str, float] = {}
    for meter in meters:
        if isinstance(meter, SweepMeter):
            report.sweep = sweep_report(meter, budgets, measured, passed)
            times |= {} if report.sweep is None else {"sweep": sum(report.sweep.seconds.values())}
        elif isinstance(meter, DecisionSpaceMeter) and meter.name in measured.rows:
            rows = measured.rows[meter.name]
            with passed.session.processes.step():
                report.decision_space = project(meter, rows, passed.session.subject)
            times["decision_space"] = rows.seconds
    return times
