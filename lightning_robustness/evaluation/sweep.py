from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_robustness.evaluation.collecting import collect
from lightning_robustness.evaluation.loading import check_loader, on_device
from lightning_robustness.evaluation.processes import Processes
from lightning_robustness.evaluation.resume import Records, check_folder
from lightning_robustness.evaluation.setting import open_setting, unwrap
from lightning_robustness.evaluation.sweep_plan import SWEEP_ATTACKS, SWEEP_EPS, plan_sweep, read_budgets
from lightning_robustness.evaluation.sweep_report import SweepReport
from lightning_robustness.evaluation.sweep_samples import sweep_samples
from lightning_robustness.measurement.attack_names import AttackLike
from lightning_robustness.measurement.subject import Subject
from lightning_robustness.utilities.checks import check_device, check_flag, check_functions, check_integer, check_module
from lightning_robustness.utilities.input_space import InputSpace, check_input_space
from lightning_robustness.utilities.provenance import describe_data, describe_run


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
    embed_fn: Callable[..., Any] | None = None,
    resume: str | Path | None = None,
) -> SweepReport:
    """Attack a model with increasing budgets and measure accuracy and image quality at each of them.

    A sample that is broken at one budget is broken at all larger ones, because its adversarial image is within them:
    accuracy can only fall. The others start from where the attack ended at the budget before, with the perturbation
    stretched to the new one, and take 40 % of the steps; more where more than a fifth of the budget is new, and all
    from a half on. FGSM only has to be stretched, since its gradient is the same at all budgets. Attacks other than PGD
    and its settings, and those with restarts, start again with what is left.

    Quality is that of images of full strength of all samples, as in the CMMR paper: samples that are broken, or wrong
    without an attack, go on to the last step at every budget too, from where they were at the budget before. Cascades
    and attacks from elsewhere count with what they return. Quality is measured for each image and then averaged, and
    does not depend on the size of batches.

    In an initialised process group, all processes must call it. Each attacks its share of the samples, and all return
    the report of a single process; see :func:`~lightning_robustness.evaluation.evaluate`.

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
        progress: Whether to show a progress bar, in the first process.
        embed_fn: Callable that takes the model and what the loader gives, such as tokens, and returns embeddings: the
            inputs that are perturbed then; see :func:`~lightning_robustness.evaluation.evaluate`.
        resume: Folder for what is finished, batch by batch. With the same folder a run that was interrupted or killed
            goes on where it was, in any number of processes.

    Returns:
        The curves; of the samples that were finished if the run is interrupted.

    Raises:
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
        >>> report = sweep(model, data, attacks=["fgsm"], eps=[0.125, 0.25, 0.375], progress=False)
        >>> [round(value, 3) for value in report.values["accuracy"][0]]
        [0.667, 0.333, 0.0]

    """
    check_module(model, "which can be moved to a device")
    check_loader(dataloader)
    check_folder(resume)
    check_functions(forward_fn, batch_fn, embed_fn)
    check_device(device)
    check_integer("seed", seed, minimum=0)
    check_integer("batch_size", batch_size, minimum=1)
    check_flag("per_sample", per_sample)
    check_flag("progress", progress)
    if samples is not None:
        check_integer("samples", samples, minimum=1)
    space, eps = check_input_space(input_space, bounded=embed_fn is None), read_budgets("eps", eps)
    plan = plan_sweep(attacks, eps, space)
    processes, model = Processes(), unwrap(model)
    records = Records(resume, processes)
    facts: dict[str, Any] = {
        "function": "sweep",
        "attacks": plan[0],
        "eps": eps,
        "samples": samples,
        "input space": space,
        "seed": seed,
    }
    facts |= {"forward_fn": forward_fn, "embed_fn": embed_fn, "batch_fn": batch_fn}
    open_setting(model, processes, records, facts)
    shown = progress and processes.rank == 0
    forward: Callable[..., Any] = model if forward_fn is None else partial(forward_fn, model)
    name = None if embed_fn is None else "inputs_embeds"
    own, extra = collect(model, dataloader, batch_fn, samples, seed, shown, forward, name, processes, records)
    forward = forward if extra is None else extra.bind(forward)
    embed = None if embed_fn is None else partial(embed_fn, model)
    with processes.together(on_device(model, device)) as place:
        subject = Subject(forward, space, place, batch_size, seed, shown, extra, embed)
        report = sweep_samples(subject, own, plan, eps, processes, records)
        origin = describe_run(place) | describe_data(dataloader) | {"seed": str(seed)}
        report.provenance |= processes.gather(origin)[0]
    return report if per_sample else report.without_samples()
