"""The one place of the package that touches global state: everything that differentiates goes through it."""

import os
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_robustness._arguments import check_flag, check_integer, check_model
from lightning_robustness._isolation.module_state import ModuleState
from lightning_robustness._isolation.references import Fingerprint

_IS_SANDBOXED = ContextVar("_IS_SANDBOXED", default=False)


_LOCK = threading.Lock()  # one thread at a time is in the sandbox


def _renew_lock() -> None:
    global _LOCK
    _LOCK = threading.Lock()


if hasattr(os, "register_at_fork"):  # a forked process starts with a free lock
    os.register_at_fork(after_in_child=_renew_lock)

# Settings of newer versions of torch, parents first: what is "none" has the value of its parent
_PRECISIONS = [
    ("generic", "all"),
    *((backend, op) for backend in ("cuda", "mkldnn") for op in ("all", "conv", "matmul", "rnn")),
]
_ORIGINAL = "_torchdynamo_orig_callable"  # an attribute of compiled functions


@contextmanager
def sandbox(
    model: Callable[..., Any],
    *tensors: Tensor,
    seed: int = 0,
    index: int = 0,
    eval_mode: bool = True,
    precise: bool = True,
) -> Iterator[tuple[Tensor, ...]]:
    """Isolate a computation with gradients from everything around it.

    Inside, gradients are on; inference mode, autocast, TF32 and compiled code are off; no parameter requires a
    gradient; every submodule is in eval mode; the random states of Python, NumPy and torch are seeded from ``(seed,
    index)``. On exit, even by an exception, modes, flags and ``.grad`` of parameters, random states, the settings of
    torch and the state in ``ModuleState`` (buffers, attributes, generators, ...) are restored bit for bit. Lazy modules
    are initialised inside and uninitialised again on exit, so that training initialises them itself.

    Forward hooks run, since the output may depend on them: spectral and weight normalisation, pruning and quantisation
    are hooks. A hook that only observes can return early if ``is_sandboxed()``.

    Random states, the settings of cuDNN and the compiler, and the modules are shared by all threads of a process. So
    sandboxes of several threads run one after another; nested ones in a thread do not wait. Meanwhile, other threads
    must not use the same modules or expect reproducible global random numbers. A computation in the sandbox must not
    wait for a thread that opens another sandbox, unless that thread runs in the same ``contextvars.Context``.

    Args:
        model: The module to use inside, or a callable. The modules of a bound method, in a ``functools.partial``, or
            that a function refers to by name are found, also in containers and attributes, and behind functions.
        tensors: Inputs. The copies of them are detached, and support gradients even if the inputs were created in
            inference mode.
        seed: Non-negative seed of the random state inside.
        index: Second non-negative part of the seed, for instance the index of a batch.
        eval_mode: Whether to put submodules in eval mode. Otherwise they keep their mode, and changes to their buffers
            are undone.
        precise: Whether to compute in full float32 precision. Otherwise torch's settings, such as TF32, stay in force.

    Yields:
        The copies of the tensors.

    Raises:
        TypeError: If the model is not callable, or a flag is not a boolean.
        ValueError: If ``seed`` or ``index`` is negative or not an integer.

    Example:
        >>> import torch
        >>> from lightning_robustness import sandbox
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
    for name, value in {"seed": seed, "index": index}.items():
        check_integer(name, value, minimum=0)
    for name, flag in {"eval_mode": eval_mode, "precise": precise}.items():
        check_flag(name, flag)
    check_model(model)
    with ExitStack() as stack:
        if not is_sandboxed():
            stack.enter_context(_LOCK)
            stack.callback(_IS_SANDBOXED.reset, _IS_SANDBOXED.set(True))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        state = ModuleState([model])
        for device_type in {"cpu", "cuda", *(tensor.device.type for tensor in tensors)}:
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        stack.enter_context(_without_cudnn([module for module in state.modules if isinstance(module, nn.RNNBase)]))
        if precise:
            stack.enter_context(full_precision())
        if "torch._dynamo" in sys.modules:
            with suppress(RuntimeError):  # within code that is being compiled
                # Compiled code cannot be differentiated twice, and would be recompiled for other flags and modes
                stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_isolated_random_state(seed, index))
        stack.callback(state.restore)
        state.freeze(eval_mode)
        yield tuple(tensor.detach().clone() for tensor in tensors)


def is_sandboxed() -> bool:
    """Return whether this code runs in a sandbox, so that a hook can tell its passes from the passes of training.

    Example:
        >>> import torch
        >>> from lightning_robustness import is_sandboxed, sandbox
        >>> model, calls = torch.nn.Linear(2, 3), []
        >>> handle = model.register_forward_hook(lambda *_: None if is_sandboxed() else calls.append("training"))
        >>> output = model(torch.ones(4, 2))
        >>> with sandbox(model, torch.ones(4, 2)) as (x,):
        ...     output = model(x)
        >>> calls
        ['training']

    """
    return _IS_SANDBOXED.get()


def find_leaks(model: Callable[..., Any], x: Tensor) -> list[str]:
    """Run a forward pass in the sandbox and name the attributes and variables that the sandbox could not restore.

    Tensors of more than four million elements are compared at evenly spaced positions.
    """
    before = Fingerprint(model).entries
    with sandbox(model, x) as (x,), torch.no_grad():
        model(x)
    after = Fingerprint(model).entries
    return sorted({name.split("[")[0] for name in before | after if before.get(name) != after.get(name)})


def is_compiled(modules: Iterable[nn.Module]) -> bool:
    """Return whether any module was compiled: by itself, in place, by its ``forward``, or with its steps."""
    return any(
        vars(module).get("_compiled_call_impl") is not None  # `module.compile()`
        or vars(module).get("_compiler_ctx") is not None  # a LightningModule that was compiled
        or "_orig_mod" in vars(module)["_modules"]  # `torch.compile(module)`
        or hasattr(vars(module).get("forward", type(module).forward), _ORIGINAL)
        for module in modules
    )


@contextmanager
def _without_cudnn(layers: list[nn.RNNBase]) -> Iterator[None]:
    """Switch off cuDNN in recurrent layers, which it cannot run backward in eval mode, and in nothing else.

    Not by `torch.backends.cudnn.flags`, which allows TF32 and may refuse to read whether it was allowed.
    """
    before: list[bool] = []

    def enter(*_: Any) -> None:
        before.append(torch.backends.cudnn.enabled)
        torch.backends.cudnn.enabled = False

    def leave(*_: Any) -> None:
        if before:
            torch.backends.cudnn.enabled = before.pop()

    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(layer.register_forward_pre_hook(enter))
            stack.enter_context(layer.register_forward_hook(leave, always_call=True, prepend=True))  # nested
        yield


@contextmanager
def _isolated_random_state(seed: int, index: int) -> Iterator[None]:
    words = np.random.SeedSequence([seed, index]).generate_state(2)
    # `torch.manual_seed` would also seed devices that are initialised later, and format a stack trace to do so
    torch_seed = int(words[0]) << 32 | int(words[1])
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        random.seed(int(words[0]))
        stack.callback(np.random.set_state, np.random.get_state())
        np.random.seed(words[0])
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        torch.default_generator.manual_seed(torch_seed)
        if torch.cuda.is_initialized():
            stack.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
            torch.cuda.manual_seed_all(torch_seed)
        if torch.backends.mps.is_available():
            stack.callback(torch.mps.set_rng_state, torch.mps.get_rng_state())
            torch.mps.manual_seed(torch_seed)
        yield


@contextmanager
def full_precision() -> Iterator[None]:
    """Let float32 products and convolutions have the precision of float32, whatever torch is set to.

    By default, GPUs convolve in TensorFloat32, whose mantissa has 10 bits instead of 23.
    """
    settings = _take_precisions()
    matmul, cudnn = torch.get_float32_matmul_precision(), _cudnn_allows_tf32()
    try:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        _set_precisions(dict.fromkeys(settings, "ieee"))
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn
        _set_precisions(settings)  # last, since the two before change some of these


def _take_precisions() -> dict[tuple[str, str], str]:
    """Read the settings of newer versions of torch and set them to "none", without which parents would show through.

    Older versions have none. The public attributes do not reach each of them.
    """
    settings: dict[tuple[str, str], str] = {}
    if hasattr(torch._C, "_get_fp32_precision_getter"):
        in_force = {key: torch._C._get_fp32_precision_getter(*key) for key in _PRECISIONS}
        for key in _PRECISIONS:
            own = torch._C._get_fp32_precision_getter(*key)
            torch._C._set_fp32_precision_setter(*key, "none")  # type: ignore[attr-defined, unused-ignore]
            # Convolutions that were never set show TF32 here, even if they have followed their parent
            settings[key] = own if own == in_force[key] else "none"
    return settings


def _set_precisions(settings: dict[tuple[str, str], str]) -> None:
    for key, value in settings.items():
        torch._C._set_fp32_precision_setter(*key, value)  # type: ignore[attr-defined, unused-ignore]


def _cudnn_allows_tf32() -> bool:
    """Read the older setting of cuDNN, after the newer ones were taken: torch refuses if it contradicts them."""
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return True
