from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_robustness._isolation.sandbox import is_compiled, is_sandboxed, sandbox
from lightning_robustness._model.batch import Batch
from lightning_robustness._model.head import (
    HeadCall,
    hookable_modules,
    is_same,
    is_transformed,
    read_embedding,
    read_logits,
)
from lightning_robustness._model.route import Call, Route, copy_output, is_layer, name_of, trace_logits
from lightning_robustness._processes import rank_zero_warn

# Largest difference of logits, relative to their size: mixed precision stays below it
_TOLERANCE = 0.05
# Operations that may lie between the output of `forward` and the next layer, by their source text
_BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {"": lambda z: z, ".relu()": lambda z: z.relu()}


class _Later(NamedTuple):
    """A call of a layer that ``forward`` does not run: its name, input and number of outputs."""

    name: str
    entered: Tensor
    width: int


class StepCheck:
    """Watch one validation step, and find out whether it computes the logits of ``forward``.

    It does not if it runs a layer on what ``forward`` returns, or runs the network on other inputs than the batch has
    or several times, and gets other logits.
    """

    step = "validation_step"

    def __init__(self, model: nn.Module, route: Route, x: Tensor) -> None:
        self._route = route
        self._num_samples = len(x)
        self._logits: dict[str, list[Tensor]] = {}  # of each call, by module
        self._later: list[_Later] = []
        self._hooks = ExitStack()
        hookable = set(hookable_modules(model))
        for name, module in model.named_modules():
            if module not in hookable:
                continue
            if name in route.sources:
                self._hooks.enter_context(module.register_forward_hook(partial(self._keep_logits, name)))
            elif name not in route.modules and is_layer(module):
                self._hooks.enter_context(module.register_forward_hook(partial(self._keep_later, name)))

    def close(self) -> None:
        """Remove all hooks."""
        self._hooks.close()

    def compare(self, logits: Tensor, is_ours: bool, y: Tensor | None) -> None:
        """Compare the step with the logits of ``forward`` on the same batch."""
        highest = -1 if y is None or len(y) == 0 else int(y.max())
        for later in self._later:
            if later.entered.shape == logits.shape and max(later.width, 2) > highest:
                raise ValueError(self._describe_later(later, logits))
        calls = [[_are_alike(other, logits) for other in own] for own in self._logits.values() if len(logits)]
        if any(len(are_alike) > 1 and any(are_alike) and not all(are_alike) for are_alike in calls):
            rank_zero_warn(
                "RobustnessMonitor: `validation_step` runs the network several times per batch, with different logits. "
                "All values come from the first pass on the unchanged inputs. If the step combines the passes, as "
                "test-time augmentation does, pass `forward_fn=`, a callable that takes the module and inputs and "
                "returns the combined logits."
            )
        if is_ours and calls and not any(any(are_alike) for are_alike in calls):
            raise ValueError(
                "Expected validation to run the network on the unchanged inputs of its batch but it runs it on other "
                "inputs and gets other logits. If `validation_step` prepares inputs, by normalising them for instance, "
                "pass `forward_fn=`, a callable that takes the module and inputs, prepares them in the same way and "
                "returns logits. If what `forward` makes of the batch is meant, pass "
                "`forward_fn=lambda module, x: module(x)`."
            )

    def _describe_later(self, later: _Later, logits: Tensor) -> str:
        name = f"module.{later.name}"
        if any(part.isdigit() for part in later.name.split(".")):
            name = f"module.get_submodule({later.name!r})"
        forms = [
            form for form, apply in _BETWEEN.items() if torch.allclose(later.entered, apply(logits).to(later.entered))
        ]
        how = (
            f"`forward_fn=lambda module, x: {name}(module(x){forms[0]})`"
            if forms
            else "a `forward_fn=` that ends in it"
        )
        return (
            f"{_also_runs(self.step, later.name, logits)}, to {later.width}. If `forward` returns an embedding, pass "
            f"{how}. If it does return logits, pass `forward_fn=lambda module, x: module(x)`."
        )

    def _keep_logits(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if _is_aside():
            return
        logits = read_logits(module, output, self._route.sources[name], self._route.entry, self._num_samples)
        if logits is not None:
            self._logits.setdefault(name, []).append(logits)

    def _keep_later(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        entered = next((value for value in args if isinstance(value, Tensor)), None)
        is_matrix = isinstance(output, Tensor) and output.ndim == 2 and not _is_aside()
        if entered is not None and is_matrix and len(entered) == self._num_samples:
            self._later.append(_Later(name, entered.detach().clone(), output.shape[1]))


class TrainingCheck(StepCheck):
    """Watch one training step, and find out whether it runs the network as ``forward`` does.

    In train mode, dropout and BatchNorm make logits differ, so inputs are compared. Augmentation changes them on
    purpose; to normalise them alone is a part of the network, which attacks would leave out.
    """

    step = "training_step"

    def __init__(self, model: nn.Module, route: Route, x: Tensor) -> None:
        super().__init__(model, route, x)
        self._x = x.detach().clone()  # a step may change it in place
        self._entered: list[tuple[nn.Module, Tensor]] = []  # first inputs of the network that are others
        self._is_own = False
        for module in set(hookable_modules(model)) & {model.get_submodule(name) for name in route.modules}:
            self._hooks.enter_context(module.register_forward_pre_hook(self._enter, with_kwargs=True))

    def check_layers(self, y: Tensor | None) -> bool:
        """Refuse a step that runs a layer on what ``forward`` returns; return whether the network ran at all."""
        highest = -1 if y is None or len(y) == 0 else int(y.max())
        for later in self._later if len(self._x) else ():
            for logits in chain.from_iterable(self._logits.values()):
                follows = any(_are_alike(later.entered, apply(logits)) for apply in _BETWEEN.values())
                if follows and max(later.width, 2) > highest:
                    raise ValueError(self._describe_later(later, logits))
        return self._is_own or bool(self._entered)

    def find_scaling(self, forward: Callable[..., Any]) -> Tensor | None:
        """Return the slope and offset of each channel if the step normalises its inputs and ``forward`` does not."""
        if self._is_own or not self._entered:
            return None
        module, entered = self._entered[0]
        scaling = _fit_scaling(self._x, entered)
        if scaling is None:
            return None
        seen: list[Tensor] = []
        with sandbox(forward, self._x) as (x,), torch.no_grad(), ExitStack() as stack:
            stack.enter_context(module.register_forward_pre_hook(lambda _, args: seen.extend(filter(_is_float, args))))
            forward(x)
        return None if any(_are_alike(value, entered) for value in seen) else scaling

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_own or _is_aside():
            return
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and is_same(value, self._x):
                self._is_own = True
            elif _is_float(value) and value.shape == self._x.shape and not self._entered:
                self._entered.append((module, value.detach().clone()))


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_aside() -> bool:
    """Return whether a call is none of the step itself: of a transform, or of an attack that the step runs."""
    return is_transformed() or is_sandboxed() or torch.compiler.is_compiling()


def _fit_scaling(x: Tensor, entered: Tensor) -> Tensor | None:
    """Return slope and offset by which other inputs come from given ones, in each channel, if they all do."""
    if x.ndim < 2 or len(x) < 4:  # any two samples lie on a line
        return None
    first, second = (value.float().transpose(0, 1).flatten(1) for value in (x, entered))
    means = first.mean(dim=1, keepdim=True), second.mean(dim=1, keepdim=True)
    slope = ((first - means[0]) * (second - means[1])).sum(dim=1, keepdim=True)
    slope = slope / (first - means[0]).square().sum(dim=1, keepdim=True).clamp(min=1e-12)
    offset = means[1] - slope * means[0]
    is_fit = (slope * first + offset - second).abs().max() <= 0.01 * (second - means[1]).abs().max()
    return torch.cat([slope, offset]) if bool(is_fit) and bool(slope.any()) and not _are_alike(entered, x) else None


def _are_alike(first: Tensor, second: Tensor) -> bool:
    difference = first.to(second.dtype) - second if first.shape == second.shape else second.new_tensor(torch.inf)
    return bool(difference.abs().max() <= _TOLERANCE * second.abs().max())


def _also_runs(step: str, name: str, logits: Tensor) -> str:
    """Say that a step runs a layer on what ``forward`` returns."""
    return (
        f"Expected `forward` to return logits but `{step}` also runs {name!r}, a layer that `forward` does "
        f"not run, which takes {logits.shape[1]} features, as many as `forward` returns"
    )


NOT_SEEN = (
    "Expected `validation_step` to run the network on the unchanged inputs of its batch but it did not. Where "
    "parameters are sharded, values come from hooks alone: no process can run a forward pass by itself. Let the loader "
    "or `forward` prepare the inputs, instead of `validation_step`."
)


class StepRoute:
    """Record one validation step, and find the route of its logits.

    Where parameters are sharded, every forward pass is a joint one of all processes, so none can be run for this.
    """

    def __init__(self, model: nn.Module, batch: Batch, head: str | nn.Module | None = None) -> None:
        if is_compiled(model.modules()):
            raise ValueError(
                "Expected a network that is not compiled but got one with `torch.compile`. The parameters are sharded, "
                "so values come from hooks alone, which do not reach compiled code. Leave `torch.compile` out."
            )
        self.batch = batch
        self._model = model
        self._given = None if head is None else name_of(model, head)
        self._calls: list[Call] = []
        self._root: nn.Module | None = None  # outermost module that is processing the inputs
        self._output: Any = None
        self._later: list[tuple[str, tuple[int, ...]]] = []  # layers that run after it, and the shapes they take
        self._hooks = ExitStack()
        hookable = set(hookable_modules(model))
        for name, module in model.named_modules():
            if module in hookable and "parametrizations" not in name.split("."):
                self._hooks.enter_context(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                self._hooks.enter_context(module.register_forward_hook(partial(self._leave, name), with_kwargs=True))

    def close(self) -> None:
        """Remove all hooks."""
        self._hooks.close()

    def find(self) -> tuple[Route, HeadCall]:
        """Return the route after the step has run, and the embedding and logits of its batch."""
        if self._output is None:
            raise ValueError(NOT_SEEN)
        x, highest = self.batch.x, self.batch.highest_label
        route, call = trace_logits(self._model, self._calls, self._output, x, self._given, highest)
        for name, shape in self._later:
            if shape == call.logits.shape and name not in route.modules:
                raise ValueError(
                    f"{_also_runs(StepCheck.step, name, call.logits)}. Let `forward` end in it: where parameters are "
                    "sharded, `forward_fn` is not called."
                )
        return route, call

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._root is None and self._output is None and not is_transformed():
            values = (*args, *kwargs.values())
            if any(isinstance(value, Tensor) and is_same(value, self.batch.x) for value in values):
                self._root = module

    def _leave(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if is_transformed():
            return
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
