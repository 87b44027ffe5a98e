"""Save the state of modules that a forward pass can change, and restore it bit for bit."""

import inspect
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from itertools import accumulate, chain
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

# Attributes of every module: parameters, buffers and children, which are kept one by one, and hooks, which are not
MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
PLAIN_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes})
# Types of the settings of `torch.nn` modules, which their forward passes do not change
_SETTING_TYPES = PLAIN_TYPES | {tuple, torch.dtype, torch.device}
_SETTINGS = frozenset({"_reversed_padding_repeated_twice"})  # a list that every convolution has
_MUTABLE_TYPES = frozenset({list, dict, set, deque, OrderedDict, defaultdict, Counter})
# Their attributes are left alone: they belong to state elsewhere, such as process groups, that is not restored
_WRAPPERS = ("torch.distributed.", "torch.nn.parallel.", "torch._dynamo.")
_UNINITIALIZED_TYPES = frozenset({UninitializedParameter, UninitializedBuffer})
_LAZY_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_load_state_dict_pre_hooks")
_TRAITS: WeakKeyDictionary[type[nn.Module], tuple[bool, bool, bool]] = WeakKeyDictionary()
_MAX_BYTES = 2**28
_MAX_KEPT = 10_000
_MAX_ENTERED = 128
# Objects of these packages are not entered: a Trainer, for instance, refers to everything
CLOSED_PACKAGES = sys.stdlib_module_names | {"torch", "numpy", "lightning", "pytorch_lightning", "lightning_fabric"}
_MAX_SEARCHED = 1_000


