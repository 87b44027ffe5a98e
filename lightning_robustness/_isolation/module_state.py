"""Save the state of modules that a forward pass can change, and restore it bit for bit."""

from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from itertools import accumulate, chain
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lightning_robustness._isolation.references import (
    MAX_ENTERED,
    MAX_KEPT,
    MODULE_ATTRIBUTES,
    PLAIN_TYPES,
    find_variables,
    is_users,
    keep_generator,
    reach,
)

_MUTABLE_TYPES = frozenset({list, dict, set, deque, OrderedDict, defaultdict, Counter})
# Their attributes are left alone: they belong to state elsewhere, such as process groups, that is not restored
_WRAPPERS = ("torch.distributed.", "torch.nn.parallel.", "torch._dynamo.")
_UNINITIALIZED_TYPES = frozenset({UninitializedParameter, UninitializedBuffer})
_REGISTERED = ("_parameters", "_buffers", "_modules")
_LAZY_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_load_state_dict_pre_hooks")
_MAX_BYTES = 2**28


class ModuleState:
    """State of modules that a forward pass may change, except for hooks, to be restored later.

    Values are copied for buffers, and for tensors and arrays without gradient up to 256 MB in total, the smallest
    first. In-place changes are not undone in larger ones, parameters with gradient, objects of other types, containers
    of more than 10,000 elements, and the elements of containers of more than 128; ``find_leaks`` names them. Values are
    written back without a comparison, which would wait for the device, and without a new version, so that graphs that
    hold them stay valid.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self.modules: list[nn.Module] = []
        """All modules, also those that were hidden."""
        self._modes: list[tuple[nn.Module, bool]] = []
        # Parameters, and other leaves that require a gradient
        self._leaves: list[tuple[Tensor, bool, Tensor | None]] = []
        self._queue: list[Any] = []
        self._attributes: list[tuple[nn.Module, type[nn.Module], dict[str, Any] | None]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._scripted: list[tuple[Any, str, Tensor]] = []
        self._uninitialized: list[tuple[Tensor, type[Tensor], Tensor]] = []
        self._aliases: list[tuple[Tensor, Tensor]] = []
        self._buffers: list[Tensor] = []
        self._others: list[Any] = []
        self._setters: list[partial[Any]] = []
        self._seen: set[int] = set()
        self._reached: dict[int, Any] = {}
        self._keep_variables(values)
        for module in self._queue:  # grows in the loop
            if issubclass(type(module), nn.Module) and id(module) not in self._seen:  # it may be None, or a proxy
                self._seen.add(id(module))
                self._keep_module(module)
        kept = [value for value in (*self._buffers, *_fitting(self._others)) if not _is_expanded(value)]
        self._copies = [(value, value.clone() if isinstance(value, Tensor) else value.copy()) for value in kept]

    def freeze(self, eval_mode: bool) -> None:
        """Let no leaf require or have a gradient, and put modules in eval mode if wanted."""
        for leaf, requires_grad, grad in self._leaves:
            if requires_grad:
                leaf.requires_grad = False  # not `requires_grad_`, which uninitialised parameters lack
            if grad is not None:
                leaf.grad = None
        for module, training in self._modes:
            if training and eval_mode:
                _set_mode(module, False)

    def restore(self) -> None:
        """Restore everything; if one part fails, the others are still restored."""
        with torch.no_grad(), ExitStack() as stack:
            stack.callback(self._restore_flags)  # last: gradients must have the shapes of their parameters
            stack.callback(self._restore_values)
            stack.callback(self._restore_memory)
            stack.callback(self._restore_containers)
            stack.callback(self._restore_attributes)
            for setter in self._setters:
                stack.callback(setter)

    def _keep_module(self, module: nn.Module) -> None:
        attributes, cls = vars(module), type(module)
        is_wrapper = cls.__module__.startswith(_WRAPPERS)
        self.modules.append(module)
        self._modes.append((module, module.training))
        self._queue.extend(attributes["_modules"].values())
        self._attributes.append((module, cls, None if is_wrapper else attributes.copy()))
        self._keep_registered(attributes, issubclass(cls, LazyModuleMixin))
        for parameter in attributes["_parameters"].values():
            if parameter is not None:
                self._keep_tensor(parameter, self._others, is_parameter=True)
        for buffer in attributes["_buffers"].values():
            if buffer is not None:
                self._keep_tensor(buffer, self._buffers)
        if not is_wrapper:
            for name in attributes.keys() - MODULE_ATTRIBUTES:
                self._keep_value(attributes[name])
            if is_users(cls) and (id(cls) not in self._seen or "forward" in attributes):
                self._seen.add(id(cls))
                self._keep_variables(find_variables(module).values())

    def _keep_variables(self, variables: Iterable[Any]) -> None:
        """Keep modules and generators alone: other variables may be meant to note what runs here."""
        for value in reach(variables, self._reached):
            if issubclass(type(value), nn.Module):
                self._queue.append(value)
            elif (setter := keep_generator(value)) is not None:
                self._setters.append(setter)

    def _keep_registered(self, attributes: dict[str, Any], is_lazy: bool) -> None:
        """Keep which parameters, buffers and children there are, and the hooks that initialise a lazy module."""
        for name in (*_REGISTERED, *(_LAZY_HOOKS if is_lazy else ())):
            registered = attributes[name]
            if type(registered) in _MUTABLE_TYPES:
                self._containers.append((registered, registered.copy()))
            elif name == "_buffers":  # of a scripted module
                self._scripted.extend((registered, key, buffer) for key, buffer in registered.items())

    def _keep_value(self, value: Any) -> None:
        kind = type(value)  # `isinstance` would see through proxies
        if kind in PLAIN_TYPES or id(value) in self._seen:
            return
        if issubclass(kind, Tensor):
            self._keep_tensor(value, self._others)
        elif issubclass(kind, nn.Module):
            self._queue.append(value)
        elif kind in _MUTABLE_TYPES or issubclass(kind, tuple):
            self._keep_container(value)
        elif issubclass(kind, (UserDict, UserList)):
            self._keep_container(value.data)
        elif kind is np.ndarray:
            self._seen.add(id(value))
            if value.flags.writeable:
                self._others.append(value)
        else:
            self._keep_variables([value])

    def _keep_container(self, container: Any) -> None:
        self._seen.add(id(container))
        if len(container) > MAX_KEPT:
            return
        if type(container) in _MUTABLE_TYPES:
            self._containers.append((container, container.copy()))
        for element in list(container.values() if isinstance(container, dict) else container):
            if len(container) <= MAX_ENTERED or issubclass(type(element), nn.Module):
                self._keep_value(element)

    def _keep_tensor(self, tensor: Tensor, copied: list[Any], is_parameter: bool = False) -> None:
        if id(tensor) in self._seen:
            return
        self._seen.add(id(tensor))
        if type(tensor) in _UNINITIALIZED_TYPES:
            self._uninitialized.append((tensor, type(tensor), tensor.data))
            self._leaves.append((tensor, tensor.requires_grad, None))
            return
        requires_grad = tensor.requires_grad
        # Results of a computation are replaced by the next one, and inference tensors cannot be written here
        if (requires_grad and tensor.grad_fn is not None) or tensor.is_inference():
            return
        if is_parameter or requires_grad:
            self._leaves.append((tensor, requires_grad, tensor.grad))
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
            return
        alias = tensor.data
        if type(alias) is Tensor:
            self._aliases.append((tensor, alias))
        if not requires_grad:
            copied.append(alias)

    def _restore_attributes(self) -> None:
        for module, cls, kept in self._attributes:
            if type(module) is not cls:
                module.__class__ = cls
            attributes = vars(module)
            if kept is None or _is_same(kept.values(), attributes.values()):
                continue
            for name in [name for name in attributes if name not in kept and name not in MODULE_ATTRIBUTES]:
                del attributes[name]
            attributes.update((name, value) for name, value in kept.items() if name not in MODULE_ATTRIBUTES)

    def _restore_containers(self) -> None:
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

    def _restore_flags(self) -> None:
        for leaf, requires_grad, grad in self._leaves:
            leaf.requires_grad = requires_grad
            leaf.grad = grad
        for module, training in self._modes:
            if module.training is not training:
                _set_mode(module, training)

    def _restore_values(self) -> None:
        for value, copy in self._copies:
            if isinstance(value, Tensor):
                value.copy_(copy)
            else:
                value[...] = copy


def _set_mode(module: nn.Module, training: bool) -> None:
    # Not `train()`: a module may override that to change its weights, or to refuse
    attributes = vars(module)
    if "training" in attributes:
        attributes["training"] = training  # many times faster than through `nn.Module.__setattr__`
    else:
        module.training = training


def is_lazy(module: nn.Module) -> bool:
    """Return whether the first forward pass will initialise parameters or buffers of a module."""
    return any(type(tensor) in _UNINITIALIZED_TYPES for tensor in chain(module.parameters(), module.buffers()))


def _fitting(values: list[Any]) -> list[Any]:
    """Return the smallest tensors and arrays, as many as fit in the memory for copies."""
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


def _is_expanded(value: Any) -> bool:
    """Return whether elements of a tensor share memory, so that they cannot be written."""
    return isinstance(value, Tensor) and any(
        size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True)
    )
