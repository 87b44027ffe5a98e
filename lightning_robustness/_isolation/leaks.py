"""Find changes that a forward pass leaves behind in spite of the sandbox."""

import pickle
import sys
import weakref
import zlib
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_robustness._isolation.module_state import MODULE_ATTRIBUTES, PLAIN_TYPES, keep_generator
from lightning_robustness._isolation.sandbox import find_modules, sandbox

# Objects of these packages are compared by identity: a Trainer, for instance, refers to everything
_CLOSED_PACKAGES = sys.stdlib_module_names | {"torch", "lightning", "pytorch_lightning", "lightning_fabric"}
_MAX_ELEMENTS = 2**22
_MAX_ENTRIES = 100_000


def find_leaks(model: Callable[..., Any], x: Tensor, eval_mode: bool = True) -> list[str]:
    """Run a forward pass in the sandbox and name the attributes that the sandbox could not restore.

    Everything reachable from the modules through attributes and containers is compared, without calling their code:
    for instance parameters with gradient that ``forward`` writes in place, or fields of an object that is not a module.
    Tensors of more than four million elements are compared at evenly spaced positions.

    Example:
        >>> import torch
        >>> from lightning_robustness._isolation.leaks import find_leaks
        >>> class Clipped(torch.nn.Linear):
        ...     def forward(self, x):
        ...         self.weight.data.clamp_(-0.1, 0.1)
        ...         return super().forward(x)
        >>> find_leaks(torch.nn.Sequential(Clipped(8, 8)), torch.ones(2, 8))
        ['0.weight']

    """
    before = _Fingerprint(model)
    with sandbox(model, x, eval_mode=eval_mode) as (x,), torch.no_grad():
        model(x)
    after = _Fingerprint(model)
    names = {name for name in before.entries | after.entries if before.entries.get(name) != after.entries.get(name)}
    return sorted({name.split("[")[0] for name in names})


class _Fingerprint:
    """Names of everything reachable from the modules of a callable, each with a description to compare."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self.entries: dict[str, Any] = {}
        self._alive: dict[int, Any] = {}  # so that no identity is reused
        for module in find_modules(model):
            self._add_module("", module)

    def _add_module(self, name: str, module: nn.Module) -> None:
        if id(module) in self._alive:
            return
        self._alive[id(module)] = module
        prefix = f"{name}." if name else ""
        attributes = vars(module)
        self.entries[name] = type(module)
        for group in ("_parameters", "_buffers"):
            for key, tensor in attributes[group].items():
                self._add(prefix + key, tensor)
        for key, child in attributes["_modules"].items():
            if issubclass(type(child), nn.Module):
                self._add_module(prefix + key, child)
        for key, value in attributes.items():
            if key not in MODULE_ATTRIBUTES:
                self._add(prefix + key, value)

    def _add(self, name: str, value: Any) -> None:
        kind = type(value)
        if len(self.entries) > _MAX_ENTRIES:
            return
        if kind in PLAIN_TYPES:
            self.entries[name] = kind, repr(value)
            return
        self.entries.setdefault(name, (kind, id(value)))
        if id(value) in self._alive or issubclass(kind, weakref.ProxyTypes):
            return
        if issubclass(kind, nn.Module):
            self._add_module(name, value)
            return
        self._alive[id(value)] = value
        if issubclass(kind, Tensor):
            self.entries[name] = kind, _describe_tensor(value)
        elif kind is np.ndarray:
            self.entries[name] = kind, value.shape, value.tobytes()
        elif issubclass(kind, (list, tuple, deque)):
            self._add_elements(name, dict(enumerate(value)))
        elif issubclass(kind, dict):
            self._add_elements(name, value)
        elif issubclass(kind, (set, frozenset)):
            self.entries[name] = kind, frozenset(map(id, value))
            self._alive.update((id(element), element) for element in value)
        elif (setter := keep_generator(value)) is not None:
            self.entries[name] = kind, _describe_state(setter.args[-1])
        elif kind is SimpleNamespace or kind.__module__.partition(".")[0] not in _CLOSED_PACKAGES:
            for key, field in getattr(value, "__dict__", {}).items():
                self._add(f"{name}.{key}", field)

    def _add_elements(self, name: str, elements: dict[Any, Any]) -> None:
        self.entries[name] = type(elements), len(elements)
        for number, (key, element) in enumerate(elements.items()):
            self._add(f"{name}[{repr(key) if type(key) in PLAIN_TYPES else number}]", element)


def _describe_tensor(tensor: Tensor) -> Any:
    if is_lazy(tensor) or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    if tensor.is_quantized or tensor.is_nested:
        return None
    values = tensor.detach().reshape(-1)
    values = values[:: -(-len(values) // _MAX_ELEMENTS) or 1].resolve_conj().resolve_neg()
    # A copy, since a tensor that shares its memory with NumPy can no longer be resized
    bits = values.contiguous().clone().cpu().view(torch.uint8).numpy()
    return tuple(tensor.shape), tensor.dtype, tensor.device, zlib.crc32(bits.data)


def _describe_state(state: Any) -> Any:
    return state.tolist() if isinstance(state, Tensor) else pickle.dumps(state)
