import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_robustness._arguments import check_flag, check_integer, read_budgets
from lightning_robustness._measurement.assisted import assist, falling
from lightning_robustness._measurement.inspection import inspect_outputs
from lightning_robustness._measurement.meters.sweep import (
    SWEEP_ATTACKS,
    SWEEP_BUDGETS,
    SweepMeter,
    describe_sweep,
    plan_sweep,
)
from lightning_robustness._measurement.plan import WORST, AttackLike, announce
from lightning_robustness._measurement.subject import Subject
from lightning_robustness._measurement.threat_model import ThreatModel, is_image
from lightning_robustness._model.access import Access
from lightning_robustness._model.batch import Batch
from lightning_robustness._processes import rank_zero_warn
from lightning_robustness.attacks.attack import Norm
from lightning_robustness.attacks.registry import Strength
from lightning_robustness.evaluation.loading import Measured, Passed, pass_over
from lightning_robustness.evaluation.reports.sweep_report import SWEEP_METRICS, SweepReport
from lightning_robustness.evaluation.session import open_session
from lightning_robustness.input_space import InputSpace

DISCRETE = (
    "Expected inputs that attacks can change by small amounts but got integers. For tokens, pass `embed_fn=`, a "
    "callable that takes the model and tokens and returns their embeddings; for pixels up to 255 that the model "
    "converts itself, `input_space=InputSpace(high=255)`."
)


def sweep(
    model: nn.Module,
    dataloader: Iterable[Any],
    attacks: Iterable[AttackLike] | Mapping[str, AttackLike] = SWEEP_ATTACKS,
    budgets: Sequence[float] = SWEEP_BUDGETS,
    *,
    strength: Strength = "paper",
    norm: Norm = "linf",
    warm_starts: bool = True,
    attack_samples: int | None = 256,
    input_space: InputSpace | None = None,
    forward_fn: Callable[..., Any] | None = None,
    embed_fn: Callable[..., Any] | None = None,
    batch_fn: Callable[..., Any] | None = None,
    batch_size: int = 128,
    device: str | torch.device | None = None,
    seed: int = 0,
    per_sample: bool = False,
    progress: bool = True,
    resume: str | Path | None = None,
) -> SweepReport:
    """Attack a model with increasing budgets and measure accuracy and image quality at each of them.

    A sample that is broken at one budget is broken at all larger ones, because its adversarial image is within them:
    accuracy can only fall. The others start from where the attack ended at the previous budget, with the perturbation
    stretched to the new one, and take 40 % of the steps; more where more than a fifth of the budget is new, and all
    from a half on. FGSM only has to be stretched, since its gradient is the same at all budgets. Attacks other than PGD
    and its settings, and those with restarts, start again with what is left. With ``warm_starts=False``, each budget is
    attacked anew and accuracy is measured on images of full strength, equation 1 of the CMMR paper: it can rise again.

    Quality is measured on images of full strength of all samples, as in the CMMR paper: samples that are broken, or
    wrong without an attack, take all steps at every budget too, from where they were at the previous budget. Cascades
    and attacks from elsewhere count with what they return. Quality is measured for each image and then averaged, and
    does not depend on the size of batches.

    In an initialised process group, all processes must call it. Each attacks its share of the samples, and all return
    the report of a single process; see :func:`~lightning_robustness.evaluation.evaluate`.

    Args:
        model: The trained model.
        dataloader: Batches with inputs and labels.
        attacks: Names of attacks, or attacks whose budget can be set; a mapping gives them names.
        budgets: Budgets in un-normalised units, increasing.
        warm_starts: Whether attacks start from where they ended at the previous budget, and broken samples stay broken.
        strength: How hard attacks by name try, ``"fast"``, ``"strong"`` or ``"paper"``: see ``attacks.get_attack``.
        norm: Norm of the budgets of attacks that are given by name, ``"linf"`` or ``"l2"``.
        attack_samples: Number of samples, spread over the loader; None for all, which are then held in memory.
        input_space: Input range, and the normalisation the loader applies; by default [0, 1] and none.
        forward_fn: Callable that takes the model and inputs and returns logits, where ``model(x)`` does not.
        embed_fn: Callable that takes the model and what the loader yields, such as tokens, and returns embeddings: the
            inputs that are perturbed then; see :func:`~lightning_robustness.evaluation.evaluate`.
        batch_fn: Callable that takes a batch and returns inputs and labels, for batches of unusual form.
        batch_size: Number of samples to attack at a time.
        device: Where to run; by default where the model is. The model is moved back afterwards.
        seed: Seed of the sample and of random starts.
        per_sample: Whether to keep the smallest budget that breaks each sample, and where it was in the loader.
        progress: Whether to show a progress bar, in the first process.
        resume: Folder for what is finished, batch by batch. With the same folder a run that was interrupted or killed
            continues where it was, with any number of processes.

    Returns:
        The curves; of the samples that were finished if the run is interrupted.

    Raises:
        KeyboardInterrupt: If the run is interrupted before any samples are finished.
        RuntimeError: If another process failed.
        TypeError: If the model is not a module, or the loader something else.
        ValueError: If budgets are not positive and increasing, an attack has no budget that can be set, the loader has
            no labels, an argument is out of range, processes have different weights or orders of the loader, or results
            in the folder are of other weights, data or settings.

    Example:
        >>> import torch
        >>> from lightning_robustness.evaluation import sweep
        >>> model = torch.nn.Linear(2, 2)
        >>> model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
        >>> data = [(torch.tensor([[0.75, 0.5], [1.0, 0.5], [0.25, 0.5]]), torch.tensor([0, 0, 0]))]
        >>> report = sweep(model, data, attacks=["fgsm"], budgets=[0.125, 0.25, 0.375], progress=False)
        >>> [round(value, 3) for value in report.values["accuracy"][0]]
        [0.667, 0.333, 0.0]

    """
    check_flag("per_sample", per_sample)
    check_flag("warm_starts", warm_starts)
    check_integer("seed", seed, minimum=0)
    check_integer("batch_size", batch_size, minimum=1)
    if attack_samples is not None:
        check_integer("attack_samples", attack_samples, minimum=1)
    access = Access(input_space, forward_fn=forward_fn, embed_fn=embed_fn, batch_fn=batch_fn)
    budgets = read_budgets("budgets", budgets)
    plan = plan_sweep(attacks, budgets, access.input_space, strength=strength, norm=norm)
    facts = {"function": "sweep", "attacks": plan[0], "budgets": budgets, "warm_starts": warm_starts}
    facts |= {"attack_samples": attack_samples, "seed": seed}
    facts |= {"input space": access.input_space, **access.describe()}
    with open_session(model, dataloader, access, facts, device, batch_size, seed, progress, resume) as session:
        passed = pass_over(dataloader, session, attack_samples, _look, attacks=plan[0])
        if passed.is_interrupted:
            raise KeyboardInterrupt
        meter = SweepMeter(sys.maxsize if attack_samples is None else attack_samples, plan, warm_starts)
        announce(plan[0], _count(passed, meter), len(budgets))
        report = sweep_report(meter, budgets, passed.measure([meter]), passed)
        if report is None:
            raise KeyboardInterrupt
        report.provenance |= session.origin(dataloader)
    return report if per_sample else report._without_samples()


