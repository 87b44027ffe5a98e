"""Find out about a model on the first batch, and try what may fail before the work begins."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_robustness._isolation.sandbox import sandbox
from lightning_robustness._measurement.assisted import are_of_same_samples
from lightning_robustness._measurement.feature_pass import OUTPUT, summarize
from lightning_robustness._measurement.meters import Meter
from lightning_robustness._measurement.rows import Rows
from lightning_robustness._measurement.samples import Samples
from lightning_robustness._measurement.subject import Subject
from lightning_robustness._measurement.threat_model import is_image
from lightning_robustness._model.access import Access, compute_logits, try_forward
from lightning_robustness._model.batch import Batch, check_label_range
from lightning_robustness._model.route import Route, find_route
from lightning_robustness._processes import Processes, describe_error, rank_zero_warn
from lightning_robustness.attacks import Attack, run_attack
from lightning_robustness.attacks._classifier import open_classifier
from lightning_robustness.input_space import check_normalized

# Logits that are smaller differ by the rounding of activations, whose size is about 1
_SMALLEST = 1e-4
# Least size, relative to the mixture of logits, of what may differ between samples: rounding is much smaller
_CONSTANT_SHARE = 1e-3


class Found(NamedTuple):
    """Facts about a model and its inputs, which processes without samples learn from the others."""

    route: Route
    is_discrete: bool = False
    is_image: bool = False


def inspect(subject: Subject, batch: Batch, needs_gradients: bool) -> tuple[Subject, Found]:
    """Find out how the logits of a model come about, and check that inputs and labels fit."""
    model, access = subject.model, subject.access
    subject = replace(subject, extra=access.find_extras(model, batch))
    route = inspect_outputs(model, access, subject.logits_of_loaded, batch, needs_embedding=True)
    subject = replace(subject, route=route)
    is_discrete = needs_gradients and not _can_be_perturbed(subject, batch)
    return subject, Found(route, is_discrete, is_image(batch.x) and access.embed_fn is None)


def inspect_outputs(
    model: nn.Module,
    access: Access,
    forward_of: Callable[[Batch], Callable[..., Any]],
    batch: Batch,
    needs_embedding: bool = False,
) -> Route:
    """Find where the logits are in the outputs for a batch, and check that labels fit; ``forward_of`` binds a batch."""
    few = batch.first(3)  # two would pass for inputs and labels in a `forward` that takes a batch
    forward = forward_of(few)
    try_forward(model, forward, few.x)
    route = find_route(model, few.x, forward, access.head, batch.highest_label)
    check_route(model, route, batch.y, access.num_classes, needs_embedding)
    return route


def agree(processes: Processes, found: Found | None) -> Found | None:
    """Tell the facts to processes without samples; None if no process has any."""
    everywhere = [other for other in processes.gather(found) if other is not None]
    if not everywhere:
        return None
    own = found or everywhere[0]
    return own._replace(is_discrete=any(other.is_discrete for other in everywhere))


def check_route(
    model: nn.Module, route: Route, y: Tensor | None, num_classes: int | None, needs_embedding: bool = True
) -> None:
    """Check what was found out about a model; warn of what cannot be measured."""
    if route.is_sigmoid:
        raise ValueError(
            f"Expected `{type(model).__name__}(x)` to return a logit but it returns a probability, the sigmoid of one. "
            "Pass a `forward_fn=` that returns the input of the sigmoid or, where that is out of reach, "
            "`forward_fn=lambda module, x: module(x).logit(eps=1e-6)`."
        )
    if route.is_softmax:
        rank_zero_warn(
            f"The outputs of {type(model).__name__} look like probabilities. Attacks and the Fisher information need "
            "logits: return the input of the softmax, or pass a `forward_fn=` that does."
        )
    if num_classes not in (None, route.num_classes):
        raise ValueError(
            f"Expected {num_classes} classes, as `num_classes` or the models before say, but the model has "
            f"{route.num_classes}. Leave `num_classes` out, or compare models of the same classes."
        )
    if y is not None:
        check_label_range(y, route.num_classes)
    if route.head is None and needs_embedding:
        rank_zero_warn(
            f"{type(model).__name__} has no last layer to take embeddings from: {route.reason}. "
            "`rdi_embedding`, ROBY, FSA and FSD are left out; nothing else needs it."
        )


def warn_of_unused_layers(model: nn.Module, route: Route) -> None:
    """Warn of a layer that could follow ``forward``, where no validation step shows whether it does."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name not in route.modules and module.in_features == route.num_classes:
            rank_zero_warn(
                f"`forward` does not run {name!r}, a layer that takes {route.num_classes} features, as many as it "
                "returns. If `forward` returns an embedding, all values are wrong: pass "
                f"`forward_fn=lambda module, x: module.get_submodule({name!r})(module(x))`."
            )


