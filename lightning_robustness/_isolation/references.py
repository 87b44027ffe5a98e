"""Everything that a callable refers to: modules, variables of functions, and whatever can be reached from there."""

import pickle
import random
import sys
import weakref
import zlib
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, ValuesView
from functools import partial
from itertools import chain, count, islice
from types import (
    CellType,
    CodeType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

# Attributes of every module: parameters, buffers and children, which are kept one by one, and hooks, which are not
MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
PLAIN_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes})
# Objects of these packages are not entered: a Trainer, for instance, refers to everything
_CLOSED_PACKAGES = sys.stdlib_module_names | {"torch", "numpy", "lightning", "pytorch_lightning", "lightning_fabric"}
MAX_ENTERED = 128
MAX_KEPT = 10_000
_MAX_SEARCHED = 1_000
_FUNCTION_TYPES = FunctionType, staticmethod, classmethod, property
_MAPPINGS = dict, MappingProxyType
_CONTAINERS: tuple[Any, ...] = (*_MAPPINGS, list, tuple, set, frozenset, deque, type({}.values()), ValuesView)
_SHOWN_TYPES = PLAIN_TYPES | {bytearray, array, count}  # their text says what they hold
_MAX_ELEMENTS = 2**22
_MAX_ENTRIES = 100_000


def find_modules(model: Any) -> list[nn.Module]:
    """Find the modules that a callable uses: itself, or those that its variables, attributes and containers hold."""
    return [value for value in reach([model]) if issubclass(type(value), nn.Module)]


def reach(values: Iterable[Any], seen: dict[int, Any] | None = None) -> Iterator[Any]:
    """Go through values and what they refer to, each once; modules and objects of other packages are not entered."""
    rest, seen = list(values), {} if seen is None else seen
    for value in islice(rest, _MAX_SEARCHED):  # grows in the loop
        if id(value) in seen:
            continue
        seen[id(value)] = value
        yield value
        for number, (_, part) in enumerate(_parts(value, limit=MAX_KEPT)):
            if type(part) not in PLAIN_TYPES and (number < MAX_ENTERED or issubclass(type(part), nn.Module)):
                rest.append(part)


def _parts(value: Any, name: str = "", limit: int | None = None) -> Iterator[tuple[str, Any]]:
    """Go through what a value refers to, by name; modules and classes are not entered."""
    kind = type(value)  # `isinstance` would see through proxies
    if issubclass(kind, (nn.Module, type)):
        return
    base: Any = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
    if base is not None:  # whose methods the user's class may override
        elements = base.items(value) if issubclass(base, _MAPPINGS) else enumerate(base.__iter__(value))
        elements = list(islice(elements, limit))  # other threads may change it
        if limit is not None and not any(issubclass(own, nn.Module) for own in {type(own) for _, own in elements}):
            elements = elements[:MAX_ENTERED]  # many times faster than to name elements that are not entered
        for number, (key, element) in enumerate(elements):
            yield f"{name}[{repr(key) if type(key) in PLAIN_TYPES else number}]", element
    for key, field in _fields(value, kind).items():
        yield f"{name}.{key}", field
    call = getattr(kind, "__call__", None) if is_users(kind) else None  # noqa: B004
    function = MethodType(call, value) if type(call) is FunctionType else value
    if type(function) in (FunctionType, MethodType):
        for variable, found in find_variables(function).items():
            yield f"{variable}[{name}]", found  # what follows a bracket is not shown


