"""Route from inputs to logits: the modules that compute the logits, and the input of the last layer."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_robustness._isolation.module_state import is_lazy
from lightning_robustness._isolation.sandbox import sandbox
from lightning_robustness._model.access import (
    are_probabilities,
    check_finite,
    compute_logits,
    pick_entry,
    walk_graph,
)
from lightning_robustness._model.head import (
    TRANSFORMS,
    HeadCall,
    HeadTap,
    is_transformed,
    pool,
    read_embedding,
    read_logits,
)

# Beginnings of the names that autograd gives to operations that do not change values
_RESHAPES = ("Cat", "View", "Squeeze", "Unsqueeze", "Select", "Slice", "Reshape", "Unsafe", "Clone", "Alias", "ToCopy")
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Route(NamedTuple):
    """Route from inputs to logits."""

    head: str | None
    sources: Mapping[str, str]
    entry: int | None
    modules: frozenset[str]
    num_classes: int
    num_features: int
    reason: str
    is_sigmoid: bool
    is_softmax: bool

    def tap(self, model: nn.Module) -> HeadTap:
        """Make a tap that records embeddings and logits of the model."""
        return HeadTap(model, self.head, self.sources, self.entry)


class Call(NamedTuple):
    """A call of a module: copies of its embedding and output, and where its output is in the graph of autograd.

    ``entered`` and ``returned`` are tensors themselves, as far as they may be features or logits.
    """

    name: str
    module: nn.Module
    entered: tuple[Tensor, ...]
    embedding: Tensor | None
    output: Any
    nodes: list[Any]
    returned: tuple[Tensor, ...] = ()


def find_route(
    model: nn.Module,
    x: Tensor,
    forward: Callable[..., Any] | None = None,
    head: str | nn.Module | None = None,
    highest_label: int = -1,
) -> Route:
    """Find the last layer of a classifier and the modules whose output is the logits, by a pass in the sandbox.

    The last layer is the first module with a matrix of weights on the way back from the logits in the graph. If there
    are several, as in an ensemble, or a matrix that is no module's is applied after them, there is no head.
    """
    given = None if head is None else name_of(model, head)
    forward = forward or model
    with sandbox(partial(forward, model), x) as (x,):
        if is_lazy(model):  # the sandbox restores this, and the next
            with torch.no_grad():
                forward(x)
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        with _recorded_calls(model) as calls:
            output = forward(x)
        route, _ = trace_logits(model, calls, output, x, given, highest_label)
    return route


def trace_logits(
    model: nn.Module,
    calls: list[Call],
    output: Any,
    x: Tensor,
    given: str | None = None,
    highest_label: int = -1,
) -> tuple[Route, HeadCall]:
    """Find the last layer and the sources of the logits among the recorded calls of a pass.

    Without a graph of autograd, the last layer is the one whose output is the logits.
    """
    entry = _choose_entry(output, calls, highest_label, len(x))
    logits = compute_logits(pick_entry(lambda _: output, entry), x)
    check_finite(logits)
    sources = _find_sources(calls, logits.detach(), entry)
    last, reason = None, ""
    try:
        last = _find_last(model, calls, logits, sources, given)
    except _NoHead as error:
        reason = str(error)
        if given is not None:
            raise ValueError(
                f"Expected `head` to be the layer that the logits come from but {given!r} is not, because {reason}. "
                "Leave `head` out: it is found, and measurements that do not need one work without."
            ) from None
    route = Route(
        head=None if last is None else last.name,
        sources=sources,
        entry=entry,
        modules=frozenset(call.name for call in calls),
        num_classes=logits.shape[1],
        num_features=0 if last is None or last.embedding is None else last.embedding.shape[1],
        reason=reason,
        is_sigmoid=_is_sigmoid(logits),
        is_softmax=are_probabilities(logits),
    )
    return route, HeadCall(None if last is None else last.embedding, logits.detach())


def is_layer(module: nn.Module) -> bool:
    """Return whether a module has a matrix of weights of its own."""
    if isinstance(module, _LAYERS) or hasattr(module, "parametrizations"):
        return True
    return any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))


@contextmanager
def _recorded_calls(model: nn.Module) -> Iterator[list[Call]]:
    calls: list[Call] = []

    def record(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if is_transformed():
            return
        entered = tuple(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        nodes = [tensor.grad_fn for tensor in _tensors(output) if tensor.grad_fn is not None]
        calls.append(
            Call(name, module, entered, read_embedding(module, args, kwargs), copy_output(output, module), nodes)
        )

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule) and "parametrizations" not in name.split("."):
                stack.enter_context(module.register_forward_hook(partial(record, name), with_kwargs=True))
        yield calls


def _tensors(output: Any) -> Iterable[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    parts = output.values() if isinstance(output, Mapping) else output
    return [tensor for part in parts for tensor in _tensors(part)] if isinstance(parts, Iterable) else []


def copy_output(output: Any, module: nn.Module) -> Any:
    """Copy the tensors of an output, which the network may change later, averaged over positions."""
    output = output.logits if isinstance(getattr(output, "logits", None), Tensor) else output
    if isinstance(output, Tensor):
        return pool(module, output) if output.is_floating_point() else None
    if isinstance(output, Mapping):
        return {name: copy_output(value, module) for name, value in output.items()}
    return [copy_output(value, module) for value in output] if isinstance(output, (tuple, list)) else None


def _choose_entry(output: Any, calls: list[Call], highest_label: int, num_samples: int) -> int | None:
    """Tell logits from features in a tuple: features enter a layer, and logits have a class for each label."""
    if not isinstance(output, (tuple, list)) or isinstance(getattr(output, "logits", None), Tensor):
        return None
    rows = {i: part for i, part in enumerate(output) if isinstance(part, Tensor) and part.shape[:1] == (num_samples,)}
    found = {i: part for i, part in rows.items() if part.ndim == 2} or {i: p for i, p in rows.items() if p.ndim == 1}
    layers = [call for call in calls if is_layer(call.module)]
    entered = {tensor.data_ptr() for call in layers for tensor in call.entered}

    def enters_no_layer(part: Tensor) -> bool:
        return part.data_ptr() not in entered

    def has_a_column_per_label(part: Tensor) -> bool:
        return max(part.shape[1:].numel(), 2) > highest_label

    def leaves_a_layer(part: Tensor) -> bool:
        return any(_comes_from(part, call) for call in layers)

    for rule in (enters_no_layer, has_a_column_per_label, leaves_a_layer):  # what proves most comes first
        if _are_alike(found):
            break
        found = {i: part for i, part in found.items() if rule(part)} or found
    if not _are_alike(found):
        widths = ", ".join(f"{part.shape[1]} (entry {i})" for i, part in found.items())
        raise ValueError(
            f"Expected logits but the model returns a tuple with matrices of widths {widths}. Say which it is, for "
            f"instance with `forward_fn=lambda module, x: module(x)[{max(found)}]`."
        )
    return min(found, default=None)


def _are_alike(parts: Mapping[int, Tensor]) -> bool:
    return len({part.shape[1:] for part in parts.values()}) <= 1


def _comes_from(part: Tensor, call: Call) -> bool:
    return part.grad_fn in call.nodes or any(part is tensor for tensor in call.returned)


def _is_view(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.data_ptr() == second.data_ptr()


def _find_sources(calls: list[Call], logits: Tensor, entry: int | None) -> dict[str, str]:
    """Find the modules whose last output is the logits, or is after a softmax or log-softmax."""
    tolerance = max(1e-3, 8 * torch.finfo(logits.dtype).eps) * max(logits.abs().max().item(), 1e-30)
    sources = {}
    for name, call in {call.name: call for call in calls}.items():
        for transform in TRANSFORMS:
            found = read_logits(call.module, call.output, transform, entry, len(logits))
            if found is not None and found.shape == logits.shape and (found - logits).abs().max() <= tolerance:
                sources[name] = transform
                break
    return sources


class _NoHead(Exception):  # noqa: N818
    """There is no last layer; the message is the reason."""


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise _NoHead(reason)


def _find_last(
    model: nn.Module, calls: list[Call], logits: Tensor, sources: Mapping[str, str], given: str | None
) -> Call:
    """Find the call of the last layer."""
    layers = [call for call in calls if _may_be_last(call, calls, given)]
    _require(given is None or given in {call.name for call in layers}, "the forward pass does not run it")
    if logits.requires_grad:
        last = _last_by_graph(model, layers, logits, given)
    else:
        last = _last_by_output(layers, logits, sources, given)
    _require([call for call in calls if call.name == last.name][-1] is last, f"{last.name!r} runs again after it")
    has_rows = last.embedding is not None and len(last.embedding) == len(logits)
    _require(has_rows, f"the input of {last.name!r} is not a tensor of numbers with one row per sample")
    return last


def _last_by_graph(model: nn.Module, layers: list[Call], logits: Tensor, given: str | None) -> Call:
    reached, is_function = _reached(model, layers, logits)
    _require(not is_function, "a matrix of weights is applied outside of any module")
    names = list(dict.fromkeys(call.name for call in reached))
    listed = ", ".join(map(repr, names))
    _require(given is None or given in names, f"the logits come from {listed or 'no layer'}")
    _require(len(reached) == 1, f"the logits come from {len(reached)} layers{': ' if names else ''}{listed}")
    return reached[0]


def _last_by_output(layers: list[Call], logits: Tensor, sources: Mapping[str, str], given: str | None) -> Call:
    """Find the layer with the same output, where the graph is cut or the pass was made without one."""
    same = [call for call in layers if call.name in sources]
    _require(bool(same), "no layer returns the logits themselves, and no graph of autograd leads back to one")
    exact = [call for call in same if any(_is_view(logits, tensor) for tensor in call.returned)]
    last = (exact or same)[-1]
    _require(given is None or last.name == given, f"the logits come from {last.name!r}")
    return last


def _may_be_last(call: Call, calls: list[Call], given: str | None) -> bool:
    if call.name == given:
        return True
    if not is_layer(call.module) or (given is not None and _is_inside(call.name, given)):
        return False
    # Of nested modules with weights, such as a transformer with a class token, the innermost counts
    return not any(_is_inside(other.name, call.name) and is_layer(other.module) for other in calls)


def _is_inside(name: str, outer: str) -> bool:
    return name != outer and (outer == "" or name.startswith(f"{outer}."))


def _reached(model: nn.Module, layers: list[Call], logits: Tensor) -> tuple[list[Call], bool]:
    """Go back from the logits to the first layers on all paths, and see whether there is a matrix in between."""
    owners = {node: index for index, call in enumerate(layers) for node in call.nodes}
    matrices = {parameter for parameter in model.parameters() if parameter.ndim > 1}
    reached, is_function = set[int](), False
    for node in walk_graph(logits, is_end=owners.__contains__):
        if node in owners:
            reached.add(owners[node])
        is_function |= getattr(node, "variable", None) in matrices
    return [layers[index] for index in sorted(reached)], is_function


def _is_sigmoid(logits: Tensor) -> bool:
    """Return whether two classes [0, z] are made of the output of a sigmoid."""
    if logits.shape[1] != 2 or not logits.requires_grad or bool(logits[:, 0].any()):
        return False
    nodes = walk_graph(logits, is_end=lambda node: not node.name().startswith(_RESHAPES))
    return any(node.name().startswith("Sigmoid") for node in nodes)


def name_of(model: nn.Module, head: str | nn.Module) -> str:
    """Return the name of a head that is given by name or as a module."""
    found = [module for name, module in model.named_modules(remove_duplicate=False) if head in (name, module)]
    if not found:
        close = [name for name, module in model.named_modules() if isinstance(module, _LAYERS)]
        given = repr(head) if isinstance(head, str) else type(head).__name__
        raise ValueError(
            f"Expected `head` to be part of {type(model).__name__} but got {given}, which is not. Linear layers and "
            f"convolutions: {', '.join(close) or 'none'}."
        )
    return next(name for name, module in model.named_modules() if module is found[0])
