import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_robustness.attacks import PGD, Attack, Budget, Cascade, budget_of
from lightning_robustness.attacks.attack import perturb
from lightning_robustness.attacks.classifier import Classifier, open_classifier
from lightning_robustness.evaluation.image_quality import image_quality
from lightning_robustness.evaluation.loading import check_setting, collect, on_device
from lightning_robustness.evaluation.sweep_plan import (
    SWEEP_ATTACKS,
    SWEEP_EPS,
    describe_sweep,
    plan_sweep,
    read_budgets,
)
from lightning_robustness.evaluation.sweep_report import SWEEP_METRICS, SweepReport
from lightning_robustness.measurement.attack_names import AttackLike
from lightning_robustness.measurement.subject import Samples, Subject
from lightning_robustness.measurement.threat_model import ThreatModel, is_image
from lightning_robustness.utilities.checks import check_device, check_functions, check_integer, check_module
from lightning_robustness.utilities.input_space import InputSpace, check_input_space
from lightning_robustness.utilities.logits import check_finite
from lightning_robustness.utilities.provenance import describe_data, describe_run
from lightning_robustness.utilities.rank_zero import rank_zero_warn

# Least share of an attack's steps that it takes from a warm start: with fewer, accuracy was up to two percentage points
# above that of independent attacks on some networks, instead of half a point
_WARM_SHARE = 0.4


def sweep(
    model: nn.Module,
    dataloader: Iterable[Any],
    attacks: Iterable[AttackLike] | Mapping[str, AttackLike] = SWEEP_ATTACKS,
    eps: Sequence[float] = SWEEP_EPS,
    input_space: InputSpace | None = None,
    samples: int | None = 512,
    forward_fn: Callable[..., Any] | None = None,
    batch_fn: Callable[..., Any] | None = None,
    batch_size: int = 128,
    device: str | torch.device | None = None,
    seed: int = 0,
    per_sample: bool = False,
    progress: bool = True,
) -> SweepReport:
    """Attack a model with increasing budgets and measure accuracy and image quality at each of them.

    A sample that is broken at one budget is broken at all larger ones, because its adversarial image is within them:
    accuracy can only fall. The others start from where the attack ended at the budget
    before, with the perturbation stretched to the new one, and take 40 % of the steps; more where more than a fifth of
    the budget is new, and all from a half on. FGSM only has to be stretched, since its gradient is the same at all
    budgets. Attacks other than PGD and its settings, and those with restarts, start anew with what is left.

    Quality is that of images of full strength of all samples, as in the CMMR paper: samples that are broken, or wrong
    without an attack, go on to the last step at every budget too, from where they were at the budget before. Cascades
    and attacks from elsewhere count with what they return. Quality is measured for each image and then averaged, and
    does not depend on the size of batches.

    Args:
        model: The trained model.
        dataloader: Batches with inputs and labels.
        attacks: Names of attacks, or attacks whose budget can be set; a mapping gives them names.
        eps: Budgets in un-normalised units, increasing.
        input_space: Range and normalisation of the inputs; by default, values in [0, 1] as they are.
        samples: Number of samples, spread over the loader; None for all, which are then held in memory.
        forward_fn: Callable that takes the model and inputs and returns logits, where ``model(x)`` does not.
        batch_fn: Callable that takes a batch and returns inputs and labels, for batches of unusual form.
        batch_size: Number of samples to attack at a time.
        device: Where to run; by default where the model is. It is moved back in the end.
        seed: Seed of the sample and of random starts.
        per_sample: Whether to keep the smallest budget that breaks each sample, and where it was in the loader.
        progress: Whether to show a progress bar.

    Returns:
        The curves; of the samples that were finished if the run is interrupted.

    Raises:
        RuntimeError: If there are several processes.
        TypeError: If the model is not a module, or the loader something else.
        ValueError: If budgets are not positive and increasing, an attack has no budget that can be set, the loader has
            no labels, or an argument is out of range.

    Example:
        >>> import torch
        >>> from lightning_robustness.evaluation import sweep
        >>> model = torch.nn.Linear(2, 2)
        >>> model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
        >>> data = [(torch.tensor([[0.75, 0.5], [1.0, 0.5], [0.25, 0.5]]), torch.tensor([0, 0, 0]))]
        >>> report = sweep(model, data, attacks=["fgsm"], eps=[0.125, 0.25, 0.375], progress=False)
        >>> [round(value, 3) for value in report.values["accuracy"][0]]
        [0.667, 0.333, 0.0]

    """
    check_module(model, "which can be moved to a device")
    check_setting(dataloader)
    check_functions(forward_fn, batch_fn)
    check_device(device)
    check_integer("seed", seed, minimum=0)
    check_integer("batch_size", batch_size, minimum=1)
    if samples is not None:
        check_integer("samples", samples, minimum=1)
    space, eps = check_input_space(input_space), read_budgets(eps)
    plan = plan_sweep(attacks, eps, space)
    forward: Callable[..., Any] = model if forward_fn is None else partial(forward_fn, model)
    samples_of_loader, extra = collect(model, dataloader, batch_fn, samples, seed, progress, forward)
    forward = forward if extra is None else extra.bind(forward)
    with on_device(model, device) as place:
        subject = Subject(forward, space, place, batch_size, seed, progress, extra)
        report = sweep_samples(subject, samples_of_loader, plan, eps)
    report.provenance |= describe_run(place) | describe_data(dataloader) | {"seed": str(seed)}
    return report if per_sample else report.without_samples()


