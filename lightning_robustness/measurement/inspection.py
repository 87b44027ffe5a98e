from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_robustness.attacks import Attack, run
from lightning_robustness.measurement.meter import SampleMeter
from lightning_robustness.measurement.subject import Samples, Subject
from lightning_robustness.utilities.head import HeadTap, find_head
from lightning_robustness.utilities.logits import are_probabilities, compute_logits
from lightning_robustness.utilities.rank_zero import rank_zero_warn
from lightning_robustness.utilities.sandbox import sandbox


class Inspection(NamedTuple):
    """The name of a model's head, its number of features, and the number of classes."""

    head: str
    num_features: int
    num_classes: int


def inspect_model(
    model: nn.Module,
    subject: Subject,
    x: Tensor,
    head: str | nn.Module | None = None,
    num_classes: int | None = None,
) -> Inspection:
    """Find the head and the number of classes of a model, on the first samples of a batch.

    Args:
        model: The module that holds the head.
        subject: What computes its logits.
        x: A batch of inputs.
        head: The head, by name or as a module, instead of looking for it.
        num_classes: Number of classes that is expected.

    Raises:
        ValueError: If the model fails, its head cannot be found, or the number of classes is another one.

    """
    few = x[:2]
    try:
        with sandbox(subject.forward, few) as (copies,), torch.no_grad():
            logits = compute_logits(subject.forward, copies)
    except Exception as error:
        raise ValueError(
            f"Expected `{type(model).__name__}(x)` to return logits for inputs of shape {tuple(few.shape)} but it "
            f"failed: {error} Let `forward` return logits, or pass `forward_fn=`, a callable that takes the module and "
            "inputs and returns logits."
        ) from error
    if are_probabilities(logits):
        rank_zero_warn(
            f"The outputs of {type(model).__name__} look like probabilities. Attacks and the Fisher information need "
            "logits: return what enters the softmax, or pass a `forward_fn=` that does."
        )
    name = find_head(model, few, subject.forward, head)
    call = HeadTap(model, name).run(subject.forward, few)
    found = call.logits.shape[1]
    if num_classes not in (None, found):
        raise ValueError(
            f"Expected {num_classes} classes, as `num_classes` or the models before say, but the head {name!r} has "
            f"{found}."
        )
    return Inspection(name, call.embedding.shape[1], found)


def rehearse(
    subject: Subject, x: Tensor, meters: Iterable[SampleMeter], attacks: Mapping[str, Callable[..., Any]]
) -> None:
    """Try everything that may fail on the first samples of a batch, so that it fails before the work begins.

    Args:
        subject: What computes logits.
        x: A batch of inputs.
        meters: Meters to try; they are of no use afterwards.
        attacks: Attacks; built-in ones are known to work and are not tried.

    Raises:
        ValueError: If inputs are out of range, or a meter or an attack cannot work on the model.

    """
    few = x[:2]
    for meter in meters:
        meter.rehearse(subject, Samples(few, None, torch.arange(len(few))))
    foreign = [attack for attack in attacks.values() if not isinstance(attack, Attack)]
    if foreign:
        with sandbox(subject.forward, few) as (copies,), torch.no_grad():
            preds = compute_logits(subject.forward, copies).argmax(dim=1)
        for attack in foreign:
            run(subject.forward, attack, few, preds, subject.input_space, subject.seed)
