"""Find out how the logits come about while ``validation_step`` runs, without a forward pass of our own."""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_robustness.utilities.head import HeadCall, hookable_modules, is_same, read_embedding
from lightning_robustness.utilities.logits_route import Call, Route, copy_output, is_layer, name_of, trace_logits
from lightning_robustness.utilities.sandbox import is_compiled

NOT_SEEN = (
    "Expected `validation_step` to run the network on the inputs of its batch as they are but it did not. Where "
    "parameters are sharded, values come from hooks alone: no process can run a forward pass by itself. Let the loader "
    "or `forward` prepare the inputs, instead of `validation_step`."
)


class StepRoute:
    """Record one validation step, and find the route of its logits.

    For networks whose parameters are sharded over processes, where every forward pass is a joint one of all processes.
    The logits are those of the outermost module that takes the inputs of the batch.

    Args:
        model: The module.
        x: Inputs of the batch.
        head: The head, by name or as a module, instead of looking for it.

    Raises:
        ValueError: If the head is not part of the model, or the model is compiled, which hooks do not reach.

    """

    def __init__(self, model: nn.Module, x: Tensor, head: str | nn.Module | None = None) -> None:
        if is_compiled(model.modules()):
            raise ValueError(
                "Expected a network that is not compiled but got one with `torch.compile`. The parameters are sharded, "
                "so values come from hooks alone, which do not reach compiled code. Leave `torch.compile` out."
            )
        self._model = model
        self._x = x
        self._given = None if head is None else name_of(model, head)
        self._calls: list[Call] = []
        self._root: nn.Module | None = None  # outermost module that is processing the inputs
        self._output: Any = None
        self._later: list[tuple[str, tuple[int, ...]]] = []  # layers that run after it, and the shapes they take
        self._handles: list[RemovableHandle] = []
        hookable = set(hookable_modules(model))
        for name, module in model.named_modules():
            if module in hookable and "parametrizations" not in name.split("."):
                enter = module.register_forward_pre_hook(self._enter, with_kwargs=True)
                leave = module.register_forward_hook(partial(self._leave, name), with_kwargs=True)
                self._handles += [enter, leave]

    def close(self) -> None:
        """Remove all hooks."""
        while self._handles:
            self._handles.pop().remove()

    def find(self, y: Tensor | None) -> tuple[Route, HeadCall]:
        """Return the route after the step has run, and the embedding and logits of its batch.

        Args:
            y: Labels of the batch, if there are any.

        Raises:
            ValueError: If the step did not run the network on the inputs, or what ran it did not return logits.

        """
        if self._output is None:
            raise ValueError(NOT_SEEN)
        highest = -1 if y is None or len(y) == 0 else int(y.max())
        route, call = trace_logits(self._model, self._calls, self._output, self._x, self._given, highest)
        for name, shape in self._later:
            if shape == call.logits.shape and name not in route.modules:
                raise ValueError(
                    f"Expected `forward` to return logits but `validation_step` goes on with {name!r}, a layer that "
                    f"`forward` does not run, which takes {shape[1]} features, as many as `forward` returns. Let "
                    "`forward` end in it: where parameters are sharded, `forward_fn` is not called."
                )
        return route, call

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._root is None and self._output is None:
            values = (*args, *kwargs.values())
            if any(isinstance(value, Tensor) and is_same(value, self._x) for value in values):
                self._root = module

    def _leave(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        entered = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if self._root is None:
            if self._output is not None and entered and is_layer(module):
                self._later.append((name, tuple(entered[0].shape)))
            return
        # Of what goes in and comes out, only what may be features or logits is kept: activations are large
        kept = tuple(value for value in entered if value.ndim <= 2)
        returned = (output,) if isinstance(output, Tensor) and output.ndim <= 2 else ()
        embedding = read_embedding(module, args, kwargs)
        self._calls.append(Call(name, module, kept, embedding, copy_output(output, module), [], returned))
        if module is self._root:
            self._root, self._output = None, output
