from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_robustness.attacks.budget import check_budgets
from lightning_robustness.evaluation.decision_space import Projection, get_projection
from lightning_robustness.evaluation.evaluation_run import EvaluationRun, Part
from lightning_robustness.evaluation.feature_pass import FeaturePass, FeatureSettings
from lightning_robustness.evaluation.loading import check_loader, on_device
from lightning_robustness.evaluation.processes import Processes
from lightning_robustness.evaluation.resume import Records, check_folder
from lightning_robustness.evaluation.robustness_report import RobustnessReport
from lightning_robustness.evaluation.setting import open_setting, unwrap
from lightning_robustness.evaluation.sweep_plan import SWEEP_ATTACKS, plan_sweep, read_budgets
from lightning_robustness.functional.fisher_spectral_norm import FisherMethod
from lightning_robustness.measurement.attack_names import DEFAULT_ATTACKS, AttackLike, name_attacks
from lightning_robustness.measurement.meter import SampleMeter
from lightning_robustness.measurement.sample_meters import common_budget, make_sample_meters
from lightning_robustness.measurement.settings import describe_settings
from lightning_robustness.measurement.subject import Subject
from lightning_robustness.metrics.class_statistics import Mode
from lightning_robustness.utilities.checks import check_device, check_functions, check_head, check_integer, check_module
from lightning_robustness.utilities.input_space import InputSpace, check_input_space
from lightning_robustness.utilities.provenance import describe_data, describe_run