def sweep_samples(
    subject: Subject, samples: Samples, plan: Sequence[Mapping[str, Callable[..., Any]]], eps: Sequence[float]
) -> SweepReport:
    """Attack samples with the attacks of a plan, one set for each budget."""
    curves = {name: _Curve(len(eps)) for name in plan[0]}
    number, is_interrupted, space = 0, False, subject.input_space
    try:
        for batch in subject.batches(samples, "sweep"):
            results = [_sweep_batch(subject, [named[name] for named in plan], batch) for name in curves]
            for curve, result in zip(curves.values(), results, strict=True):
                curve.add(result)
            number += len(batch.x)
    except KeyboardInterrupt:
        is_interrupted = True
        rank_zero_warn(f"The sweep was interrupted: its report covers {number} of {len(samples.x)} samples.")
    settings = describe_sweep(plan, eps, samples.labels()[:number], space, subject.seed)
    report = _report(curves, eps, is_interrupted)
    are_images = len(samples.x) > 0 and is_image(samples.x[:1]) and subject.embed is None
    threat = ThreatModel.of(plan[0], space, number, are_images)
    return replace(report, settings=settings, index=samples.positions[:number].tolist(), threat_model=threat)


class _BatchResult(NamedTuple):
    """Index of the first budget that breaks each sample, -1 if none is needed; sums of quality; seconds."""

    first: Tensor
    quality: Tensor
    seconds: float


class _Curve:
    """Results of an attack at each budget, over all batches."""

    def __init__(self, num_budgets: int) -> None:
        self.firsts: list[Tensor] = []
        self.quality = torch.zeros(num_budgets, len(SWEEP_METRICS) - 1, dtype=torch.float64)
        self.seconds = 0.0

    def add(self, result: _BatchResult) -> None:
        self.firsts.append(result.first.cpu())
        self.quality += result.quality.cpu()
        self.seconds += result.seconds

    @property
    def first(self) -> Tensor:
        return torch.cat([torch.zeros(0, dtype=torch.long), *self.firsts])

    def values(self) -> Tensor:
        """Metrics in the order of ``SWEEP_METRICS``, of shape ``(metrics, budgets)``."""
        quality = self.quality / len(self.first)
        return torch.stack([_survivors(self.first, len(quality)), *quality.T])


def _sweep_batch(subject: Subject, attacks: Sequence[Callable[..., Any]], batch: Samples) -> _BatchResult:
    start, input_space = perf_counter(), subject.input_space
    x, y, positions = batch.x, batch.labels(), batch.positions
    opened = open_classifier(subject.forward, x, y, input_space, subject.seed, positions=positions)
    with opened as (model, x, y):
        with torch.no_grad():
            logits = model.from_normalized(x)
        check_finite(logits)
        is_right = logits.argmax(dim=1) == y
        first, qualities = torch.where(is_right, len(attacks), -1), []
        x, space = model.unnormalize(x), InputSpace(input_space.low, input_space.high)
        for number, (x_adv, broken) in enumerate(_follow(model, attacks, x, y, is_right)):
            first[broken] = number
            qualities.append(torch.stack([part.sum() for part in image_quality(x_adv, x, space)]))
    return _BatchResult(first, torch.stack(qualities), perf_counter() - start)


