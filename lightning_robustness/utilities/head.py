"""Find the head of a classifier, and record its inputs and outputs during passes that somebody else runs."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_robustness.utilities.logits import check_finite, compute_logits
from lightning_robustness.utilities.sandbox import sandbox

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class HeadCall(NamedTuple):
    """Input of the head, shape ``(N, M)``, and its output, shape ``(N, K)``."""

    embedding: Tensor
    logits: Tensor


class HeadTap:
    """Record the embedding and the logits of a forward pass that somebody else runs, without one of its own.

    Between ``attach`` and ``detach``, forward hooks record the calls of the head. ``listen`` announces a batch, and the
    first pass on that batch counts: hooks on all modules find the outermost call that receives it, and the last call of
    the head inside it is recorded, or else the next one after it. If it is unclear whether the batch reached the head,
    nothing is recorded.

    Args:
        model: The module that holds the head.
        name: Name of the head in it, as ``find_head`` returns it.

    Example:
        >>> import torch
        >>> from lightning_robustness.utilities.head import HeadTap, find_head
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 4))
        >>> x = torch.rand(5, 2)
        >>> with HeadTap(model, find_head(model, x)) as tap:
        ...     tap.listen(x)
        ...     logits, others = model(x), model(1 - x)
        ...     call = tap.take()
        >>> call.embedding.shape, torch.equal(call.logits, logits)
        (torch.Size([5, 3]), True)

    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self.name = name
        self._model = model
        self._head: nn.Module | None = None
        self._handles: list[RemovableHandle] = []
        self._x: Tensor | None = None
        self._call: HeadCall | None = None
        self._root: nn.Module | None = None  # outermost module that is processing the inputs
        self._is_own = False
        self._others_are_pending = False  # other inputs entered the network but have not reached the head yet

    def attach(self) -> None:
        """Register the hooks."""
        if self._handles:
            return
        self._head = self._model.get_submodule(self.name)
        for module in _hookable(self._model):
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave, with_kwargs=True))

    def detach(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()
        self._forget()

    def listen(self, x: Tensor) -> None:
        """Announce the inputs whose pass through the network is to be recorded."""
        self._forget()
        self._x = x

    def run(self, forward: Callable[..., Any], x: Tensor) -> HeadCall:
        """Run a forward pass in the sandbox and return the last call of the head.

        Raises:
            ValueError: If the pass does not reach the head with a tensor of one row per sample.

        """
        was_attached = bool(self._handles)
        self.attach()
        try:
            with sandbox(partial(forward, self._model), x) as (x,), torch.no_grad():
                self.listen(x)
                self._is_own = True
                self._root = nn.Identity()  # never called, so never left: all calls count
                forward(x)
                call = self.take()
        finally:
            self._forget()
            if not was_attached:
                self.detach()
        if call is None:
            raise ValueError(
                f"Expected the forward pass to reach the head {self.name!r}, with a tensor of one row per sample "
                "in and out, but it did not. Does `forward` use it?"
            )
        return call

    def take(self) -> HeadCall | None:
        """Return the recorded call of the head, or None if the inputs did not reach it, and clear it."""
        call = self._call
        self._forget()
        return call

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    def _forget(self) -> None:
        self._x = self._call = self._root = None
        self._is_own = self._others_are_pending = False

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._x is None or self._root is not None:
            return
        values = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if any(_is_same(value, self._x) for value in values):
            self._root, self._is_own = module, True
        elif any(_is_alike(value, self._x) for value in values):
            # The modules that took the inputs before, augmentation for instance, did not lead to the head
            self._is_own, self._others_are_pending = False, True

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._x is None:
            return
        if module is self._head and self._root is None and self._others_are_pending:
            self._is_own = self._others_are_pending = False  # the call may belong to the other inputs
        if module is self._head and self._is_own:
            call = _read(module, args, kwargs, output)
            if call is not None and len(call.logits) == len(self._x):
                self._call = call
        if module is self._root:
            self._root = None
        if self._root is None and self._call is not None:
            self._x = None


def find_head(
    model: nn.Module,
    x: Tensor,
    forward: Callable[..., Any] | None = None,
    head: str | nn.Module | None = None,
) -> str:
    """Find the classifier head of a model: the last linear layer, or 1x1 convolution, whose output is the logits.

    Outputs with positions are averaged over them, and the logits may be the softmax or log-softmax of the output. If
    the network applies something else after the layer, such as the ReLU of SqueezeNet, the head is the module that
    contains both.

    Args:
        model: The module to search.
        x: A few inputs, for a forward pass in the sandbox.
        forward: Callable that computes the logits, if not the model itself.
        head: The head, by name or as a module, if it is known.

    Returns:
        Name of the head in the model.

    Raises:
        ValueError: If the head cannot be found, is not part of the model or not of its forward pass, with the
            candidates in the message, or the logits are not finite.

    Example:
        >>> import torch
        >>> from lightning_robustness.utilities.head import find_head
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 4))
        >>> find_head(model, torch.rand(5, 2))
        '2'

    """
    given = None if head is None else _name_of(model, head)
    candidates = dict(model.named_modules()) if given is None else {given: model.get_submodule(given)}
    calls: dict[str, _Output] = {}
    handles = [
        module.register_forward_hook(partial(_record, calls, name), with_kwargs=True)
        for name, module in candidates.items()
        if name == given or _may_be_head(module)
    ]
    try:
        with sandbox(partial(forward or model, model), x) as (x,), torch.no_grad():
            logits = compute_logits(forward or model, x)
    finally:
        for handle in handles:
            handle.remove()
    if given is None:
        check_finite(logits)
        return _best(calls, logits)
    if given not in calls:
        raise ValueError(
            f"Expected the head {given!r} to take part in the forward pass, with a tensor of one row per sample "
            "in and out, but it did not. Does `forward` use it?"
        )
    width = calls[given].call.logits.shape[1]
    if width != logits.shape[1]:
        raise ValueError(
            f"Expected a head whose output is the logits, of width {logits.shape[1]}, but {given!r} has width {width}."
        )
    return given


class _Output(NamedTuple):
    """Last call of a module, also with its output before copying and pooling."""

    call: HeadCall
    output: Tensor
    is_linear: bool


def _best(calls: dict[str, _Output], logits: Tensor) -> str:
    """Return the name of the module that computed the logits."""

    def rank(name: str) -> tuple[bool, float, bool]:
        difference = _difference(calls[name].call.logits, logits)
        # Two heads may have equal outputs: if they start at zero, or belong to a network and its moving average
        is_other = calls[name].output.data_ptr() != logits.data_ptr()
        return difference > tolerance or not calls[name].is_linear, difference, is_other

    tolerance = max(1e-3, 8 * torch.finfo(logits.dtype).eps)
    best = min(reversed(calls), key=rank, default=None)
    if best is None or _difference(calls[best].call.logits, logits) > tolerance:
        run = [f"{name!r} (width {call.call.logits.shape[1]})" for name, call in calls.items() if call.is_linear]
        raise ValueError(
            f"Expected a linear layer or a 1x1 convolution whose output is the logits, of width {logits.shape[1]}, but "
            f"found none. Pass the name of the head, `head=...`. Layers that were run: {', '.join(run) or 'none'}."
        )
    return best


def _difference(output: Tensor, logits: Tensor) -> float:
    """Compute the relative difference of the logits from the output of a layer, its log-softmax or its softmax."""
    if output.shape != logits.shape:
        return torch.inf
    output, logits = output.float(), logits.float()
    scores = output, output.log_softmax(dim=1), output.softmax(dim=1)
    difference = min((score - logits).abs().max().item() for score in scores)
    return difference / max(logits.abs().max().item(), torch.finfo(torch.float32).tiny)


def _name_of(model: nn.Module, head: str | nn.Module) -> str:
    names = [name for name, module in model.named_modules(remove_duplicate=False) if head in (name, module)]
    if not names:
        close = [name for name, module in model.named_modules() if _is_linear(module)]
        given = repr(head) if isinstance(head, str) else type(head).__name__
        raise ValueError(
            f"Expected `head` to be part of {type(model).__name__} but got {given}, which is not. Linear layers and "
            f"1x1 convolutions: {', '.join(close) or 'none'}."
        )
    return names[0]


def _hookable(model: nn.Module) -> list[nn.Module]:
    """List the modules to hook: scripted ones accept no hooks, and with them encoder layers lose their fast path."""
    closed = (torch.jit.ScriptModule, nn.TransformerEncoderLayer)
    left_out = {part for module in model.modules() if isinstance(module, closed) for part in module.modules()}
    return [module for module in model.modules() if module not in left_out]


def _record(
    calls: dict[str, _Output], name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    call = _read(module, args, kwargs, output)
    if call is not None:
        calls[name] = _Output(call, output, _is_linear(module))


def _is_linear(module: nn.Module) -> bool:
    if isinstance(module, _CONVOLUTIONS):
        return all(size == 1 for size in module.kernel_size)
    return isinstance(module, nn.Linear)


def _may_be_head(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, or has the parameters of one and no others."""
    owners = [part for part in module.modules() if next(part.parameters(recurse=False), None) is not None]
    return _is_linear(module) or (len(owners) == 1 and _is_linear(owners[0]))


def _read(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> HeadCall | None:
    """Copy input and output, which the network may go on to change; None if they cannot be those of a head."""
    entered = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    if entered is None or not isinstance(output, Tensor) or min(entered.ndim, output.ndim) < 2:
        return None
    return HeadCall(_pool(module, entered), _pool(module, output)) if len(entered) == len(output) else None


def _pool(module: nn.Module, value: Tensor) -> Tensor:
    """Average over positions, which come after the channels of images and signals but before the features of tokens.

    A linear map commutes with the mean, so the pooled logits are those of the pooled embedding.
    """
    value = value.detach()
    if value.ndim == 2:
        return value.clone()
    channels_first = any(isinstance(part, _CONVOLUTIONS) for part in module.modules()) or (
        value.ndim > 3 and not isinstance(module, nn.Linear)
    )
    return value.flatten(2).mean(dim=2) if channels_first else value.flatten(1, -2).mean(dim=1)


def _is_same(value: Tensor, x: Tensor) -> bool:
    """Return whether a value is the inputs, a view of all of them, or a copy, flattened or in another precision."""
    if value.shape[:1] != x.shape[:1] or value.numel() != x.numel() or value.device != x.device:
        return False
    if not value.is_floating_point():  # a mask, for instance
        return value is x
    try:
        if value is x or value.data_ptr() == x.data_ptr():
            return True
        return torch.equal(value.flatten(), x.to(value.dtype).flatten())
    except RuntimeError:  # the tensors of torch.func have no storage
        return False


def _is_alike(value: Tensor, x: Tensor) -> bool:
    """Return whether a value could be other inputs, perhaps of another size or flattened."""
    is_as_large = value.ndim > 1 and value.shape[1:].numel() == x.shape[1:].numel()
    return is_as_large or (value.ndim == x.ndim and value.shape[1:2] == x.shape[1:2])
