"""The one place of the package that touches global state: everything that differentiates goes through it."""

import functools
import inspect
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_IS_SANDBOXED = ContextVar("_IS_SANDBOXED", default=False)


@contextmanager
def sandbox(
    model: Callable[..., Any], *tensors: Tensor, seed: int = 0, index: int = 0, eval_mode: bool = True
) -> Iterator[tuple[Tensor, ...]]:
    """Isolate a computation with gradients from everything around it.

    Inside, inference mode is left, gradients are on and autocast is off; no parameter requires a gradient; every
    submodule is in eval mode; the random states of Python, NumPy and torch are seeded from ``(seed, index)``. On the
    way out, also by an exception, modes, parameters' flags and ``.grad``, buffers and random states are bit for bit as
    before.

    Args:
        model: The module to be used inside, or a callable that uses modules. Those that a bound method belongs to, a
            ``functools.partial`` binds or a function refers to by name are found.
        tensors: Inputs, of which detached copies come out, usable with gradients also if they were created in
            inference mode.
        seed: Non-negative seed of the random state inside.
        index: Second non-negative part of the seed, for instance the index of a batch.
        eval_mode: Whether submodules are put in eval mode. Without, they keep the mode they have, and what they do to
            their buffers is undone.

    Yields:
        The copies of the tensors.

    Example:
        >>> import torch
        >>> from lightning_robustness.utilities.sandbox import sandbox
        >>> model = torch.nn.Linear(2, 3)
        >>> with torch.inference_mode():
        ...     batch = torch.ones(4, 2)
        ...     with sandbox(model, batch) as (x,):
        ...         gradient, = torch.autograd.grad(model(x.requires_grad_()).sum(), x)
        >>> gradient.shape
        torch.Size([4, 2])
        >>> model.weight.grad is None
        True

    """
    modules = list(dict.fromkeys(module for root in find_modules(model) for module in root.modules()))
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device_type in {"cpu", "cuda", *(tensor.device.type for tensor in tensors)}:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        if any(isinstance(module, nn.RNNBase) for module in modules):
            # cuDNN cannot run an RNN backward in eval mode
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        if is_compiled(modules):
            # Compiled code cannot be differentiated twice, and would be compiled anew for the other flags and modes
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(_IS_SANDBOXED.reset, _IS_SANDBOXED.set(True))
        stack.enter_context(_isolated_random_state(seed, index))
        stack.enter_context(_kept_buffers(modules))
        stack.enter_context(_kept_parameters(modules))
        stack.enter_context(_kept_modes(modules))
        if eval_mode:
            for module in modules:
                module.training = False  # not `eval()`: a module may override that to change its weights, or to refuse
        yield tuple(tensor.detach().clone() for tensor in tensors)


def is_sandboxed() -> bool:
    """Whether this runs within a sandbox: for hooks, which may see passes that are not those of training."""
    return _IS_SANDBOXED.get()


def find_modules(model: Any) -> list[nn.Module]:
    """Find the modules that a callable uses: itself, what it is bound to, or what it refers to by name."""
    if isinstance(model, nn.Module):
        return [model]
    if isinstance(model, functools.partial):
        candidates: list[Any] = [model.func, *model.args, *model.keywords.values()]
        found = [find_modules(value) for value in candidates if callable(value)]
        return [module for modules in found for module in modules]
    if inspect.ismethod(model):
        return find_modules(model.__self__)
    if inspect.isfunction(model):
        variables = inspect.getclosurevars(model)
        values = [*variables.nonlocals.values(), *variables.globals.values()]
    else:
        values = list(getattr(model, "__dict__", {}).values())
    return [value for value in values if isinstance(value, nn.Module)]


def is_compiled(modules: Iterable[nn.Module]) -> bool:
    """Whether one of several modules was compiled: by itself, in place, or as a LightningModule with its steps."""
    marks = ("_orig_mod", "_compiled_call_impl", "_compiler_ctx")
    return any(getattr(module, mark, None) is not None for module in modules for mark in marks)


@contextmanager
def _isolated_random_state(seed: int, index: int) -> Iterator[None]:
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    mps_state = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    try:
        words = np.random.SeedSequence([seed, index]).generate_state(2)
        random.seed(int(words[0]))
        np.random.seed(words[0])
        _seed_torch(int(words[0]) << 32 | int(words[1]))
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)
        if mps_state is not None:
            torch.mps.set_rng_state(mps_state)


def _seed_torch(seed: int) -> None:
    # `torch.manual_seed` would also leave a seed for devices that are initialised later, and formats a stack for that
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


@contextmanager
def _kept_buffers(modules: list[nn.Module]) -> Iterator[None]:
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, copy in buffers:
                module._buffers[name] = buffer
                # An untouched buffer is not written: that would invalidate graphs that hold it
                if not torch.equal(buffer, copy):
                    buffer.copy_(copy)


@contextmanager
def _kept_parameters(modules: list[nn.Module]) -> Iterator[None]:
    parameters = list(dict.fromkeys(p for module in modules for p in module._parameters.values() if p is not None))
    kept = [(p, p.requires_grad, p.grad) for p in parameters]
    try:
        for p in parameters:
            p.requires_grad_(False)
            p.grad = None
        yield
    finally:
        for p, requires_grad, grad in kept:
            p.requires_grad_(requires_grad)
            p.grad = grad


@contextmanager
def _kept_modes(modules: list[nn.Module]) -> Iterator[None]:
    modes = [(module, module.training) for module in modules]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