class ModuleState:
    """State of modules that a forward pass may change, except for hooks, to be restored later.

    It holds the attributes of the modules and the contents of lists, dictionaries, sets, deques and tuples among them;
    the registered parameters, buffers and submodules; the memory and shape of each tensor; the states of random number
    generators; and whether lazy modules are initialised. Modules hidden in such attributes are included.

    Values are copied for buffers, and for tensors and arrays without gradient up to 256 MB in total, the smallest
    first. In-place changes are not undone in larger ones, parameters with gradient, objects of other types, containers
    of more than 10,000 elements, and the elements of containers of more than 128; ``find_leaks`` names them. Values are
    written back without a comparison, which would wait for the device, and without a new version, so that graphs that
    hold them stay valid.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.leaves: list[Tensor] = []
        """Parameters, and other leaves that require a gradient."""
        self._queue = list(modules)
        self._modules: list[tuple[nn.Module, type[nn.Module], dict[str, Any] | None]] = []
        self._registered: list[tuple[Any, Any]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._scripted: list[tuple[Any, str, Tensor]] = []
        self._uninitialized: list[tuple[Tensor, type[Tensor], Tensor]] = []
        self._aliases: list[tuple[Tensor, Tensor]] = []
        self._buffers: list[Tensor] = []
        self._others: list[Any] = []
        self._setters: list[partial[Any]] = []
        self._seen: set[int] = set()
        for module in self._queue:  # grows in the loop
            if id(module) not in self._seen:
                self._seen.add(id(module))
                self._keep_module(module)
        self._copies = self._copy()

    def restore(self) -> None:
        """Restore everything; if one part fails, the others are still restored."""
        with torch.no_grad(), ExitStack() as stack:
            stack.callback(self._restore_values)
            stack.callback(self._restore_memory)
            stack.callback(self._restore_containers)
            stack.callback(self._restore_attributes)
            for setter in self._setters:
                stack.callback(setter)

    def _keep_module(self, module: nn.Module) -> None:
        attributes, cls = vars(module), type(module)
        is_wrapper, is_built_in, is_lazy = _traits(cls)
        self._modules.append((module, cls, None if is_wrapper else attributes.copy()))
        self._keep_registered(attributes, is_built_in, is_lazy)
        for parameter in attributes["_parameters"].values():
            if parameter is not None:
                self._keep_tensor(parameter, self._others, is_parameter=True)
        for buffer in attributes["_buffers"].values():
            if buffer is not None:
                self._keep_tensor(buffer, self._buffers)
        if not is_wrapper:
            self._keep_attributes(attributes, is_built_in)

    def _keep_registered(self, attributes: dict[str, Any], is_built_in: bool, is_lazy: bool) -> None:
        """Keep which parameters, buffers and children there are, and the hooks that initialise a lazy module."""
        parameters, buffers, children = (attributes[name] for name in ("_parameters", "_buffers", "_modules"))
        for registered in (parameters, buffers, children):
            if (registered or not is_built_in) and type(registered) in _MUTABLE_TYPES:
                self._registered.append((registered, registered.copy()))
        if type(buffers) not in _MUTABLE_TYPES:  # of a scripted module
            self._scripted.extend((buffers, key, buffer) for key, buffer in buffers.items())
        if is_lazy:
            self._registered.extend((attributes[name], attributes[name].copy()) for name in _LAZY_HOOKS)

    def _keep_attributes(self, attributes: dict[str, Any], is_built_in: bool) -> None:
        left_out = _SETTING_TYPES if is_built_in else PLAIN_TYPES
        for name in attributes.keys() - MODULE_ATTRIBUTES:
            if type(attributes[name]) not in left_out and name not in _SETTINGS:
                self._keep_value(attributes[name])

    def _keep_value(self, value: Any) -> None:
        kind = type(value)  # `isinstance` would see through proxies
        if kind in PLAIN_TYPES or id(value) in self._seen:
            return
        if issubclass(kind, Tensor):
            self._keep_tensor(value, self._others)
        elif issubclass(kind, nn.Module):
            self._queue.extend(walk([value]))
        elif kind in _MUTABLE_TYPES or issubclass(kind, tuple):
            self._keep_container(value)
        elif kind is np.ndarray:
            self._seen.add(id(value))
            if value.flags.writeable:
                self._others.append(value)
        else:
            setter = keep_generator(value)
            if setter is not None:
                self._setters.append(setter)

    def _keep_container(self, container: Any) -> None:
        self._seen.add(id(container))
        if len(container) > _MAX_KEPT:
            return
        if type(container) in _MUTABLE_TYPES:
            self._containers.append((container, container.copy()))
        if len(container) <= _MAX_ENTERED:
            for element in container.values() if isinstance(container, dict) else container:
                self._keep_value(element)

    def _keep_tensor(self, tensor: Tensor, copied: list[Any], is_parameter: bool = False) -> None:
        if id(tensor) in self._seen:
            return
        self._seen.add(id(tensor))
        if type(tensor) in _UNINITIALIZED_TYPES:
            self._uninitialized.append((tensor, type(tensor), tensor.data))
            self.leaves.append(tensor)
            return
        requires_grad = tensor.requires_grad
        # Results of a computation are replaced by the next one, and inference tensors cannot be written here
        if (requires_grad and tensor.grad_fn is not None) or tensor.is_inference():
            return
        if is_parameter or requires_grad:
            self.leaves.append(tensor)
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
            return
        alias = tensor.data
        if type(alias) is Tensor:
            self._aliases.append((tensor, alias))
        if not requires_grad:
            copied.append(alias)

    def _copy(self) -> list[tuple[list[Any], list[Any]]]:
        """Copy values, grouped by device and dtype so that a group is copied at once."""
        groups: dict[Any, list[Any]] = {}
        for value in chain(self._buffers, _fitting(self._others)):
            # Quantised values and conjugates, which are complex, cannot be copied together
            is_plain = type(value) is Tensor and value.is_contiguous()
            if is_plain and not (value.is_quantized or value.is_complex()):
                groups.setdefault((value.device, value.dtype), []).append(value if value.ndim == 1 else value.view(-1))
            elif not isinstance(value, Tensor) or not _is_expanded(value):
                groups.setdefault(None, []).append(value)
        single = groups.pop(None, [])
        copies = [(single, [value.clone() if isinstance(value, Tensor) else value.copy() for value in single])]
        for values in groups.values():
            sizes = [value.numel() for value in values]
            copies.append((values, list(torch.split_with_sizes(torch.cat(values), sizes))))
        return copies

    def _restore_attributes(self) -> None:
        for module, cls, kept in self._modules:
            if type(module) is not cls:
                module.__class__ = cls
            attributes = vars(module)
            if kept is None or _is_same(kept.values(), attributes.values()):
                continue
            for name in [name for name in attributes if name not in kept and name not in MODULE_ATTRIBUTES]:
                del attributes[name]
            attributes.update((name, value) for name, value in kept.items() if name not in MODULE_ATTRIBUTES)

    def _restore_containers(self) -> None:
        for registered, kept in self._registered:
            if not _is_same(kept.values(), registered.values()):
                _fill(registered, kept)
        for container, kept in self._containers:
            if not _is_same(kept, container) or (
                isinstance(kept, dict) and not _is_same(kept.values(), container.values())
            ):
                _fill(container, kept)
        for scripted, name, buffer in self._scripted:
            scripted[name] = buffer

    def _restore_memory(self) -> None:
        for tensor, cls, data in self._uninitialized:
            if type(tensor) is not cls:
                tensor.grad = None  # of another shape
                tensor.data = data
                tensor.__class__ = cls
        for tensor, alias in self._aliases:
            if not _has_same_memory(tensor, alias):
                tensor.grad = None
                tensor.data = alias

    def _restore_values(self) -> None:
        (values, copies), *groups = self._copies
        for value, copy in zip(values, copies, strict=True):
            if isinstance(value, Tensor):
                value.copy_(copy)
            else:
                value[...] = copy
        for values, copies in groups:
            torch._foreach_copy_(values, copies)


def walk(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Find modules and their submodules, each once."""
    found: dict[nn.Module, None] = {}
    rest = list(roots)
    while rest:
        module = rest.pop()
        if issubclass(type(module), nn.Module) and module not in found:  # it may be None, or a proxy
            found[module] = None
            rest.extend(vars(module)["_modules"].values())
    return list(found)


