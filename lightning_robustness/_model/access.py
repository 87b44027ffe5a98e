"""How a model is called on a batch: what it takes, and where its logits are."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_robustness._arguments import check_functions, check_head, check_integer, check_model
from lightning_robustness._isolation.sandbox import sandbox
from lightning_robustness._model.batch import Batch, read_batch
from lightning_robustness._numbers import at_least_float32
from lightning_robustness._processes import describe_error, rank_zero_warn
from lightning_robustness.input_space import InputSpace, check_input_space

CHANGED = (
    "Expected the model to leave its inputs unchanged but it changed them in place. Let its forward start with "
    "`x = x.clone()`."
)
_REMEDY = "Let the model return only the logits, or pass `forward_fn=lambda module, x: ...` that does."


def compute_logits(model: Callable[..., Any], x: Tensor) -> Tensor:
    """Run a model and return its logits, shape ``(N, K)``.

    A binary classifier with one logit z per sample, of shape ``(N, 1)`` or ``(N,)``, has the two classes [0, z].
    """
    check_model(model)
    try:
        output = model(x)
    except RuntimeError as error:
        if x.requires_grad and x.is_leaf and "a leaf Variable that requires grad" in str(error):
            raise ValueError(CHANGED) from error
        raise
    logits = find_logits(output)
    if logits is None:
        raise ValueError(
            f"Expected the model to return logits of shape (N, K), or something that holds them as `logits`, but got "
            f"{type(output).__name__}. {_REMEDY}"
        )
    if not logits.is_floating_point():
        raise ValueError(
            f"Expected logits in floating point but got {logits.dtype}. Return the scores of the classes, not their "
            f"`argmax`. {_REMEDY}"
        )
    classes = as_classes(logits, len(x))
    if classes is None:
        has_one = logits.ndim > 2 and len(logits) == len(x) and max(logits.shape[1:]) == logits.shape[1:].numel()
        remedy = "Pass `forward_fn=lambda module, x: module(x).flatten(1)`." if has_one else _REMEDY
        raise ValueError(
            f"Expected logits of shape ({len(x)}, K), one row per input, but got {tuple(logits.shape)}. {remedy}"
        )
    return classes


def try_forward(model: nn.Module, forward: Callable[..., Any], x: Tensor) -> None:
    """Run a model on a few inputs, without a trace, and say what to do where it fails."""
    if x.is_meta:
        raise ValueError(
            "Expected a model with values but its parameters are on the meta device, which has none. Load its weights: "
            "`model.to_empty(device='cpu')`, then `model.load_state_dict(...)`."
        )
    try:
        with sandbox(forward, x) as (copies,), torch.no_grad():
            forward(copies)
    except Exception as error:
        shape, reason = tuple(x.shape), describe_error(error).rstrip(" .")
        own: Any = forward
        while isinstance(own, partial) and not any(argument is model for argument in own.args):
            own = next(filter(callable, own.args), None)
        if isinstance(own, partial):
            raise ValueError(
                f"`forward_fn` failed on inputs of shape {shape}: {reason}. It is called as `forward_fn(module, x)`."
            ) from error
        raise ValueError(
            f"Expected `{type(model).__name__}(x)` to return logits for inputs of shape {shape} but it failed: "
            f"{reason}. Let `forward` return logits, or pass `forward_fn=`, a callable that takes the module and "
            f"inputs and returns logits.{_propose_child(model, x)}"
        ) from error


def _propose_child(model: nn.Module, x: Tensor) -> str:
    """Name the only child with weights, if it could return logits, and how many: it may return an embedding."""
    children = [(name, child) for name, child in model.named_children() if next(child.parameters(), None) is not None]
    with suppress(Exception), sandbox(model, x) as (copies,), torch.no_grad():
        ((name, child),) = children
        width = compute_logits(child, copies).shape[1]
        return f" If `{name}` does: `forward_fn=lambda module, x: module.{name}(x)`, of {width} classes."
    return ""


def as_classes(logits: Tensor, num_samples: int) -> Tensor | None:
    """Bring outputs to the shape ``(N, K)`` with at least 2 classes: one logit z per sample becomes [0, z]."""
    if logits.ndim == 0 and num_samples == 1:
        logits = logits.reshape(1)
    if logits.ndim == 1:
        logits = logits.unsqueeze(1)
    if logits.ndim != 2 or len(logits) != num_samples or logits.shape[1] == 0:
        return None
    return logits if logits.shape[1] > 1 else torch.cat([torch.zeros_like(logits), logits], dim=1)


def find_logits(output: Any, entry: int | None = None) -> Tensor | None:
    """Find the logits in the output of a model."""
    if isinstance(output, Tensor):
        return output
    if isinstance(getattr(output, "logits", None), Tensor):
        return output.logits
    if isinstance(output, Mapping):
        return find_logits(output.get("logits"))
    if not isinstance(output, (tuple, list)):
        return None
    if entry is not None:
        return output[entry] if entry < len(output) and isinstance(output[entry], Tensor) else None
    tensors = [value for value in output if isinstance(value, Tensor)]
    matrices = [tensor for tensor in tensors if tensor.ndim == 2] or [tensor for tensor in tensors if tensor.ndim == 1]
    widths = [matrix.shape[-1] for matrix in matrices]
    if len(set(widths)) > 1:
        raise ValueError(
            f"Expected logits but the model returns matrices of widths {widths}. Say which they are, for instance with "
            "`lambda x: model(x)[1]` in place of the model, or `forward_fn=lambda module, x: module(x)[1]`."
        )
    return matrices[0] if matrices else None


def pick_entry(forward: Callable[..., Any], entry: int | None) -> Callable[..., Any]:
    """Make a callable that returns one entry of the tuples that another one returns; None for the whole output."""
    return forward if entry is None else partial(_call_entry, forward, entry)


def _call_entry(forward: Callable[..., Any], entry: int, x: Tensor) -> Any:
    return find_logits(forward(x), entry)


def check_finite(logits: Tensor) -> None:
    """Check that logits are finite."""
    bad = int((~logits.isfinite()).any(dim=1).sum())
    if bad:
        is_masked = logits.isneginf().all(dim=0)
        remedy = "Check the network for divergence, and the inputs for NaN."
        if is_masked.any() and logits[:, ~is_masked].isfinite().all():
            remedy = "To mask classes, fill their logits with a large negative number, such as -1e4, instead of -inf."
        raise ValueError(
            f"Expected finite logits but {bad} of {len(logits)} samples have NaN or infinite ones. {remedy}"
        )


class NoGradientError(ValueError):
    """Logits cannot be differentiated with respect to the inputs."""


def check_differentiable(logits: Tensor, otherwise: str) -> None:
    """Check that logits can be differentiated with respect to the inputs."""
    if not logits.requires_grad:
        raise NoGradientError(
            "Expected logits that autograd can differentiate with respect to the inputs but got some without a "
            f"gradient. Take `detach`, `no_grad` and conversions out of the model, or {otherwise}."
        )


def are_probabilities(logits: Tensor) -> bool:
    """Return whether supposed logits look like probabilities."""
    sums = logits.sum(dim=1, dtype=at_least_float32(logits.dtype))
    # Those of bfloat16, perhaps widened since, are off by almost 1 %
    return len(logits) > 0 and bool((logits >= 0).all() & ((sums - 1).abs() <= 8e-3).all())


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Access:
    """How a model and its batches are read: arguments that all who measure or train a model share, checked.

    Embeddings, which ``embed_fn`` returns, have no bounds unless the space that is given has some.
    """

    given_space: InitVar[InputSpace | None] = None
    head: str | nn.Module | None = None
    num_classes: int | None = None
    forward_fn: Callable[..., Any] | None = None
    embed_fn: Callable[..., Any] | None = None
    batch_fn: Callable[..., Any] | None = None
    input_space: InputSpace = field(init=False)

    def __post_init__(self, given_space: InputSpace | None) -> None:
        check_functions(self.forward_fn, self.batch_fn, self.embed_fn)
        check_head(self.head)
        if self.num_classes is not None:
            check_integer("num_classes", self.num_classes, minimum=2)
        object.__setattr__(self, "input_space", check_input_space(given_space, bounded=self.embed_fn is None))

    def read(self, batch: Any, soft: bool = False) -> Batch:
        """Read a batch as a loader gives it; soft labels count as the most probable class if they are wanted."""
        return read_batch(batch, self.batch_fn, soft)

    def takes_bytes(self, x: Tensor) -> bool:
        """Return whether inputs are pixels as integers, such as bytes, of which float copies are perturbed."""
        high, is_integer = self.input_space.high, not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
        return is_integer and self.embed_fn is None and high is not None and high > 1

    def as_float(self, x: Tensor, forward: Callable[..., Any] | None = None) -> Tensor:
        """Return inputs that can be perturbed: of pixels in bytes, float copies.

        With a callable from inputs to outputs, check that it returns the same for both.
        """
        if not self.takes_bytes(x):
            return x
        if forward is not None:
            reason = "they differ"
            try:
                with sandbox(forward, x) as (copies,), torch.no_grad():
                    pair = [compute_logits(forward, inputs).cpu().double() for inputs in (copies, copies.float())]
                are_same = torch.allclose(pair[0], pair[1], rtol=1e-4, atol=1e-4)
            except Exception as error:
                are_same, reason = False, f"it failed: {describe_error(error)}"
            if not are_same:
                raise ValueError(
                    "Expected the same outputs for pixels in bytes and for float copies of them, which attacks change, "
                    f"but {reason}. Let `forward` scale both in the same way, such as by `x.float() / 255`."
                )
        return x.float()

    def forward(self, model: nn.Module) -> Callable[..., Any]:
        """Return the callable from inputs to outputs."""
        return model if self.forward_fn is None else partial(self.forward_fn, model)

    def find_extras(self, model: nn.Module, batch: Batch) -> "ExtraInputs | None":
        """Find out what else the model takes from a batch."""
        name = batch.name if self.embed_fn is None else "inputs_embeds"
        return find_extra_inputs(self.forward(model), name, batch.extras, are_given=self.batch_fn is not None)

    def describe(self) -> dict[str, Any]:
        """Return everything that results depend on, by name."""
        return {name: getattr(self, name) for name in ("head", "forward_fn", "embed_fn", "batch_fn")}


@dataclass(frozen=True)
class ExtraInputs:
    """Names of the entries that a model takes besides its inputs, and the keyword for these; None if they are first."""

    names: tuple[str, ...]
    keyword: str | None = None

    def bind(self, forward: Callable[..., Any], values: Mapping[str, Tensor]) -> Callable[..., Any]:
        """Make a callable that takes the inputs alone, with the entries of their batch."""
        return partial(self._call, forward, values)

    def _call(self, forward: Callable[..., Any], values: Mapping[str, Tensor], x: Tensor) -> Any:
        values = {name: values[name].to(x.device) for name in self.names if name in values}
        if any(len(value) not in (1, len(x)) for value in values.values()):
            raise ValueError(
                f"Expected as many inputs as {', '.join(values)} have rows but got {len(x)}: this attack drops "
                "samples, so they no longer line up. Pass `all_steps=True`, or an attack that keeps all samples."
            )
        rows = {name: v.expand(len(x), *v.shape[1:]) if len(v) == 1 else v for name, v in values.items()}
        return forward(x, **rows) if self.keyword is None else forward(**{self.keyword: x}, **rows)


def embed_and_call(forward: Callable[..., Any], embed: Callable[..., Any], x: Tensor) -> Any:
    """Run a model on the embeddings of what a loader gives."""
    return forward(embed(x))


def find_extra_inputs(
    forward: Callable[..., Any], name: str | None, extras: Iterable[str], are_given: bool = False
) -> ExtraInputs | None:
    """Find out how a model takes inputs, from the names of its arguments; None if they come first and alone.

    Extras that are given on purpose must be taken.
    """
    try:
        parameters = inspect.signature(forward.forward if isinstance(forward, nn.Module) else forward).parameters
    except (TypeError, ValueError):  # compiled or built-in functions have none
        return None
    positional = [p.name for p in parameters.values() if p.kind in _POSITIONAL]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    takes_all = takes_any and not positional
    keyword = name if name is not None and (takes_all or name in positional[1:]) else None
    named = [p.name for p in parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    named += positional[0 if keyword else 1 :]
    taken = tuple(extra for extra in extras if takes_all or (takes_any and are_given) or extra in named)
    if are_given and (unknown := [extra for extra in extras if extra not in taken]):
        raise ValueError(
            "Expected the dictionary of `batch_fn` to name arguments of `forward`, or of `forward_fn`: `forward` takes "
            f"{', '.join(dict.fromkeys([*positional, *named]))} but not {', '.join(map(repr, unknown))}. Rename it, or "
            "leave it out."
        )
    return ExtraInputs(taken, keyword) if taken or keyword is not None else None


def mend_gradients(output: Tensor, slope: float = 0.0) -> Tensor:
    """Let derivatives that are not finite count as zero where they arise, in all later backward passes of an output.

    At 0, the derivative of a square root is infinite; times the derivative 0 of what is under it, it becomes NaN, and
    spreads to everything before it. Zeroed there, it does not affect the other gradients, as with an epsilon. With a
    slope, an infinite derivative of an operation on single numbers counts as one of this size, which has its sign.
    """
    for node in walk_graph(output):
        if not hasattr(node, "variable"):  # a leaf, whose hooks would stay
            node.register_hook(partial(_without_nonfinite, slope))
    return output


def walk_graph(output: Tensor, is_end: Callable[[Any], bool] = lambda node: False) -> Iterator[Any]:
    """Go back from an output through the graph of autograd, to each node once, and not beyond those that are an end."""
    rest, seen = [output.grad_fn], set[Any]()
    while rest:
        node = rest.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            rest += [] if is_end(node) else [following for following, _ in node.next_functions]


def _without_nonfinite(
    slope: float, gradients: tuple[Tensor | None, ...], outer: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    def mend(value: Tensor) -> Tensor:
        finite = value.nan_to_num(0.0, 0.0, 0.0)
        if not slope or outer[0] is None or outer[0].shape != value.shape:
            return finite
        return torch.where(value.isinf(), slope * value.sign() * outer[0].abs(), finite).to(value.dtype)

    return tuple(None if value is None else mend(value) for value in gradients)


def nonfinite_rows(gradient: Tensor) -> Tensor:
    """Return which samples have a gradient that is not finite in some coordinate."""
    return ~gradient.detach().flatten(1).abs().amax(dim=1).isfinite()


def warn_of_nonfinite_gradients() -> None:
    """Say that gradients are not finite, and what helps; the same words each time, so that Python shows them once."""
    rank_zero_warn(
        "Some gradients of the inputs are NaN or infinite. They count as zero where they arise, which may hide a "
        "direction; attacks take infinite ones as steep. Look for operations without a derivative at these inputs, "
        "such as `sqrt` or a norm at 0: add an epsilon under the root, `torch.sqrt(x + 1e-8)`.",
        stacklevel=1,
    )