def rehearse(
    subject: Subject, batch: Batch, meters: Iterable[Meter], attacks: Mapping[str, Callable[..., Any]]
) -> None:
    """Try everything that may fail on one or two samples; of built-in attacks, the gradient of the first."""
    few = batch.first(1 if subject.extra_names else 2)
    few = few._replace(x=subject.embedded(few.x), y=None, positions=torch.arange(len(few.x)))
    for meter in meters:
        meter.rehearse(subject, few)
    if not attacks:
        return
    forward, space = subject.logits_of(few), subject.input_space
    with sandbox(forward, few.x) as (copies,), torch.no_grad():
        preds = compute_logits(forward, copies).argmax(dim=1)
    gradient = next((name for name, attack in attacks.items() if isinstance(attack, Attack) and attack.white_box), None)
    for name, attack in attacks.items():
        try:
            if not isinstance(attack, Attack):
                run_attack(forward, attack, few.x, preds, input_space=space, seed=subject.seed)
            elif name == gradient:
                with open_classifier(forward, few.x, preds, space) as (classifier, x, _):
                    classifier.gradient(classifier.unnormalize(x), torch.ones_like)
        except Exception as error:
            needs_none = name == gradient and isinstance(error, RuntimeError)
            remedy = '. Pass `attacks=["square"]`, which needs no gradients.' if needs_none else ""
            error.args = (f"The attack {name!r} failed: {describe_error(error)}{remedy}",)
            raise


def largest_difference(subject: Subject, samples: Samples, outputs: Rows) -> float:
    """Return how much the network's outputs for samples differ from the outputs of a pass at their positions.

    It is relative to the size of the outputs; 0 where two passes of our own differ as much, or samples are shuffled.
    """
    samples = samples.at(outputs.positions)
    own = outputs_of(subject, samples, subject.batch_size)
    expected = outputs[OUTPUT][torch.isin(outputs.positions, own.positions)] if len(own) else own.positions
    if len(expected) != len(own) or not len(own):
        return 0.0
    if samples.y is not None and "y" in outputs.columns:
        labelled = Rows(samples.positions, {"y": samples.y})
        if not are_of_same_samples(labelled, outputs):
            return 0.0
    # The mixture may cancel, and so may the largest one of log-probabilities; the log of a sum is about log(K). Masked
    # classes move the mixture by a constant, which would hide differences
    spread = expected[:, 1].amax() - expected[:, 1].amin()
    sizes = torch.stack([expected[:, 0].abs().amax(), spread, _CONSTANT_SHARE * expected[:, 1].abs().amax()])
    size = torch.maximum(sizes.amax(), expected.new_tensor([_SMALLEST, _SMALLEST, 1.0]))
    difference = ((own[OUTPUT] - expected).abs() / size).max().item()
    few = -(-min(len(own), subject.batch_size) // 8)  # many batches are many draws
    again = outputs_of(subject, samples, few, seed=subject.seed + 1, moved_on=True) if difference else own
    noise = ((own[OUTPUT] - again[OUTPUT]).abs() / size).max().item()
    return difference if difference > 10 * noise else 0.0


def outputs_of(subject: Subject, samples: Samples, batch_size: int, seed: int = 0, moved_on: bool = False) -> Rows:
    """Return what tells the outputs of samples apart, if wanted after a pass that moves what the model holds."""
    parts = []
    for number, batch in enumerate(replace(subject, progress=False).batches(samples, "outputs", batch_size), 1):
        forward = subject.logits_of(batch)
        with sandbox(forward, batch.x, seed=seed) as (copies,), torch.no_grad():
            for size in [1] * (number - 1) + [len(copies)] if moved_on else ():  # generators, queues, hidden states
                forward(copies[:size])
            columns = {OUTPUT: summarize(compute_logits(forward, copies)).cpu()}
        parts.append(Rows(batch.positions.cpu(), columns))
    return Rows.join([parts])


def _can_be_perturbed(subject: Subject, batch: Batch) -> bool:
    """Check the inputs of a batch; return whether they are not integers, which cannot be perturbed."""
    if subject.access.takes_bytes(batch.x):
        few = batch.first(3)
        subject.access.as_float(few.x, subject.logits_of(few))
    elif not batch.x.is_floating_point() and subject.access.embed_fn is None:
        rank_zero_warn(
            f"Inputs are integers ({batch.x.dtype}), which cannot be perturbed by small amounts: attacks, the Fisher "
            "information and all else that needs gradients are left out. For tokens, pass `embed_fn=`, a callable that "
            "takes the module and tokens and returns their embeddings; for pixels that the module converts itself, "
            "`input_space=InputSpace(high=255)`."
        )
        return False
    whole = subject.embedded(batch.x)
    subject.input_space.check(whole)
    check_normalized(subject.input_space, whole)
    return True
