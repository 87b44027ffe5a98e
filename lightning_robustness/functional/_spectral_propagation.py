"""Propagate a bound through a traced network: products along layers, rules where branches meet."""

import math
import re
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.operator_schemas import normalize_function
from typing_extensions import override

from lightning_robustness._model.access import find_logits
from lightning_robustness.functional._spectral_norms import (
    attention_norm,
    layer_norm_radius,
    layer_spectral_norm,
    matrix_spectral_norm,
)

NO_RULE = "no rule"

_SUMS = {"add", "sub"}
_JOINS = {"cat", "concat", "concatenate", "stack"}
_EXTREMES = {"maximum", "minimum"}
_PRODUCTS = {"mul", "multiply", "div", "truediv", "matmul", "mm"}
_COPIES = {"expand", "expandas", "repeat", "tile", "broadcastto"}
_REDUCTIONS = {"mean", "sum", "amax", "amin"}
# Rearranging or dropping numbers does not increase a distance, and is not worth a row
_SHAPES = {
    *("view", "reshape", "permute", "transpose", "t", "adjoint", "squeeze", "unsqueeze", "movedim", "swapaxes"),
    *("contiguous", "clone", "detach", "to", "float", "double", "half", "bfloat16", "flip", "roll"),
    *("chunk", "split", "unbind", "narrow", "select", "getitem", "getattr"),
}
_METADATA = {"size", "dim", "numel", "getattr", "isfloatingpoint"}
_CONSTANTS = {"zeroslike", "oneslike", "newzeros", "newones"}


class SpectralRow(NamedTuple):
    """A layer, or an operation of the network, in a table of spectral bounds.

    Args:
        name: Path of the module, or name of the operation in the traced network.
        kind: Class of the module, or name of the function.
        norm: Spectral norm of the layer; None for one without a rule, and where branches meet.
        rule: ``"exact"`` or ``"upper bound"`` for a layer, how branches are combined, or ``"no rule"``.
        bound: Bound of the network from its input up to here, or None where it is unknown.

    """

    name: str
    kind: str
    norm: float | None
    rule: str
    bound: float | None


def is_layer(module: nn.Module) -> bool:
    """Return whether a module is one of torch's own; a subclass with its own ``forward`` is traced instead."""
    written_in = getattr(type(module).forward, "__module__", None) or ""
    return written_in.startswith("torch.nn.") and not isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))


def module_kind(module: nn.Module) -> tuple[str, str]:
    """Return kind and class name of a layer; of torch's class if it is derived from one."""
    own = (c for c in type(module).__mro__ if c.__module__.startswith("torch.nn.modules."))
    name = next(own, type(module)).__name__
    return _kind(name), name


def rule_text(exact: bool) -> str:
    """Describe the norm of a layer for the table."""
    return "exact" if exact else "upper bound"


def propagate(model: nn.Module, x: Tensor, scale: float) -> "Propagation":
    """Trace a network and propagate a bound through it for one sample, starting from ``scale`` at the input."""
    propagation = Propagation(fx.GraphModule(model, _Tracer().trace(model)), scale)
    propagation.result = propagation.run(x)
    return propagation


class _Tracer(fx.Tracer):
    @override
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_layer(m)


class _Branch(NamedTuple):
    """An argument that depends on the input of the network, and its bound."""

    bound: float
    value: Any


class _Step(NamedTuple):
    """Effect of an operation on the bound."""

    norm: float | None
    rule: str
    bound: float


