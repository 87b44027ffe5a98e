"""Other entries of a batch that a model takes beside its inputs, such as an attention mask."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class ExtraInputs:
    """Calls of a model with the entries that belong to its inputs.

    Args:
        names: Names of the entries that the model takes.
        keyword: Name that the model takes its inputs under; None for its first argument.

    Attributes:
        values: The entries, with one row per input, or with a single row that belongs to all of them: attacks run a
            model on some of their inputs, so they see inputs with equal entries at a time.

    """

    def __init__(self, names: Iterable[str], keyword: str | None = None) -> None:
        self.names = tuple(names)
        self.keyword = keyword
        self.values: Mapping[str, Tensor] = {}

    def call(self, forward: Callable[..., Any], x: Tensor) -> Any:
        """Run a model on inputs.

        Raises:
            ValueError: If it is unclear which rows of the entries belong to the inputs.

        """
        values = {name: self.values[name].to(x.device) for name in self.names if name in self.values}
        if any(len(value) not in (1, len(x)) for value in values.values()):
            raise ValueError(
                f"Expected as many inputs as {', '.join(values)} have rows but got {len(x)}: an attack that drops "
                "samples cannot take them along. Pass `all_steps=True`, or an attack that keeps all samples."
            )
        rows = {name: v.expand(len(x), *v.shape[1:]) if len(v) == 1 else v for name, v in values.items()}
        return forward(x, **rows) if self.keyword is None else forward(**{self.keyword: x}, **rows)

    def bind(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Make a callable that takes the inputs alone."""
        return partial(self.call, forward)


def embed_and_call(forward: Callable[..., Any], embed: Callable[..., Any], x: Tensor) -> Any:
    """Run a model on the embeddings of what a loader gives."""
    return forward(embed(x))


def find_extra_inputs(forward: Callable[..., Any], name: str | None, extras: Iterable[str]) -> ExtraInputs | None:
    """Find out how a model takes inputs, from the names of its arguments.

    Args:
        forward: The model, or a callable that takes its inputs first.
        name: Name of the inputs in the batch, if they have one.
        extras: Names of the other entries.

    Returns:
        How to call the model, or None if it takes its inputs as the first argument and nothing else from the batch.

    """
    try:
        parameters = inspect.signature(forward.forward if isinstance(forward, nn.Module) else forward).parameters
    except (TypeError, ValueError):  # compiled or built-in functions have none
        return None
    positional = [p.name for p in parameters.values() if p.kind in _POSITIONAL]
    takes_all = not positional and any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    keyword = name if name is not None and (takes_all or name in positional[1:]) else None
    taken = [extra for extra in extras if takes_all or extra in positional[0 if keyword else 1 :]]
    return ExtraInputs(taken, keyword) if taken or keyword is not None else None