def find_modules(model: Any) -> list[nn.Module]:
    """Find the modules that a callable uses: itself, what it is bound to or wraps, or what it refers to by name.

    They may be in lists and dictionaries, and in attributes of objects that are no modules.
    """
    found: dict[nn.Module, None] = {}
    rest, seen = [model], dict[int, Any]()
    while rest and len(seen) < _MAX_SEARCHED:
        value = rest.pop(0)
        if issubclass(type(value), nn.Module):
            found[value] = None
        elif id(value) not in seen:
            seen[id(value)] = value
            rest.extend(_behind(value))
    return list(found)


def _behind(value: Any) -> list[Any]:
    """Return what a callable or a container refers to; nothing of objects of other packages."""
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if inspect.ismethod(value):
        return [value.__self__]
    if inspect.isfunction(value):
        variables = inspect.getclosurevars(value)
        # A decorator, such as `torch.compile`, keeps the function that it wraps
        wrapped = [value.__wrapped__] if hasattr(value, "__wrapped__") else []
        named = [*variables.nonlocals.values(), *variables.globals.values(), *(value.__defaults__ or ())]
        return wrapped + [other for other in named if not inspect.isfunction(other) or _is_users(other)]
    if type(value) in (list, tuple, set, dict):
        return list(value.values() if isinstance(value, dict) else value) if len(value) <= _MAX_ENTERED else []
    return list(getattr(value, "__dict__", {}).values()) if not isinstance(value, type) and _is_users(value) else []


def _is_users(value: Any) -> bool:
    """Return whether a function, or the class of an object, is of no package that is known to hold no modules."""
    module = getattr(value if inspect.isfunction(value) else type(value), "__module__", None) or ""
    return module.partition(".")[0] not in CLOSED_PACKAGES


def is_lazy(module: nn.Module) -> bool:
    """Return whether the first forward pass will initialise parameters or buffers of a module."""
    return any(type(tensor) in _UNINITIALIZED_TYPES for tensor in chain(module.parameters(), module.buffers()))


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


def _traits(cls: type[nn.Module]) -> tuple[bool, bool, bool]:
    """Return whether a class wraps other modules, is one of ``torch.nn``, and is lazy."""
    traits = _TRAITS.get(cls)
    if traits is None:
        is_built_in = cls.__module__.startswith("torch.nn.modules.")
        traits = cls.__module__.startswith(_WRAPPERS), is_built_in, issubclass(cls, LazyModuleMixin)
        _TRAITS[cls] = traits
    return traits


def _fitting(values: list[Any]) -> list[Any]:
    """Return the smallest tensors and arrays, as many as fit in the memory for copies."""
    if sum(value.nbytes for value in values) <= _MAX_BYTES:
        return values
    values = sorted(values, key=lambda value: value.nbytes)
    totals = accumulate(value.nbytes for value in values)
    return [value for value, total in zip(values, totals, strict=True) if total <= _MAX_BYTES]


def _is_same(first: Any, second: Any) -> bool:
    """Return whether two collections hold the same objects in the same order."""
    return len(first) == len(second) and all(map(is_, first, second))


def _has_same_memory(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are the same view of memory; ``Tensor.is_set_to`` does not support all devices."""
    return (
        first.data_ptr() == second.data_ptr()
        and first.shape == second.shape
        and first.stride() == second.stride()
        and first.dtype == second.dtype
    )


def _fill(container: Any, elements: Any) -> None:
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(elements)
    else:
        container.extend(elements)


def _is_expanded(tensor: Tensor) -> bool:
    """Return whether elements share memory, so that they cannot be written."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