def evaluate(
    model: nn.Module,
    dataloader: Iterable[Any],
    attacks: Iterable[AttackLike] | Mapping[str, AttackLike] = DEFAULT_ATTACKS,
    eps: float | None = 8 / 255,
    input_space: InputSpace | None = None,
    num_classes: int | None = None,
    head: str | nn.Module | None = None,
    forward_fn: Callable[..., Any] | None = None,
    embed_fn: Callable[..., Any] | None = None,
    batch_fn: Callable[..., Any] | None = None,
    samples: int | None = None,
    fim_samples: int = 256,
    fim_method: FisherMethod = "auto",
    attack_samples: int = 512,
    clever_samples: int = 0,
    clever_radius: float = 2.0,
    sweep_eps: Sequence[float] = (),
    sweep_attacks: Iterable[AttackLike] | Mapping[str, AttackLike] = SWEEP_ATTACKS,
    decision_space: Projection | None = None,
    batch_size: int = 128,
    device: str | torch.device | None = None,
    seed: int = 0,
    mode: Mode = "auto",
    per_sample: bool = False,
    num_examples: int = 8,
    progress: bool = True,
    resume: str | Path | None = None,
) -> RobustnessReport:
    """Measure how robust a trained model is, with and without attacks.

    The numbers are those that ``RobustnessMonitor`` logs for the same weights, data and settings: RDI and ROBY of all
    samples, Fisher information and attacks of a fixed sample that is spread over the loader. The model, its gradients
    and modes, and all random states are afterwards what they were.

    In an initialised process group, all processes must call it. Each then measures its share of the samples, and all of
    them return the report of a single process. An ordinary loader over a map-style data set is enough; one that
    shuffles does so with ``seed``. A loader that divides the samples itself, by a ``DistributedSampler`` or as an
    iterable data set, is taken as it is. An error in one process ends all of them.

    Args:
        model: The trained model, any module that returns logits.
        dataloader: Batches with inputs and labels; labels are needed for attacks and accuracy.
        attacks: Names of attacks, attacks, or other callables ``(model, x, y) -> x_adv``; a mapping gives them names.
            Empty for none. ``"pgd"`` by name is the strong one, ``get_attack("strong_pgd")``; pass ``PGD()`` for the
            published attack. ``"cw"`` by name is ``MinimumNormCW(initial_steps=16, steps=2)`` and ``"square"`` takes
            100 queries; pass ``CW()`` or ``Square()`` for the published attacks. Success of an attack without a budget
            that looks for the smallest l2 perturbation counts within an l2 budget: that of the other attacks, or
            ``max(eps, eps * sqrt(d) / 4)`` for inputs of d values if theirs is in l-infinity.
        eps: Budget of attacks that are given by name, in un-normalised units; None for their defaults, which attacks in
            the l2 norm keep in any case.
        input_space: What the loader does to inputs: range and normalisation; by default, nothing, to values in [0, 1].
        num_classes: Number of classes, to be checked; by default the number of logits.
        head: The classifier head, by name or as a module; by default it is found.
        forward_fn: Callable that takes the model and inputs and returns logits, where ``model(x)`` does not.
        embed_fn: Callable that takes the model and what the loader gives, such as tokens, and returns embeddings: the
            inputs that are perturbed then, in a space without bounds unless ``input_space`` has some. ``forward_fn``
            takes them to logits; by default ``model(inputs_embeds=...)`` if it has such an argument.
        batch_fn: Callable that takes a batch and returns inputs and labels, for batches of unusual form; as a third
            value a dictionary of what else ``forward`` takes from a batch, with one row per sample.
        samples: Number of samples for the Fisher information and for attacks alike, instead of the next ones.
        fim_samples: Number of samples for the Fisher information, and for the distance to the decision boundary that
            comes with it; 0 for none.
        fim_method: How it is computed; see ``functional.fisher_spectral_norm``.
        attack_samples: Number of samples to attack; 0 for none.
        clever_samples: Number of samples for CLEVER, which takes thousands of gradients each; 0 for none.
        clever_radius: Radius of the ball in which CLEVER looks, in un-normalised units: no score is larger.
        sweep_eps: Budgets of a sweep, increasing, for curves and for ``compare``; empty for none.
        sweep_attacks: Attacks of the sweep; see :func:`~lightning_robustness.evaluation.sweep`.
        decision_space: ``"pca"`` or ``"tsne"`` to keep the embeddings of clean and adversarial samples in the plane,
            with PGD of the budget ``eps``.
        batch_size: Number of samples of the sample that are worked on at a time.
        device: Where to run; by default where the model is. It is moved back in the end.
        seed: Seed of the sample, of random starts and directions.
        mode: ``"exact"`` keeps all features; ``"streaming"`` bounds its memory; ``"auto"`` is exact up to 1 GiB of
            features and streaming beyond, with a warning.
        per_sample: Whether to keep the results of each sample.
        num_examples: Number of adversarial examples to keep in the report as small pictures, if the inputs are images.
        progress: Whether to show progress bars, in the first process.
        resume: Folder for what is finished, batch by batch. With the same folder a run that was interrupted or killed
            goes on where it was, in any number of processes.

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
    check_module(model, "in which the head can be found")
    check_loader(dataloader)
    check_folder(resume)
    check_functions(forward_fn, batch_fn, embed_fn)
    check_head(head)
    check_device(device)
    check_integer("seed", seed, minimum=0)
    space, budgets = check_input_space(input_space, bounded=embed_fn is None), read_budgets(sweep_eps)
    needs_attacks = bool(budgets or decision_space)
    if samples is not None:
        fim_samples = attack_samples = check_integer("samples", samples, minimum=1 if needs_attacks else 0)
    check_integer("attack_samples", attack_samples, minimum=1 if needs_attacks else 0)
    check_integer("batch_size", batch_size, minimum=1)
    check_integer("num_examples", num_examples, minimum=0)
    # Everything is made before the data is touched, so that a wrong argument is found here
    named = name_attacks(attacks, eps) if attack_samples else {}
    budget = common_budget(named.values(), budgets[len(budgets) // 2] if budgets else eps, space)
    l2_budget = common_budget(named.values(), eps, space, first="l2")
    meters = make_sample_meters(space, seed, fim_samples, fim_method, clever_samples, clever_radius, budget)
    if decision_space is not None:
        get_projection(decision_space, seed)
        check_budgets(name_attacks(["pgd"], eps).values(), space)
    check_budgets(named.values(), space)
    plan = plan_sweep(sweep_attacks, budgets, space) if budgets else []
    settings = describe_settings(named, attack_samples, meters, mode, space, seed) | {"torch": torch.__version__}
    processes, model = Processes(), unwrap(model)
    records = Records(resume, processes)
    facts = {"function": "evaluate", "attack_samples": attack_samples, "num_classes": num_classes, "head": head}
    facts |= {"forward_fn": forward_fn, "embed_fn": embed_fn, "batch_fn": batch_fn, "sweep_eps": budgets}
    facts |= {"sweep_attacks": plan[:1], "decision_space": decision_space and (decision_space, eps)}
    facts |= {"budget of minimum-norm attacks": l2_budget}
    open_setting(model, processes, records, settings | facts)
    forward = model if forward_fn is None else partial(forward_fn, model)
    with processes.together(on_device(model, device)) as place:
        embed = None if embed_fn is None else partial(embed_fn, model)
        shown = progress and processes.rank == 0
        subject = Subject(forward, space, place, batch_size, seed, shown, embed=embed)
        attacked = attack_samples if named or needs_attacks else 0
        sizes = [attacked, *(meter.size for meter in meters)]
        wanted = FeatureSettings(batch_fn, head, num_classes, mode, max(1, *sizes), bool(attacked), any(sizes))
        features = FeaturePass(model, subject, wanted, processes, records)
        run = EvaluationRun(model, features, named, attacked, space, processes, records, l2_budget)
        parts = [Part("the features", partial(run.measure_features, dataloader))]
        parts += _list_parts(run, meters, named, num_examples, plan, budgets)
        if decision_space is not None:
            project = partial(run.project, name_attacks(["pgd"], eps, as_published=True), decision_space)
            parts.append(Part("the decision space", project))
        run.measure(parts)
        origin = describe_run(place) | describe_data(dataloader) | {"seed": str(seed)}
        return run.report(settings, per_sample, origin)


def _list_parts(
    run: EvaluationRun,
    meters: Iterable[SampleMeter],
    attacks: Collection[str],
    num_examples: int,
    plan: Sequence[Mapping[str, Callable[..., Any]]],
    budgets: Sequence[float],
) -> list[Part]:
    """List the parts that need the sample."""
    parts = [Part(meter.label, partial(run.measure_sample, meter)) for meter in meters if meter.size]
    parts += [Part(f"the attack {name}", partial(run.attack, name)) for name in attacks]
    if attacks and num_examples:
        parts.append(Part("the adversarial examples", partial(run.show_examples, num_examples)))
    return [*parts, Part("the sweep", partial(run.sweep, plan, budgets))] if plan else parts
