from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_robustness._isolation.sandbox import sandbox
from lightning_robustness._measurement.meters import SampleMeter
from lightning_robustness._measurement.subject import Samples, Subject
from lightning_robustness._model.access import are_probabilities, compute_logits, pick_entry
from lightning_robustness._model.batch import check_classes
from lightning_robustness._model.route import Route, find_route
from lightning_robustness._processes import rank_zero_warn
from lightning_robustness.attacks import Attack, run_attack


def inspect_model(
    model: nn.Module,
    subject: Subject,
    x: Tensor,
    y: Tensor | None = None,
    head: str | nn.Module | None = None,
    num_classes: int | None = None,
) -> Route:
    """Find out how the logits of a model come about, on the first samples of a batch, and whether labels fit."""
    few = x[:2]
    highest_label = -1 if y is None or len(y) == 0 else int(y.max())
    try:
        with sandbox(subject.forward, few) as (copies,), torch.no_grad():
            subject.forward(copies)
    except Exception as error:
        raise ValueError(
            f"Expected `{type(model).__name__}(x)` to return logits for inputs of shape {tuple(few.shape)} but it "
            f"failed: {error} Let `forward` return logits, or pass `forward_fn=`, a callable that takes the module and "
            f"inputs and returns logits{_example(model)}."
        ) from error
    route = find_route(model, few, subject.forward, head, highest_label)
    with sandbox(subject.forward, few) as (few,), torch.no_grad():
        logits = compute_logits(pick_entry(subject.forward, route.entry), few)
    check_route(model, route, logits, y, num_classes)
    return route


def check_route(
    model: nn.Module, route: Route, logits: Tensor, y: Tensor | None = None, num_classes: int | None = None
) -> None:
    """Check what was found out about a model; warn of what cannot be measured."""
    if route.is_sigmoid:
        raise ValueError(
            f"Expected `{type(model).__name__}(x)` to return a logit but it returns a probability, the sigmoid of one. "
            "Pass a `forward_fn=` that returns what enters the sigmoid or, where that is out of reach, "
            "`forward_fn=lambda module, x: module(x).logit(eps=1e-6)`."
        )
    if are_probabilities(logits):
        rank_zero_warn(
            f"The outputs of {type(model).__name__} look like probabilities. Attacks and the Fisher information need "
            "logits: return what enters the softmax, or pass a `forward_fn=` that does."
        )
    if num_classes not in (None, route.num_classes):
        raise ValueError(
            f"Expected {num_classes} classes, as `num_classes` or the models before say, but the model has "
            f"{route.num_classes}. Leave `num_classes` out, or compare models of the same classes."
        )
    if y is not None:
        check_classes(y, route.num_classes)
    if route.head is None:
        rank_zero_warn(
            f"{type(model).__name__} has no last layer to take embeddings from: {route.reason}. "
            "`rdi_embedding`, ROBY, FSA and FSD are left out; nothing else needs it."
        )


def _example(model: nn.Module) -> str:
    """Return a function to pass, where one child of a module without a forward of its own has all parameters."""
    children = [name for name, child in model.named_children() if next(child.parameters(), None) is not None]
    return f": `lambda module, x: module.{children[0]}(x)`" if len(children) == 1 else ""


def warn_of_unused_layers(model: nn.Module, route: Route) -> None:
    """Warn of a layer that could follow ``forward``, where no validation step shows whether it does."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name not in route.modules and module.in_features == route.num_classes:
            rank_zero_warn(
                f"`forward` does not run {name!r}, a layer that takes {route.num_classes} features, as many as it "
                "returns. If `forward` returns an embedding, all values are wrong: pass "
                f"`forward_fn=lambda module, x: module.get_submodule({name!r})(module(x))`."
            )


def open_inputs(subject: Subject, x: Tensor, extras: Mapping[str, Tensor]) -> Tensor | None:
    """Check the inputs of a batch, and get the first samples for ``rehearse``."""
    if not x.is_floating_point() and subject.embed is None:
        rank_zero_warn(
            f"Inputs are integers ({x.dtype}), which cannot be perturbed by small amounts: attacks, the Fisher "
            "information and all else that needs gradients are left out. For tokens, pass `embed_fn=`, a callable that "
            "takes the module and tokens and returns their embeddings; for pixels that the module converts itself, "
            "`embed_fn=lambda module, x: x.float()` and `input_space=InputSpace(high=255)`."
        )
        return None
    whole = subject.embedded(x)
    subject.input_space.check(whole)
    subject.input_space.check_normalized(whole)
    if subject.extra is None or not extras:
        return whole[:2]
    subject.extra.values = {name: value[:1] for name, value in extras.items()}
    return whole[:1]


def rehearse(
    subject: Subject, x: Tensor, meters: Iterable[SampleMeter], attacks: Mapping[str, Callable[..., Any]]
) -> None:
    """Try everything that may fail on the first samples of a batch, so that it fails before the work begins."""
    few = x[:2]
    for meter in meters:
        meter.rehearse(subject, Samples(few, None, torch.arange(len(few))))
    foreign = [attack for attack in attacks.values() if not isinstance(attack, Attack)]
    if foreign:
        with sandbox(subject.forward, few) as (copies,), torch.no_grad():
            preds = compute_logits(subject.forward, copies).argmax(dim=1)
        for attack in foreign:
            run_attack(subject.forward, attack, few, preds, subject.input_space, subject.seed)