class Propagation(fx.Interpreter):
    """Run a traced network and keep a bound from the input to each value: 0 for constants, NaN where unknown."""

    def __init__(self, module: fx.GraphModule, scale: float) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.scale = scale
        self.bounds: dict[fx.Node, float] = {}
        self.rows: list[SpectralRow] = []
        self.missing: list[str] = []
        self.bound: float | None = None
        self.result: Any = None

    @override
    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "placeholder":
            self.bounds[n] = 0.0 if self.bounds else self.scale
        elif n.op == "get_attr":
            self.bounds[n] = 0.0
        elif n.op == "output":
            logits = find_logits(value)
            self.bound = next((_known(self.bounds[i]) for i, v in self.env.items() if v is logits), None)
        else:
            self.bounds[n] = self._follow(n, value)
        return value

    def _follow(self, n: fx.Node, value: Any) -> float:
        nodes: list[fx.Node] = []
        fx.node.map_arg((n.args, n.kwargs), nodes.append)
        branches = [_Branch(self.bounds[i], self.env[i]) for i in nodes if self.bounds[i] != 0]
        kind, kind_name = self._kind(n)
        if not branches or kind in _CONSTANTS or (kind in _METADATA and not isinstance(value, Tensor)):
            return 0.0
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if kind in _SHAPES and _keeps_numbers(kind, args, value):
            return branches[0].bound
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        step = self._attention(n, module, branches[0]) if isinstance(module, nn.MultiheadAttention) else None
        if isinstance(value, Tensor) and value.is_floating_point() and "out" not in kwargs:
            step = _meet(kind, branches, args, kwargs, value)
            is_layer_of_input = len(branches) == 1 and self.env[nodes[0]] is branches[0].value
            if step is None and is_layer_of_input:
                options = module or (_options(n.target, args, kwargs) if n.op == "call_function" else None)
                step = _layer(kind, options, branches[0], value)
        step = step or _Step(None, NO_RULE, math.nan)
        self._report(str(n.target) if module is not None else n.name, kind_name, step)
        if kind_name.endswith("_") or kwargs.get("inplace") or getattr(module, "inplace", False):
            self._overwrite(args[0] if args and isinstance(args[0], Tensor) else branches[0].value, step.bound)
        return step.bound

    def _attention(self, n: fx.Node, attention: nn.MultiheadAttention, branch: _Branch) -> _Step | None:
        """Apply the rule for self-attention of what a layer norm returns, where nobody reads the attention weights."""
        sources = {*n.args[:3], *(n.kwargs.get(name) for name in ("query", "key", "value"))} - {None}
        source = sources.pop()
        norm = (
            self.fetch_attr(str(source.target)) if isinstance(source, fx.Node) and source.op == "call_module" else None
        )
        read = any(user.args[1] != 0 and user.users for user in n.users)
        if sources or read or not isinstance(norm, nn.LayerNorm) or len(norm.normalized_shape) > 1:
            return None
        value = attention_norm(attention, layer_norm_radius(norm), branch.value.numel() // attention.embed_dim)
        return None if value is None else _Step(value, rule_text(False), value * branch.bound)

    def _report(self, name: str, kind_name: str, step: _Step) -> None:
        self.rows.append(SpectralRow(name, kind_name, step.norm, step.rule, _known(step.bound)))
        if step.rule == NO_RULE:
            self.missing.append(f"{name} ({kind_name})")

    def _kind(self, n: fx.Node) -> tuple[str, str]:
        if n.op == "call_module":
            return module_kind(self.fetch_attr(str(n.target)))
        if n.op == "call_method":
            return _kind(str(n.target)), str(n.target)
        name = getattr(n.target, "__name__", str(n.target))
        source = (getattr(n.target, "__module__", None) or "torch").split(".")[0]
        # A user's function that is not traced can have any name
        return _kind(name) if source in ("torch", "_operator", "builtins") else "", name

    def _overwrite(self, changed: Tensor, bound: float) -> None:
        """Give the bound of an in-place operation to all values that share its memory."""
        storage = changed.untyped_storage()
        whole = changed.numel() * changed.element_size() == storage.nbytes()
        for node, value in self.env.items():
            if isinstance(value, Tensor) and value.untyped_storage().data_ptr() == storage.data_ptr():
                self.bounds[node] = bound if whole else math.nan


def _known(bound: float) -> float | None:
    return None if math.isnan(bound) else bound


def _kind(name: str) -> str:
    return re.sub("_|[123]d_?$", "", name.lower())


def _keeps_numbers(kind: str, args: tuple, value: Any) -> bool:
    """Return whether an operation that usually rearranges numbers neither repeats nor rounds any here."""
    if kind == "getitem":  # a tensor as index could select a number twice
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(i is None or i is Ellipsis or isinstance(i, (int, slice)) for i in index)
    return not isinstance(value, Tensor) or value.is_floating_point()


def _options(target: Any, args: tuple, kwargs: dict[str, Any]) -> SimpleNamespace | None:
    """Return the arguments of a torch function by name."""
    types: Any = tuple(map(type, args))
    keyword_types = {name: type(value) for name, value in kwargs.items()}
    try:
        pair = normalize_function(target, args, kwargs, types, keyword_types, normalize_to_only_use_kwargs=True)
    except RuntimeError:  # several signatures, none of which fits the types
        return None
    return None if pair is None else SimpleNamespace(**pair.kwargs)


def _layer(kind: str, options: Any, branch: _Branch, value: Tensor) -> _Step | None:
    norm = layer_spectral_norm(kind, options, branch.value, value)
    return None if norm is None else _Step(norm.value, rule_text(norm.exact), norm.value * branch.bound)


def _meet(kind: str, branches: list[_Branch], args: tuple, kwargs: dict[str, Any], value: Tensor) -> _Step | None:
    """Apply the rules for several arguments, for constants, and for operations that repeat or sum up numbers."""
    first = branches[0]
    if kind in _JOINS | _EXTREMES:
        bounds = [b.bound * (_repeats(b, value) if kind in _EXTREMES else 1.0) for b in branches]
        return _Step(None, "root of sum of squares", math.hypot(*bounds))
    if kind in _SUMS and "alpha" not in kwargs:
        bounds = [b.bound * _repeats(b, value) for b in branches]
        if len(bounds) > 1:
            return _Step(None, "sum of branches", sum(bounds))
        return _Step(_repeats(first, value), "exact", bounds[0])
    if kind in _COPIES:
        return _Step(_repeats(first, value), "exact", _repeats(first, value) * first.bound)
    if kind in _REDUCTIONS:
        count = math.sqrt(first.value.numel() / max(1, value.numel()))
        norm = {"mean": 1 / count, "sum": count}.get(kind, 1.0)
        return _Step(norm, "exact", norm * first.bound)
    if kind in _PRODUCTS and len(branches) == 1 and len(args) == 2 and not kwargs:
        return _product(kind, first, args, value)
    return None


def _product(kind: str, branch: _Branch, args: tuple, value: Tensor) -> _Step | None:
    """Apply the rule for a product with a constant, or a quotient by one."""
    constant = args[1] if args[0] is branch.value else args[0]
    if kind in ("matmul", "mm"):
        if constant.ndim != 2 or branch.value.ndim < 2:
            return None
        norm = matrix_spectral_norm(constant)
        return _Step(norm, "exact", norm * branch.bound)
    quotient = kind in ("div", "truediv")
    if quotient and constant is args[0]:
        return None
    sizes = torch.as_tensor(constant).detach().cpu().double().abs()
    repeats = _repeats(branch, value)
    norm = repeats * (sizes.min().reciprocal() if quotient else sizes.max()).item()
    return _Step(norm, rule_text(repeats == 1), norm * branch.bound)


def _repeats(branch: _Branch, value: Tensor) -> float:
    """Compute the spectral norm of broadcasting, the root of the number of copies."""
    return math.sqrt(value.numel() / max(1, branch.value.numel()))