def sweep_report(meter: SweepMeter, budgets: Sequence[float], measured: Measured, passed: Passed) -> SweepReport | None:
    """Report a sweep of the sample of a pass, as far as it was finished; None if no samples are."""
    rows = measured.rows.get(meter.name)
    if rows is None or not len(rows):
        return None
    subject, processes, _ = passed.session
    names, first, right = list(meter.plan[0]), rows["first"], rows["right"]
    is_interrupted = measured.interrupted == meter.label
    if is_interrupted:
        total = _count(passed, meter)
        rank_zero_warn(f"The sweep was interrupted: its report covers {len(rows)} of {total} samples.")
    samples = passed.take(meter.size)
    has_images = len(samples.positions) > 0 and is_image(samples.x[:1]) and subject.access.embed_fn is None
    are_images = any(processes.gather(has_images))
    margins = None if passed.features is None else passed.features.margins
    rights = dict(zip([*names, WORST], [*right.unbind(dim=1), right.all(dim=1)], strict=True))
    known = {name: [assist(margins, subject.seed, rows, column) for column in own.T] for name, own in rights.items()}
    order = falling if meter.warm_starts else list
    shares = {name: order([own.estimate() for own in row]) for name, row in known.items()}
    # The worst case is never above an attack
    shares[WORST] = [falling(list(column))[-1] for column in zip(*shares.values(), strict=True)]
    # Shape: attacks, budgets, metrics
    values = torch.cat([right.double().mean(dim=0).unsqueeze(2), rows["quality"].mean(dim=0)], dim=2)
    ends = torch.tensor([0.0, *budgets, math.inf], dtype=torch.float64)
    is_right = first[:, 0] >= 0 if margins is None or not len(margins) else margins["right"]
    seconds = rows["seconds"].sum(dim=0)
    share = rows.seconds / seconds.sum().item()  # of the slowest process
    settings = describe_sweep(meter.plan, budgets, rows["y"], subject.input_space, subject.seed)
    return SweepReport(
        attacks=names,
        budgets=list(budgets),
        values={name: values[..., number].tolist() for number, name in enumerate(SWEEP_METRICS)},
        worst=[share.value for share in shares[WORST]],
        clean_accuracy=is_right.double().mean().item(),
        samples=len(first),
        seconds=dict(zip(names, (share * seconds).tolist(), strict=True)),
        settings=settings | ({} if meter.warm_starts else {"warm starts": "no"}),
        interrupted=is_interrupted,
        breaking_eps={name: ends[column + 1].tolist() for name, column in zip(names, first.T, strict=True)},
        index=rows.positions.tolist(),
        shares=shares,
        outcomes=[own.to_plain() for own in known[WORST]],
        threat_model=ThreatModel.of(meter.plan[0], subject.input_space, len(rows), are_images),
    )


def _count(passed: Passed, meter: SweepMeter) -> int:
    """Count the samples of all processes."""
    return sum(passed.session.processes.gather(len(passed.take(meter.size).positions)))


def _look(subject: Subject, batch: Batch) -> tuple[Subject, None]:
    """Find out how the logits of a model come about; the attacks check the range of the inputs."""
    batch.labels()
    model, access = subject.model, subject.access
    if not batch.x.is_floating_point() and access.embed_fn is None and not access.takes_bytes(batch.x):
        raise TypeError(DISCRETE)
    subject = replace(subject, extra=access.find_extras(model, batch))
    return replace(subject, route=inspect_outputs(model, access, subject.logits_of_loaded, batch)), None