def _fields(value: Any, kind: type) -> dict[str, Any]:
    """Return the attributes of an object that hold what it refers to."""
    if issubclass(kind, partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if kind is MethodType:
        return {"__self__": value.__self__}
    if kind is weakref.ref:
        return {"__call__": value()}
    if kind is GeneratorType:
        return {} if value.gi_frame is None else value.gi_frame.f_locals
    if not (issubclass(kind, (SimpleNamespace, UserDict, UserList)) or is_users(kind)):
        return {}
    members = [name for cls in kind.__mro__ for name, part in vars(cls).items() if type(part) is MemberDescriptorType]
    slots = {name: getattr(value, name) for name in members if name != "__dict__" and hasattr(value, name)}
    return slots | getattr(value, "__dict__", {})


def find_variables(value: Any) -> dict[str, Any]:
    """Find the variables that a function, or the ``forward`` of a module, and the functions it calls refer to."""
    is_module = issubclass(type(value), nn.Module)
    functions: list[Any] = [vars(value).get("forward", type(value).forward) if is_module else value]
    owner: Any = value.__self__ if type(value) is MethodType else value
    owner = owner if issubclass(type(owner), type) else type(owner)
    classes = [(cls.__qualname__, vars(cls)) for cls in owner.__mro__ if is_users(cls)]
    found: dict[str, Any] = {}
    seen = set[int]()
    for function in functions:  # grows in the loop
        function = getattr(function, "__func__", getattr(function, "fget", function))
        if type(function) is not FunctionType or id(function) in seen or len(seen) > _MAX_SEARCHED:
            continue
        seen.add(id(function))
        functions += _add_variables(found, function, classes)
    return found


def _add_variables(found: dict[str, Any], function: FunctionType, classes: list[tuple[str, Any]]) -> list[Any]:
    """Add the variables of a function to others, and return the functions that it refers to."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    own = {name: cell.cell_contents for name, cell in cells if cell != CellType()}
    own |= {"__defaults__": function.__defaults__, "__kwdefaults__": function.__kwdefaults__, **vars(function)}
    names = _names(function.__code__) | own.keys()
    spaces = [(function.__qualname__, own)]  # of others' decorators, such as `torch.compile`, these alone
    if is_users(function):
        spaces += [(function.__globals__["__name__"], function.__globals__), *classes]
        owner = function.__globals__.get(function.__qualname__.partition(".")[0])  # of a class method, for instance
        spaces += [(owner.__qualname__, dict(vars(owner)))] if isinstance(owner, type) else []
    functions = []
    for label, space in spaces:  # grows in the loop
        for name in sorted(names & space.keys()):
            value = space[name]
            kind = type(space[name])
            if kind in _FUNCTION_TYPES:
                functions.append(value)
            elif not issubclass(kind, (type, ModuleType)):
                found[f"{label}.{name}"] = value
            elif is_users(value) and value.__name__ not in dict(spaces):
                spaces.append((value.__name__, vars(value)))
    return functions


def _names(code: CodeType) -> set[str]:
    """Return the names that a function uses, nested functions included."""
    return set(code.co_names).union(*(_names(part) for part in code.co_consts if type(part) is CodeType))


def is_users(value: Any) -> bool:
    """Return whether a function, class or file is of no package that is known to hold no networks."""
    if type(value) is FunctionType:  # decorators take over other attributes
        name = value.__globals__.get("__name__")
    else:
        name = getattr(value, "__name__" if type(value) is ModuleType else "__module__", None)
    return (name or "").partition(".")[0] not in _CLOSED_PACKAGES


def keep_generator(value: Any) -> partial[Any] | None:
    """Return a function that restores the present state of a random number generator; None for anything else."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return keep_generator(value.bit_generator)
    if isinstance(value, np.random.BitGenerator):
        return partial(setattr, value, "state", value.state)
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return partial(value.setstate, value.getstate())
    return None


class Fingerprint:
    """Names of everything reachable from the modules of a callable, each with a description to compare."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self.entries: dict[str, Any] = {}
        self._alive: dict[int, Any] = {}  # so that no identity is reused
        for value in reach([model]):
            if issubclass(type(value), nn.Module):
                self._add("", value)
            elif type(value) is FunctionType:
                self._add_parts("", value)
            elif is_users(type(value)):
                self._add(type(value).__qualname__, value)

    def _add_module(self, name: str, module: nn.Module) -> None:
        attributes = vars(module)
        self.entries[name] = type(module)
        registered = [attributes[group].items() for group in ("_parameters", "_buffers", "_modules")]
        others = [(key, value) for key, value in attributes.items() if key not in MODULE_ATTRIBUTES]
        for key, value in chain(*registered, others):
            self._add(f"{name}.{key}" if name else key, value)
        if is_users(type(module)):
            for variable, value in find_variables(module).items():
                self._add(f"{variable}[{name}]", value)

    def _add(self, name: str, value: Any) -> None:
        kind = type(value)
        if len(self.entries) > _MAX_ENTRIES:
            return
        if kind in _SHOWN_TYPES:
            self.entries[name] = kind, repr(value)
            return
        self.entries.setdefault(name, (kind, id(value)))
        if id(value) in self._alive or issubclass(kind, weakref.ProxyTypes):
            return
        self._alive[id(value)] = value
        if issubclass(kind, nn.Module):
            self._add_module(name, value)
        elif issubclass(kind, Tensor):
            self.entries[name] = kind, _describe_tensor(value)
        elif kind is np.ndarray:
            self.entries[name] = kind, value.shape, value.tobytes()
        elif issubclass(kind, (set, frozenset)):
            self.entries[name] = kind, frozenset(map(id, value))
            self._alive.update((id(element), element) for element in value)
        elif (setter := keep_generator(value)) is not None:
            self.entries[name] = kind, _describe_state(setter.args[-1])
        else:
            if issubclass(kind, (list, tuple, deque, dict)):
                self.entries[name] = kind, len(value)
            self._add_parts(name, value)

    def _add_parts(self, name: str, value: Any) -> None:
        for part_name, part in _parts(value, name):
            self._add(part_name, part)


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