def _follow(
    model: Classifier, attacks: Sequence[Callable[..., Any]], x: Tensor, y: Tensor, is_right: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Attack with one budget after the other; give images of full strength, and indices of newly broken samples."""
    x_adv, before, is_right = x, None, is_right.clone()
    for attack in attacks:
        start = x if before is None else _stretch(model, attack, x, x_adv)
        x_adv, broken = start.clone(), is_right.nonzero().squeeze(1)
        if len(broken):
            active = broken
            x_adv[active] = _advance(model, attack, before, x, y, start, active)
            with torch.no_grad():
                broken = active[model(x_adv[active]).argmax(dim=1) != y[active]]
            is_right[broken] = False
        rest = (~is_right).nonzero().squeeze(1)  # which left early, or were not attacked
        if len(rest):
            x_adv[rest] = _advance(model, _at_full_strength(attack), before, x, y, start, rest)
        before = attack
        yield x_adv, broken


def _at_full_strength(attack: Callable[..., Any]) -> Callable[..., Any]:
    is_single = isinstance(attack, Attack) and not isinstance(attack, Cascade)
    return replace(attack, all_steps=True) if is_single else attack  # type: ignore[type-var]


def _advance(
    model: Classifier,
    attack: Callable[..., Any],
    before: Callable[..., Any] | None,
    x: Tensor,
    y: Tensor,
    x_adv: Tensor,
    active: Tensor,
) -> Tensor:
    """Attack the active samples, from what is left of the budget before where the attack can start there."""
    if not isinstance(before, PGD) or not isinstance(attack, PGD) or attack.num_restarts > 1:
        return perturb(attack, model, x, y, active).x_adv[active]
    if attack.steps == 1 and attack.start == "clean" and attack.alpha is None:
        return x_adv[active]
    share = min(1.0, max(_WARM_SHARE, 2 * (1 - before.eps / attack.eps)))
    shorter = replace(attack, steps=math.ceil(share * attack.steps), alpha=attack.step_size)
    return shorter.descend(model, x[active], y[active], x_adv[active]).x_adv


def _stretch(model: Classifier, attack: Callable[..., Any], x: Tensor, x_adv: Tensor) -> Tensor:
    """Enlarge perturbations until they use the whole budget."""
    norm, eps = cast(Budget, budget_of(attack, model.input_space))  # `plan_sweep` refuses attacks without a budget
    delta = x_adv - x
    size = torch.linalg.vector_norm(delta.flatten(1), ord=2 if norm == "l2" else torch.inf, dim=1)
    factor = torch.where(size > 0, eps / size, 1.0)
    return model.clamp(x + delta * factor.reshape(-1, *[1] * (x.ndim - 1)))


def _survivors(first: Tensor, num_budgets: int) -> Tensor:
    """Share of samples that are right at each budget."""
    return (first.unsqueeze(1) > torch.arange(num_budgets)).double().mean(dim=0)


def _report(curves: Mapping[str, _Curve], eps: Sequence[float], is_interrupted: bool) -> SweepReport:
    first = torch.stack([curve.first for curve in curves.values()])
    values = torch.stack([curve.values() for curve in curves.values()])
    budgets = torch.tensor([0.0, *eps, math.inf], dtype=torch.float64)
    return SweepReport(
        attacks=list(curves),
        eps=list(eps),
        values={name: values[:, number].tolist() for number, name in enumerate(SWEEP_METRICS)},
        worst=_survivors(first.amin(dim=0), len(eps)).tolist(),
        clean_accuracy=(first[0] >= 0).double().mean().item(),
        samples=first.shape[1],
        seconds={name: curve.seconds for name, curve in curves.items()},
        interrupted=is_interrupted,
        breaking_eps={name: budgets[curve.first + 1].tolist() for name, curve in curves.items()},
    )
