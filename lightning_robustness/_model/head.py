"""Record embeddings and logits during passes that the caller runs."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_robustness._isolation.sandbox import sandbox
from lightning_robustness._model.access import as_classes, compute_logits, find_logits

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# From the output of a module to the logits: a network may end in a softmax that validation leaves out
TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda output: output,
    "log_softmax": lambda output: output.log_softmax(dim=1),
    "softmax": lambda output: output.softmax(dim=1),
}


class HeadCall(NamedTuple):
    """Embedding of shape ``(N, M)``, which is the input of the head, or None; and logits of shape ``(N, K)``."""

    embedding: Tensor | None
    logits: Tensor


class HeadTap:
    """Record the embedding and the logits of a forward pass that the caller runs, without one of its own.

    ``listen`` announces a batch, and the first pass on that batch counts: the last calls inside the outermost module
    that receives it are recorded, or else the next ones after it. If it is unclear whether the batch reached the
    logits, nothing is recorded.

    Example:
        >>> import torch
        >>> from lightning_robustness._model.head import HeadTap
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 4))
        >>> x = torch.rand(5, 2)
        >>> with HeadTap(model, "2") as tap:
        ...     tap.listen(x)
        ...     logits, others = model(x), model(1 - x)
        ...     call = tap.take()
        >>> call.embedding.shape, torch.equal(call.logits, logits)
        (torch.Size([5, 3]), True)

    """

    def __init__(
        self, model: nn.Module, head: str | None, sources: Mapping[str, str] | None = None, entry: int | None = None
    ) -> None:
        self.head = head
        self.sources = {head: "identity"} if sources is None and head is not None else dict(sources or {})
        self.entry = entry
        self._model = model
        self._head: nn.Module | None = None
        self._transforms: dict[nn.Module, str] = {}
        self._handles: list[RemovableHandle] = []
        self._x: Tensor | None = None
        self._embedding: Tensor | None = None
        self._logits: Tensor | None = None
        self._root: nn.Module | None = None  # outermost module that is processing the inputs
        self._is_own = False
        self._others_are_pending = False  # other inputs entered the network but have not reached the logits yet

    def attach(self) -> None:
        """Register the hooks."""
        if self._handles:
            return
        self._head = None if self.head is None else self._model.get_submodule(self.head)
        self._transforms = {self._model.get_submodule(name): value for name, value in self.sources.items()}
        for module in hookable_modules(self._model):
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
        """Run a forward pass in the sandbox; return its logits and what entered the head last."""
        embeddings: list[Tensor | None] = []

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not is_transformed():
                embeddings.append(read_embedding(module, args, kwargs))

        with ExitStack() as stack:
            if self.head is not None:
                head = self._model.get_submodule(self.head)
                stack.enter_context(head.register_forward_pre_hook(keep, with_kwargs=True))
            (x,) = stack.enter_context(sandbox(partial(forward, self._model), x))
            with torch.no_grad():
                logits = compute_logits(forward, x).clone()
        embedding = embeddings[-1] if embeddings else None
        if self.head is not None and (embedding is None or len(embedding) != len(logits)):
            raise ValueError(
                f"Expected the forward pass to reach the head {self.head!r} with a tensor of one row per sample but it "
                "did not. Does `forward` use it?"
            )
        return HeadCall(embedding, logits)

    def take(self) -> HeadCall | None:
        """Return what was recorded, or None if the inputs did not reach the logits, and clear it."""
        embedding, logits = self._embedding, self._logits
        self._forget()
        if logits is None or (self.head is not None and (embedding is None or len(embedding) != len(logits))):
            return None
        return HeadCall(embedding, logits)

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    def _forget(self) -> None:
        self._x = self._embedding = self._logits = self._root = None
        self._is_own = self._others_are_pending = False

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._x is None or is_transformed():
            return
        if self._root is None:
            values = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            if any(is_same(value, self._x) for value in values):
                self._root, self._is_own = module, True
            elif any(_is_alike(value, self._x) for value in values):
                # The modules that took the inputs before, augmentation for instance, did not lead to the head
                self._is_own, self._others_are_pending = False, True
        if module is self._head and self._is_own:
            self._embedding = read_embedding(module, args, kwargs)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._x is None or is_transformed():
            return
        transform = self._transforms.get(module)
        if transform is not None and self._root is None and self._others_are_pending:
            self._is_own = self._others_are_pending = False  # the call may belong to the other inputs
        if transform is not None and self._is_own:
            logits = read_logits(module, output, transform, self.entry, len(self._x))
            self._logits = self._logits if logits is None else logits
        if module is self._root:
            self._root = None
        if self._root is None and self._logits is not None:
            self._x = None


def is_transformed() -> bool:
    """Return whether a transform of ``torch.func`` is under way, such as ``vmap``, whose tensors must not leave it."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def hookable_modules(model: nn.Module) -> list[nn.Module]:
    """List the modules to hook: scripted ones accept no hooks, and with them encoder layers lose their fast path."""
    closed = (torch.jit.ScriptModule, nn.TransformerEncoderLayer)
    left_out = {part for module in model.modules() if isinstance(module, closed) for part in module.modules()}
    return [module for module in model.modules() if module not in left_out]


def read_embedding(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Copy the input of a layer, averaged over positions; None unless it is a tensor of numbers with features."""
    entered = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    if entered is None or entered.ndim < 2 or not entered.is_floating_point():
        return None
    return pool(module, entered)


def read_logits(module: nn.Module, output: Any, transform: str, entry: int | None, num_samples: int) -> Tensor | None:
    """Copy the logits in the output of a module; None if there are none."""
    if entry is None and isinstance(output, (tuple, list)) and not isinstance(getattr(output, "logits", None), Tensor):
        return None
    found = find_logits(output, entry)
    if found is None or not found.is_floating_point():
        return None
    classes = as_classes(pool(module, found), num_samples)
    return None if classes is None else TRANSFORMS[transform](classes)


def pool(module: nn.Module, value: Tensor) -> Tensor:
    """Copy a value, averaged over positions.

    They come after the channels of images and signals but before the features of tokens. A linear map commutes with
    the mean, so the pooled logits are the logits of the pooled embedding.
    """
    value = value.detach()
    if value.ndim <= 2:
        return value.clone()
    channels_first = any(isinstance(part, _CONVOLUTIONS) for part in module.modules()) or (
        value.ndim > 3 and not isinstance(module, nn.Linear)
    )
    return value.flatten(2).mean(dim=2) if channels_first else value.flatten(1, -2).mean(dim=1)


def is_same(value: Tensor, x: Tensor) -> bool:
    """Return whether a value is the inputs, a view of all of them, or a copy, flattened or in another precision."""
    if value.shape[:1] != x.shape[:1] or value.numel() != x.numel() or value.device != x.device:
        return False
    if not value.is_floating_point():  # tokens or, next to other inputs, a mask
        return value is x or (value.dtype == x.dtype and value.shape == x.shape and torch.equal(value, x))
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
